"""Judged steps whose records the host has not read yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from healcore.core.decision import StepRecord, SuspectGradient, is_by_optimizer, suspects
from healcore.torch import live_state
from healcore.torch.attachment import Healing
from healcore.torch.engines import AsyncCopy, PendingRecord
from healcore.torch.incident_log import MissingLoss
from healcore.torch.measurement import StepNorms

MOST_PENDING = 256
"""Entries to keep; older ones are read at once. A loop may take many steps per batch, as in RL."""
MOST_EARLY = 2**16  # largest number of records that were read and not yet taken


class PendingEntry(NamedTuple):
    """One judged step of one engine, not read yet."""

    recorder: Recorder
    record: PendingRecord
    norms: StepNorms
    marks: AsyncCopy | None
    """See `SignalAllReduce.last_marks`."""
    lr: float  # largest rate of the groups; 0.0 without a rate, or if rates are tensors


class Recorder:
    """Appends an entry to `pending` for every judged step of one optimizer, without a sync."""

    def __init__(
        self,
        name: str,
        state: Mapping[str, Any],
        healings: Mapping[str, Healing],
        pending: deque[PendingEntry],
        early: deque[StepRecord],
        warnings: list[str],
    ) -> None:
        self.name = name
        self._state = state
        self._healings = healings
        self._healing = healings[name]
        self._pending = pending
        self._early = early
        self._warnings = warnings
        self._missing_loss = MissingLoss(self._healing.engine)
        self.bad_rates: tuple[float, ...] = ()
        """Learning rates that were NaN or Inf at the newest such step that was read."""
        self._baseline: StepNorms | None = None
        """Gradient norms of the last step without an alarm."""
        self.restart()
        self._healing.healed_step.on_judged = self._record

    def restart(self, *, unless_at: Any = None) -> None:
        """Call it after the engine's state is replaced. A sync.

        Args:
            unless_at: step of the replaced state, if unread records stay valid unless the new state
                has another step. None if they are dropped in any case.
        """
        now = int(self._healing.live_engine.state.step)
        if unless_at is None or int(unless_at) != now:
            self._last_step = now

    def _record(self, norms: StepNorms) -> None:
        step = self._healing.healed_step
        record = step.live_engine.pending_record(self.name)
        rates = [group.get("lr") for group in step.optimizer.param_groups]
        lr = max((rate for rate in rates if isinstance(rate, int | float)), default=0.0)
        self._pending.append(PendingEntry(self, record, norms, step.all_reduce.last_marks, lr))
        if len(self._pending) > MOST_PENDING:
            oldest = self._pending.popleft()
            self._early.append(oldest.recorder.read(oldest))

    def read(self, entry: PendingEntry) -> StepRecord:
        """The record of an entry, read in order. Evidence, for records with a cause, is a sync."""
        record = entry.record()
        if record.step == self._last_step:
            # A GradScaler has skipped this step: the state has the previous step's record.
            return record.unjudged()
        self._last_step = record.step
        if record.lr in (0.0, 1.0):  # the engine reads the rate only if the host has limited it
            record = record._replace(lr=entry.lr)
        has_seen_loss = any(healing.has_seen_loss for healing in self._healings.values())
        self._warnings += self._missing_loss.add(has_seen_loss=has_seen_loss)
        if record.cause:
            rank_signals = entry.norms.rank_signals() if self._healing.ranks > 1 else None
            evidence, by_optimizer = self._evidence(record, entry.norms)
            return record._replace(
                evidence=evidence, by_optimizer=by_optimizer, rank_signals=rank_signals
            )
        self._baseline = entry.norms if entry.norms.params else self._baseline
        return record

    def _evidence(
        self, record: StepRecord, norms: StepNorms
    ) -> tuple[tuple[SuspectGradient, ...], bool]:
        """Compares the norms of an alarm's step with the last step that had no alarm.

        Returns the suspect tensors, and whether the optimizer would make NaN of finite gradients.
        Sharded norms are reduced over the ranks, so every rank has to call it for the same steps.
        """
        if not norms.params:
            return (), False  # only other ranks have gradients
        found = norms.to_host()
        usual = None
        if self._baseline is not None:
            known = dict(zip(map(id, self._baseline.params), self._baseline.to_host(), strict=True))
            usual = np.array([known.get(id(p), 0.0) for p in norms.params], np.float32)
        names = live_state.parameter_names(self._state, norms.params)
        by_optimizer = is_by_optimizer(record.cause, found)
        if by_optimizer:
            self.bad_rates = norms.bad_rates
        return suspects(found, usual, names), by_optimizer


class PendingStep:
    """The judged steps between two calls of `TorchDriver.take_dispatch`, as one step.

    An optimizer that has stepped twice has two entries.

    Args:
        entries: the judged steps to read, in order.
        early: records of earlier steps, which are read already.
    """

    count = 1

    def __init__(self, entries: Sequence[PendingEntry], early: Sequence[StepRecord]) -> None:
        self._entries, self._early = entries, early
        self._records: list[StepRecord] | None = None
        self.vote_requested = False

    def read(self) -> list[list[StepRecord]]:
        """The records. Waits only for records that have not arrived yet."""
        if self._records is None:
            marks = (entry.marks.read() for entry in self._entries if entry.marks is not None)
            self.vote_requested = any(votes > 0 for votes, _, _ in marks)
            self._records = [*self._early, *(each.recorder.read(each) for each in self._entries)]
            self._entries = ()
        return [self._records]
