"""Optimizers without second moments per element: which it is, to say why there is no verdict."""

from __future__ import annotations

from collections.abc import Collection

from healcore.tools.probe.contents import Array
from healcore.tools.probe.optimizer.slots import Path, Tree

_FACTORED = "Adafactor keeps factored second moments, not one per element"
_SGD = "SGD with momentum has no second moments"
_MOMENTUM = "there is momentum without second moments, as Lion and Muon have it"
_UNLIKE = "is not of Adam's kind"

_TORCH = {
    "exp_avg_sq_row": _FACTORED,
    "row_var": _FACTORED,
    "momentum_buffer": _SGD,
    "exp_avg_var": f"AdaBelief keeps the variance of gradients and {_UNLIKE}",
    "square_avg": f"RMSprop (or Adadelta) {_UNLIKE}",
    "sum": f"Adagrad {_UNLIKE}",
    "exp_inf": f"Adamax {_UNLIKE}",
    "step_size": f"Rprop {_UNLIKE}",
    "hessian": f"Sophia {_UNLIKE}",
    "exp_avg": _MOMENTUM,
    "state1": _MOMENTUM,
}
"""The last part of a path below `state`; earlier ones say more."""
_OPTAX = {
    "v_row": _FACTORED,
    "trace": _SGD,
    "sum_of_squares": f"Adagrad {_UNLIKE}",
    "nu": f"RMSprop, or another state with nu but without mu of the same shape, {_UNLIKE}",
    "mu": _MOMENTUM,
}
"""Any part of a path but the first."""
_QUANTIZED = "8-bit states ({}) are quantized: they say nothing until they are unpacked"


def reason(tree: Tree, judged: Collection[Array]) -> str | None:
    """Why nothing can be said of some of the states in it; None if none is of such a kind.

    Args:
        tree: the checkpoint.
        judged: its arrays of which something can be said.
    """
    known = {array.path for array in judged}
    below_state, anywhere = set(), set()
    for path, array in tree.arrays.items():
        if array.path in known:
            continue
        if array.dtype in ("uint8", "int8") and path[-1] in ("state1", "state2"):
            return _QUANTIZED.format("bitsandbytes")
        if array.dtype in ("uint8", "int8") and path[-1] == "codes":
            return _QUANTIZED.format("torchao")
        if "state" in path[:-1]:
            below_state.add(path[-1])
        anywhere.update(name for name in path[1:] if name != "mu" or _counted(tree, path))
    return next(
        (
            told
            for names, table in ((below_state, _TORCH), (anywhere, _OPTAX))
            for name, told in table.items()
            if name in names
        ),
        None,
    )


def _counted(tree: Tree, path: Path) -> bool:
    """Whether the `mu` in a path has a `count` beside it: a parameter may have the name too."""
    return (*path[: path.index("mu")], "count") in tree.arrays
