"""Judged steps whose records the host has not read yet.

The `FollowedOptimizer` of each optimizer keeps a judged step as a `PendingEntry`, in one list for
all optimizers of a run. The entries of one dispatch are a `PendingStep`, which the Healer reads
some dispatches later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from healcore.core.step_record import StepRecord
from healcore.torch.live_engine import AsyncCopy, PendingRecord
from healcore.torch.measurement import Measurement
from healcore.torch.ranks import StepMarks


class PendingEntry:
    """One judged step of one optimizer, which is read once, after the earlier steps.

    Its numbers may still be on their way from an accelerator. `read` waits for them.

    Args:
        add_evidence: `FollowedOptimizer.read` of the optimizer.
        record: reads the record of the engine.
        measured: what was measured of the step. Released when the step is read.
        marks: the `StepMarks` of the ranks, on their way to the host. None for one rank alone.
    """

    def __init__(
        self,
        add_evidence: Callable[[StepRecord, Measurement], StepRecord],
        record: PendingRecord,
        measured: Measurement,
        marks: AsyncCopy | None,
    ) -> None:
        self._add_evidence = add_evidence
        self._pending = record
        self._measured = measured
        self._marks = marks
        self._record: StepRecord | None = None

    def read(self) -> StepRecord:
        """The record of the step. Later calls return the same record."""
        if self._record is None:
            self._record = self._add_evidence(self._pending(), self._measured)
            self._measured = Measurement()
        return self._record

    def requests_vote(self) -> bool:
        """Whether a rank has requested a vote in the step."""
        return self._marks is not None and StepMarks(*self._marks.read()).votes > 0


class PendingStep:
    """The judged steps between two calls of `TorchDriver.take_dispatch`, as one step.

    Implements `healcore.runtime.driver.PendingDispatch`. An optimizer that has stepped twice has
    two entries.

    Args:
        entries: the judged steps, oldest first.
    """

    count = 1
    vote_requested = False

    def __init__(self, entries: Sequence[PendingEntry]) -> None:
        self._entries = entries

    def read(self) -> list[list[StepRecord]]:
        """The records of the only step, in order. Waits only for what has not arrived yet."""
        self.vote_requested = any(entry.requests_vote() for entry in self._entries)
        return [[entry.read() for entry in self._entries]]
