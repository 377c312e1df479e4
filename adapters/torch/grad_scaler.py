"""`DroppedSteps` and `Overflows`: steps in which a GradScaler finds an overflow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from healcore.core.signals import Signals

MAX_OVERFLOWS = 40
"""Consecutive overflows that a GradScaler may need to find its scale, from its default 2^16 to
below 2^-23. At that scale only non-finite gradients overflow."""


class DroppedSteps:
    """Detects, without a sync, that a GradScaler skipped a step without calling the optimizer.

    After an overflow a GradScaler does not call `step()` of an optimizer that is not fused. But
    `update()` replaces the scaler's per-optimizer records. The old records show whether the loop
    asked the scaler to step this optimizer:

        asked, and `stepped`        a step like any other
        asked, and not `stepped`    the scaler has dropped the step
        not asked                   the loop did not want a step

    Args:
        scaler: the GradScaler of the loop, or None.
        optimizer: the optimizer whose steps are watched.
    """

    def __init__(self, scaler: GradScaler | None, optimizer: Optimizer) -> None:
        self._scaler = scaler
        self._key = id(optimizer)
        self.stepped = False
        """Whether the optimizer has stepped since the last `update()`. The caller sets it."""
        self._records: Mapping[int, Mapping[str, Any]] = {}
        """The scaler's records since its last `update()`."""
        if scaler is not None:
            self._records = scaler._per_optimizer_states

    def take(self) -> bool:
        """Whether a step was dropped since the last call. Call it at least once per step."""
        if self._scaler is None or self._scaler._per_optimizer_states is self._records:
            return False
        # `update()` was called, so the old records are of the step before it.
        old = self._records.get(self._key)
        self._records = self._scaler._per_optimizer_states
        stepped = self.stepped
        self.stepped = False
        return not stepped and old is not None and old["stage"] is OptState.STEPPED


class Overflows:
    """Distinguishes a GradScaler's search for its scale from gradients that overflow at any scale.

    After an overflow a scaler skips the step and halves its scale, which is normal. After `search`
    consecutive overflows the gradients overflow at any scale, and the steps count as non-finite.
    The number of overflows stays on the device, so that nothing waits for it.

    Args:
        home: the device of the signals.
        search: overflows that a search may take.
    """

    def __init__(self, home: torch.device, search: int = MAX_OVERFLOWS) -> None:
        self._home = home
        self._search = search
        self._consecutive: Tensor | None = None
        """0-d int32, or None after a step without a scaler's flag."""

    def mark(self, signals: Signals, found_inf: Tensor | None) -> Signals:
        """Marks an overflow as externally skipped, or as non-finite after too many in a row.

        A step with a non-finite loss is non-finite too, because no scale makes the loss finite.

        Args:
            signals: the signals of the step, with a `grad_norm`.
            found_inf: a scaler's flag on `home`, 0-d float32, above 0 for an overflow; or None.

        Returns:
            The signals, in which an overflow is marked.
        """
        if found_inf is None:
            self._consecutive = None
            return signals
        if self._consecutive is None:
            self._consecutive = torch.zeros((), dtype=torch.int32, device=self._home)
        overflowed = found_inf > 0
        self._consecutive = torch.where(overflowed, self._consecutive + 1, 0)
        skipped = overflowed & (self._consecutive <= self._search)
        if signals.loss is not None:
            skipped = skipped & torch.isfinite(signals.loss)
        assert signals.grad_norm is not None
        norm = signals.grad_norm.masked_fill(overflowed & ~skipped, math.nan)
        return signals._replace(externally_skipped=skipped, grad_norm=norm)
