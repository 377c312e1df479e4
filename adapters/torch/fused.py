"""Whether an optimizer takes clip and skip inside its kernel, without the host.

The fused Adam, AdamW, SGD and Adagrad kernels divide the gradients by `optimizer.grad_scale` and,
told so by `optimizer.found_inf`, leave parameters, moments and step counters alone. It is how
GradScaler unscales and skips; `_step_supports_amp_scaling` is torch's own name for it. torch's
other optimizers do nothing for a parameter whose `.grad` is None, and the step() of somebody
else's is left out (`own_step`): both need the host.
"""

from __future__ import annotations

from typing import Literal

from torch.optim import Optimizer

from healcore.torch.errors import AttachError
from healcore.torch.own_step import is_foreign


def obstacle(optimizer: Optimizer, wanted: bool | Literal["auto"]) -> str | None:
    """Why the fused kernels' flags cannot be used, or None if they can.

    Args:
        optimizer: a torch optimizer.
        wanted: False, never use them; True, the caller vouches for a `step()` that healcore does
            not know; "auto", only where they are known to be honoured.

    Raises:
        AttachError: True for an optimizer that ignores them, or something else altogether.
    """
    if wanted not in (True, False, "auto"):
        raise AttachError(f"fused must be True, False or 'auto', got {wanted!r}")
    if not wanted:
        return "asked for with fused=False"
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
    if reason is None and wanted == "auto" and is_foreign(optimizer):
        # It may do its own arithmetic, or add to that of super().step(); its `fused` only says
        # what the base class would do. Without gradients both halves stand still.
        reason = (
            f"{name} has a step() of its own, which may not honour found_inf "
            "(if it only wraps super().step(), attach with fused=True)"
        )
    return reason


def is_on(optimizer: Optimizer) -> bool:
    """Whether every group runs the fused kernel; `load_state_dict` can change a group's flag."""
    return all(group.get("fused") for group in optimizer.param_groups)
