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
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

SEARCH = 40
"""Overflows in a row that are a GradScaler's search for its scale: from its default of 2^16 that
leads below 2^-23, where only gradients that are not finite themselves overflow."""

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


class DroppedSteps:
    """Notices that a GradScaler dropped a step without telling the optimizer.

    For an optimizer that is not fused the scaler does not call `step()` after an overflow: no hook
    runs. But `update()` replaces the scaler's records, and those that it has put away say whether
    it was asked to step this optimizer. Nothing of it waits for a device.

    Args:
        scaler: the GradScaler, or None when there is none.
        optimizer: the optimizer.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None, optimizer: Optimizer) -> None:
        self._scaler = scaler
        self._key = id(optimizer)
        self._records = self._current()
        self.stepped = False
        """Whether the optimizer's own hook ran since the last `update()`; whoever sees it says so.
        """

    def found(self) -> bool:
        """Whether there was one since the last call; call it at least once for every step."""
        records = self._current()
        if records is self._records:
            return False
        old, self._records = self._records, records
        stepped, self.stepped = self.stepped, False
        asked = old is not None and self._key in old and old[self._key]["stage"] is OptState.STEPPED
        return asked and not stepped

    def _current(self) -> Any:
        return getattr(self._scaler, "_per_optimizer_states", None)


class Overflows:
    """Tells a GradScaler that looks for its scale from one that will never find it.

    After an overflow the scale is halved and the step dropped: the scaler's own business. But
    gradients that are not finite at any scale are dropped for ever, while the scale goes to 0.
    """

    def __init__(self, home: torch.device) -> None:
        self._home = home
        self._row: Tensor | None = None
        self._dropped = 0

    def void(self, found_inf: Tensor) -> Tensor:
        """Whether to learn and count nothing of a step, where the kernel drops it itself.

        Args:
            found_inf: 0-d float32, above 0 after an overflow.

        Returns:
            0-d bool tensor, not read here.
        """
        if self._row is None:
            self._row = torch.zeros((), dtype=torch.int32, device=self._home)
        held = found_inf > 0
        self._row = torch.where(held, self._row + 1, 0)
        return held & (self._row <= SEARCH)

    def drop(self) -> bool:
        """Takes a step that was dropped without the optimizer; whether it is to be counted."""
        self._dropped += 1
        return self._dropped > SEARCH

    def end_row(self) -> None:
        """Takes a step that reached the optimizer."""
        self._dropped = 0
