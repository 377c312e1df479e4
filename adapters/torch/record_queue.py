"""Copies the records of steps on a device to the host, without a sync at the step."""

from __future__ import annotations

import torch
from torch import Tensor

from healcore.core import step_record
from healcore.core.engine import EngineState
from healcore.core.step_record import StepRecord
from healcore.torch.measurement import AsyncCopy


class PendingRecords:
    """Records of steps whose copy to the host has begun."""

    def __init__(self, rows: list[Tensor]) -> None:
        self._copy = AsyncCopy(torch.stack(rows))
        self._records: list[StepRecord] = []

    def __call__(self) -> list[StepRecord]:
        """The records, oldest first. Waits until the copy has arrived."""
        if not self._records:
            self._records = [step_record.unpack(row) for row in self._copy.read()]
        return self._records


class RecordQueue:
    """The records of the steps that a device has judged."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        """Steps whose copy has not begun."""
        self._last: PendingRecords | None = None
        self._untaken: list[PendingRecords] = []
        """Copies since the last `take`."""

    def add(self, state: EngineState) -> None:
        """Adds the step that the device has judged last. No sync."""
        values = step_record.numbers(state)
        ints = torch.stack([each.to(torch.int32) for each in values[: step_record.INTS]])
        floats = torch.stack(values[step_record.INTS :])
        self._rows.append(torch.cat([ints, floats.view(torch.int32)]))

    def last(self, state: EngineState) -> PendingRecords:
        """The copy that ends with the last step. Begins it if necessary."""
        if not self._rows and self._last is None:
            self.add(state)  # before the first step
        self._begin_copy()
        self._untaken.clear()
        assert self._last is not None
        return self._last

    def take(self) -> list[PendingRecords]:
        """The copies of all steps since the last call. Begins the last copy if necessary."""
        self._begin_copy()
        taken, self._untaken = self._untaken, []
        return taken

    def forget(self) -> None:
        """Forgets the last step, because another state replaces the one after it."""
        self._begin_copy()
        self._last = None

    def _begin_copy(self) -> None:
        if self._rows:
            self._last = PendingRecords(self._rows)
            self._untaken.append(self._last)
            self._rows = []
