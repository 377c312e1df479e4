"""The two attributes through which GradScaler, and healcore, talk to a fused kernel.

For a fused optimizer `GradScaler.step` sets `optimizer.grad_scale` and `optimizer.found_inf`,
calls `optimizer.step()`, then *deletes* both; it also multiplies its scale by a `grad_scale` that
it finds set, and after `unscale_` it hands on what it finds. So nothing of ours may lie there
between steps, and what lay there before a step must lie there after it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_ABSENT = object()


class AmpAttributes:
    """Lends `grad_scale` and `found_inf` new values for one step."""

    def __init__(self) -> None:
        self._lent: list[tuple[str, Tensor, Any]] = []

    @staticmethod
    def read(optimizer: Optimizer) -> tuple[Tensor | None, Tensor | None]:
        """What a GradScaler (or the user) has set for the step that begins.

        Returns:
            `(grad_scale, found_inf)`, 0-d float32 tensors on the scaler's device, or None.
        """
        scale, found = (optimizer.__dict__.get(name) for name in ("grad_scale", "found_inf"))
        return (
            scale if isinstance(scale, Tensor) else None,
            found if isinstance(found, Tensor) else None,
        )

    def lend(
        self, optimizer: Optimizer, *, grad_divisor: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Sets what is not None, until `restore`."""
        for name, value in (("grad_scale", grad_divisor), ("found_inf", found_inf)):
            if value is not None:
                self._lent.append((name, value, optimizer.__dict__.get(name, _ABSENT)))
                setattr(optimizer, name, value)

    def restore(self, optimizer: Optimizer) -> None:
        """Puts both back as they were, unless somebody has set them anew (after an exception)."""
        for name, lent, before in self._lent:
            if optimizer.__dict__.get(name) is not lent:
                continue
            if before is _ABSENT:
                delattr(optimizer, name)
            else:
                setattr(optimizer, name, before)
        self._lent.clear()


class ScalerWindow:
    """Notices that a GradScaler threw a step away without telling the optimizer.

    For an optimizer that is not fused the scaler simply does not call `step()` after an overflow:
    no hook runs, and the losses of that step would count towards the next one. But `update()`
    replaces the scaler's per-optimizer records, and their identity can be compared.

    Args:
        scaler: the GradScaler, or None when there is none.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self._scaler = scaler
        self._records: Any = None

    def moved_on(self) -> bool:
        """Whether `update()` ran since the last call; call it once per observed loss."""
        if self._scaler is None:
            return False
        records = getattr(self._scaler, "_per_optimizer_states", None)
        moved = self._records is not None and records is not self._records
        self._records = records
        return moved
