"""Errors of operations on arrays, and what to check: shapes, indices, donated arrays.

Frameworks have no types for such errors: they raise RuntimeError, ValueError, TypeError and
IndexError. A message counts only if an operation raised the error: code of an array library, or a
call into compiled code. A `raise` of the program itself does not count.
"""

from __future__ import annotations

import dis
import re

SHAPES = (
    "Shapes do not fit: compare the shapes of the batch with those that the model expects. Usual "
    "reasons are a smaller last batch (drop_last=True), samples without padding to one length, "
    "another number of classes or channels, a checkpoint of another model."
)
INDICES = (
    "An index is too large for its table: compare token ids with the size of the vocabulary, and "
    "labels with the number of classes."
)
DONATED = (
    "The array was donated to a compiled function (donate_argnums), which has used its memory for "
    "other values. Read the state that this function has returned. In a loop with a Healer, begin "
    "each step with healer.state, and write `state = healer.update(state)` after each step."
)

_TYPES = {
    "builtins.RuntimeError",
    "builtins.ValueError",
    "builtins.TypeError",
    "builtins.IndexError",
    "builtins.AssertionError",
    "flax.errors.ScopeParamShapeError",
}
"""Types with their modules. A subclass of a builtin type, as in `jax.errors`, says what it is."""
_XLA_TYPES = {*_TYPES, "jax.errors.JaxRuntimeError", "jaxlib._jax.XlaRuntimeError"}
"""Types with which JAX says that an array was donated."""
_LIBRARIES = {
    "torch",
    "jax",
    "jaxlib",
    "numpy",
    "flax",
    "optax",
    "equinox",
    "einops",
    "opt_einsum",
}
"""Packages whose `raise` is about the operation, and not a check of the program."""
_INDEX = re.compile(
    r"index -?\d+ is out of bounds for|index out of range in self|Target -?\d+ is out of bounds"
    r"|Index \d+ of input takes value|Class values must be smaller than num_classes"
    # On a GPU the kernel checks the index.
    r"|(CUDA|HIP) error: device-side assert triggered"
)
_DONATED = re.compile(r"Array has been deleted|[Bb]uffer has been deleted or donated")
_SHAPE = re.compile(
    r"\b(shapes?|sizes?|dimensions?|dimensional|dim|channels?|batch_size|broadcast\w*)\b"
    r"|elements not \d",
    re.IGNORECASE,
)


def hint_about(error: BaseException) -> tuple[str, str]:
    """Recognizes an error of an operation on arrays.

    Args:
        error: any exception, with its traceback: an exception that was never raised counts as one
            of the program.

    Returns:
        The sign and the advice: "shapes" and `SHAPES`, "index out of range" and `INDICES`, or
        "donated array" and `DONATED`. Two empty strings for any other exception.
    """
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    if name not in _XLA_TYPES or not _is_of_operation(error):
        return "", ""
    text = str(error)[:2000]
    if _DONATED.search(text):
        return "donated array", DONATED
    if name not in _TYPES:
        return "", ""
    if _INDEX.match(text):
        return "index out of range", INDICES
    if _SHAPE.search(text):
        return "shapes", SHAPES
    return "", ""


def _is_of_operation(error: BaseException) -> bool:
    """Whether an array library or compiled code raised the error, by its innermost frame."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False  # never raised
    module = str(last.tb_frame.f_globals.get("__name__", ""))
    if module.startswith("torch.distributions."):
        return False  # a check of values, whose message names the shape of the values
    if module.partition(".")[0] in _LIBRARIES:
        return True
    # A call into compiled code has no frame: the innermost frame is the caller's, and its current
    # instruction is the call. If the instruction is a `raise`, the program raised the error.
    instruction = last.tb_frame.f_code.co_code[last.tb_lasti]
    return instruction != dis.opmap["RAISE_VARARGS"]
