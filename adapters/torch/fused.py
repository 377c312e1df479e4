"""Whether an optimizer can clip and skip inside its fused kernel, without the host.

The fused Adam, AdamW, SGD and Adagrad kernels divide the gradients by `optimizer.grad_scale`, and
leave parameters, moments and step counters alone where `optimizer.found_inf` is 1. It is how
GradScaler unscales and skips; torch's flag for it is `_step_supports_amp_scaling`. To skip a step
of torch's other optimizers the gradients are hidden, and the step() of a third-party optimizer is
not run (`third_party_step`): both need the decision on the host.
"""

from __future__ import annotations

from typing import Literal

from torch.optim import Optimizer

from healcore.torch.errors import AttachError
from healcore.torch.third_party_step import is_third_party


def obstacle(optimizer: Optimizer, wanted: bool | Literal["auto"]) -> str | None:
    """Why the fused kernels' flags cannot be used, or None if they can.

    Args:
        optimizer: a torch optimizer.
        wanted: False: never use them. True: the caller asserts that an unknown `step()` honours
            them. "auto": only where they are known to be honoured.

    Raises:
        AttachError: `wanted` is True for an optimizer that ignores them, or none of the three.
    """
    if wanted not in (True, False, "auto"):
        raise AttachError(f"fused must be True, False or 'auto', got {wanted!r}")
    if not wanted:
        return "set by fused=False"
    name = type(optimizer).__name__
    reason = None
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        reason = f"{name} was not built with fused=True"
    elif not is_on(optimizer):
        reason = f"a parameter group of this {name} has fused off"
    if reason is not None and wanted is True:
        raise AttachError(
            f"fused=True needs the fused kernels, but {reason}: "
            "build the optimizer with fused=True, or leave it to 'auto'"
        )
    if reason is None and wanted == "auto" and is_third_party(optimizer):
        # It may compute the update itself, or add to that of super().step(); its `fused` only says
        # what the base class would do. Without gradients neither does anything.
        reason = (
            f"{name} has a step() of its own, which may not honour found_inf "
            "(if it only wraps super().step(), attach with fused=True)"
        )
    return reason


def is_on(optimizer: Optimizer) -> bool:
    """Whether every group runs the fused kernel; `load_state_dict` can change a group's flag."""
    return all(group.get("fused") for group in optimizer.param_groups)
