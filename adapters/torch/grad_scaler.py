"""Steps that a GradScaler skips after an overflow, with or without calling the optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

SEARCH = 40
"""Consecutive overflows that a GradScaler may need to find its scale, from its default 2^16 to
below 2^-23. At that scale only non-finite gradients overflow."""


class DroppedSteps:
    """Detects, without a sync, that a GradScaler skipped a step without calling the optimizer.

    After an overflow a GradScaler does not call `step()` of an optimizer that is not fused. But
    `update()` replaces the scaler's per-optimizer records. The old records show whether the loop
    asked the scaler to step this optimizer.

    Attributes:
        scaler: the GradScaler passed to `attach`, or None.
        stepped: whether the optimizer has stepped since the last `update()`; the caller sets it.
    """

    def __init__(self, scaler: GradScaler | None, optimizer: Optimizer) -> None:
        self.scaler = scaler
        self.stepped = False
        self._key = id(optimizer)
        self._records = self._current()

    def found(self) -> bool:
        """Whether a step was skipped since the last call. Call it at least once per step."""
        records = self._current()
        if records is self._records:
            return False
        old, self._records = self._records, records
        stepped, self.stepped = self.stepped, False
        asked = old is not None and self._key in old and old[self._key]["stage"] is OptState.STEPPED
        return asked and not stepped

    def _current(self) -> Any:
        return getattr(self.scaler, "_per_optimizer_states", None)


class Overflows:
    """Distinguishes a GradScaler's search for its scale from gradients that overflow at any scale.

    After an overflow a scaler skips the step and halves its scale, which is normal. After `search`
    consecutive overflows the gradients overflow at any scale, and the steps count as non-finite.
    """

    def __init__(self, home: torch.device, search: int = SEARCH) -> None:
        self._home = home
        self._search = search
        self._consecutive: Tensor | None = None

    def externally_skipped(self, found_inf: Tensor) -> Tensor:
        """Whether the engine ignores this step, 0-d bool. `found_inf` above 0 is an overflow."""
        if self._consecutive is None:
            self._consecutive = torch.zeros((), dtype=torch.int32, device=self._home)
        overflowed = found_inf > 0
        self._consecutive = torch.where(overflowed, self._consecutive + 1, 0)
        return overflowed & (self._consecutive <= self._search)

    def reset(self) -> None:
        """Restarts the count, because a step without a scaler's flag has reached the optimizer."""
        self._consecutive = None
