"""Describes errors about the shapes of tensors, with the layer that raised them."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_BEGINNINGS = (
    # torch
    "mat1 and mat2 shapes cannot be multiplied",
    "mat1 and mat2 must have the same",
    "The size of tensor a",
    "The expanded size of the tensor",
    "Expected input batch_size",
    "Expected size for first two dimensions",
    "Given groups=",
    "Given normalized_shape=",
    "Sizes of tensors must match",
    "Tensors must have same number of dimensions",
    "Target size (",
    "Using a target size",
    "running_mean should contain",
    "shape '[",
    "size mismatch",
    "stack expects each tensor to be equal size",
    # jax and NumPy
    "cannot reshape array of",
    "dot_general requires",
    "matmul: Input operand",
    "operands could not be broadcast",
    "Incompatible shapes for broadcasting",
)
"""Fixed beginnings of messages. JAX may put the name of a primitive before its message."""

_TYPES = (RuntimeError, ValueError, TypeError)
_LIBRARIES = tuple(Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib", "platlib"))


def shape_diagnosis(error: BaseException | None) -> str:
    """Diagnosis of an error about shapes, as text; an empty string for any other error."""
    if not isinstance(error, _TYPES):
        return ""
    message = str(error)
    in_jax = "got incompatible shapes for broadcasting" in message.partition("\n")[0]
    if not (in_jax or message.startswith(_BEGINNINGS)):
        return ""
    return (
        f"Shapes of tensors do not fit{_place(error)}: {message.splitlines()[0]:.200}. Compare the "
        "sizes of the layers with the batch: the last batch may be smaller, and inputs and labels "
        "may be padded to different lengths."
    )


def _place(error: BaseException) -> str:
    """The innermost layer whose `forward` raised, and the innermost line outside of libraries."""
    layers: list[str] = []
    lines: list[str] = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_name in ("forward", "__call__") and "self" in frame.f_locals:
            layers.append(type(frame.f_locals["self"]).__name__)
        path = Path(code.co_filename)
        if not any(path.is_relative_to(folder) for folder in _LIBRARIES):
            lines.append(f"{path.name}, line {line}")
    layer = f" in {layers[-1]}" if layers else ""
    return f"{layer} ({lines[-1]})" if lines else layer
