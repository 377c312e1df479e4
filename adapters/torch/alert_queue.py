"""Copies the records and signals of steps on a device to the host, and runs detectors there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from healcore.core import step_record
from healcore.core.engine import Engine, EngineState
from healcore.core.engine.alerts import SIGNALS, AlertState
from healcore.core.signals import Signals
from healcore.core.step_record import StepRecord
from healcore.torch.measurement import AsyncCopy

_RECORD = len(step_record.FIELDS)


class Row(NamedTuple):
    """One step on the device, and what the host knows about the step."""

    numbers: Tensor
    """int32: the record of the part of the policy in the step, then the bits of the signals."""
    signals: tuple[str, ...]
    """Names of the signals."""
    changes: bool
    """Whether a change was announced before this step."""


class PendingRecords:
    """Records of steps whose copy to the host has begun."""

    def __init__(self, rows: list[Row], read_until: Callable[[PendingRecords], None]) -> None:
        self.rows = rows
        self.copy = AsyncCopy(torch.stack([row.numbers for row in rows]))
        self.records: list[StepRecord] = []
        """The records of the whole policy, empty before they are read."""
        self._read_until = read_until

    def has_arrived(self) -> bool:
        """Whether a call would return without waiting."""
        return bool(self.records) or self.copy.has_arrived()

    def __call__(self) -> list[StepRecord]:
        """The records, oldest first. Waits until the copy has arrived."""
        if not self.records:
            self._read_until(self)
        return self.records


class AlertQueue:
    """The part of a policy on the host, which judges the steps of a device in their order."""

    def __init__(self, engine: Engine) -> None:
        self._alerts = engine.alerts
        self._state = self._alerts.init()
        self._rows: list[Row] = []
        """Steps whose copy has not begun."""
        self._sent: deque[PendingRecords] = deque()
        """Copies that have not been read, oldest first."""
        self._last: PendingRecords | None = None
        self._untaken: list[PendingRecords] = []
        """Copies since the last `take`."""
        self._step = 0
        self._announced = self._changes = False
        """Whether a change was announced since the last row; and before the next judged step."""

    def add(self, state: EngineState, signals: Signals) -> None:
        """Adds the step that the device has judged last. No sync."""
        values = step_record.numbers(state)
        ints, floats = values[: step_record.INTS], values[step_record.INTS :]
        present = tuple(name for name in SIGNALS if getattr(signals, name) is not None)
        floats = [*floats, *(getattr(signals, name) for name in present)]
        packed = [n.to(torch.int32) for n in ints] + [x.view(torch.int32) for x in floats]
        self._rows.append(Row(torch.stack(packed), present, self._announced))
        self._announced = False

    def expect_change(self) -> None:
        """Announces a change before the next step."""
        self._announced = True

    def last(self, state: EngineState) -> PendingRecords:
        """The copy that ends with the last step. Begins it if necessary."""
        if not self._rows and self._last is None:
            self.add(state, Signals())  # before the first step
        self.begin_copy()
        self._untaken.clear()
        assert self._last is not None
        return self._last

    def take(self) -> list[PendingRecords]:
        """The copies of all steps since the last call. Begins the last copy if necessary."""
        self.begin_copy()
        taken, self._untaken = self._untaken, []
        return taken

    def begin_copy(self) -> None:
        """Begins to copy the steps whose copy has not begun."""
        if self._rows:
            self._last = PendingRecords(self._rows, self._read_until)
            self._sent.append(self._last)
            self._untaken.append(self._last)
            self._rows = []

    def latest(self) -> AlertState:
        """The state after the last step of the device. A sync if steps have not arrived."""
        self.begin_copy()
        while self._sent:
            self._sent[0]()
        return self._state

    def load(self, state: AlertState, step: int, *, changes: bool) -> None:
        """Replaces the state, `step` steps after the start of the run."""
        self.latest()
        self._state, self._step, self._last = state, step, None
        self._announced, self._changes = False, changes

    def _read_until(self, last: PendingRecords) -> None:
        while not last.records:
            batch = self._sent.popleft()
            numbers = batch.copy.read()
            batch.records = [
                self._judge(row, each) for row, each in zip(batch.rows, numbers, strict=True)
            ]
            batch.rows = []

    def _judge(self, row: Row, numbers: np.ndarray) -> StepRecord:
        judged = step_record.unpack(numbers[:_RECORD])
        self._changes |= row.changes
        if not self._alerts:
            return judged
        if judged.step != self._step:  # otherwise a GradScaler has skipped the step
            self._step = judged.step
            values: Any = dict(zip(row.signals, numbers[_RECORD:].view(np.float32), strict=True))
            signals = Signals(**values, change_expected=np.bool_(self._changes))
            self._state = self._alerts.step(self._state, judged, signals)
            self._changes = False
        return self._alerts.completed(judged, self._state)
