"""Judged steps whose records the host has not read yet.

The `FollowedOptimizer` of each optimizer keeps a judged step as a `PendingEntry`. All optimizers of
a run append to the same `PendingEntries`. The entries of one dispatch are a `PendingStep`, which
the Healer reads some dispatches later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from healcore.core.step_record import (
    StepRecord,
    SuspectGradient,
    Why,
    is_nan_by_optimizer,
    suspect_gradients,
)
from healcore.torch import live_state
from healcore.torch.attachment import Healing
from healcore.torch.driver.accumulation import Accumulation
from healcore.torch.driver.buffers import LayerBuffers
from healcore.torch.live_engine import AsyncCopy, PendingRecord
from healcore.torch.live_state import State
from healcore.torch.measurement import StepNorms
from healcore.torch.ranks import StepMarks

MAX_PENDING = 256
"""Maximum number of entries that were not read. A loop may take many steps per batch, as in RL."""
MAX_EARLY = 2**16
"""Maximum number of records that were read and not yet taken."""


class PendingEntry(NamedTuple):
    """One judged step of one engine, not read yet.

    Its numbers may still be on their way from an accelerator. `FollowedOptimizer.read` waits for
    them.
    """

    optimizer: FollowedOptimizer
    """The optimizer, which has made the entry and reads it."""
    record: PendingRecord
    """Reads the record of the engine."""
    norms: StepNorms
    """The gradient norms of the step."""
    marks: AsyncCopy | None
    """The `StepMarks` of the ranks, on their way to the host. None for one rank alone."""
    engine_reads_rate: bool
    """Whether the engine has read the rate of this step, tensors included."""


class PendingEntries:
    """The judged steps of all optimizers since the last `TorchDriver.take_dispatch`, oldest first.

    A loop may take any number of steps for one batch. So that the entries do not fill the memory,
    the oldest entry is read as soon as there are more than `MAX_PENDING`:

        append ─► entries ─► take ─► PendingStep
                     └─► more than MAX_PENDING: read at once ─► early records ─► take
    """

    def __init__(self) -> None:
        self._entries: deque[PendingEntry] = deque()
        """The entries that were not read."""
        self._early: deque[StepRecord] = deque(maxlen=MAX_EARLY)
        """Records of the steps before `_entries`, which were read because they were too many."""

    def __len__(self) -> int:
        """Number of entries that were not read."""
        return len(self._entries)

    def append(self, entry: PendingEntry) -> None:
        """Appends a step that was judged now. Reads the oldest step if there are too many.

        Args:
            entry: the step.
        """
        self._entries.append(entry)
        if len(self._entries) > MAX_PENDING:
            oldest = self._entries.popleft()
            self._early.append(oldest.optimizer.read(oldest))

    def take(self) -> PendingStep | None:
        """Removes all entries and records.

        Returns:
            The judged steps as one step, or None if no optimizer has stepped.
        """
        step: PendingStep | None = None
        if self._entries:
            step = PendingStep([*self._entries], [*self._early])
        self.clear()
        return step

    def clear(self) -> None:
        """Drops all entries and records, which belong to a state that was replaced."""
        self._entries.clear()
        self._early.clear()


class FollowedOptimizer:
    """One optimizer of the state. It is the `StepListener` of the optimizer's healed step.

        judged  ─► keeps the step as a `PendingEntry`, which the run reads some batches later
        ended   ─► LayerBuffers   saves or restores what the forward pass has written
        stepped ─► Accumulation   no gradient is left that no step has used

    It refers to these parts and not to the driver, because hooks of the optimizer refer to it, and
    Python does not collect a cycle through these hooks.

    Args:
        name: name of the optimizer in the state.
        state: the state of the run.
        healings: the handle of each optimizer, by name.
        pending: entries of all optimizers of the run.
        warnings: lines for the log of the run.
        accumulation: knows the gradients since the last step of this optimizer.

    Attributes:
        name: name of the optimizer in the state.
        healing: the handle of the optimizer.
        accumulation: see the argument.
        buffers: the buffers of the layers that this optimizer trains, or None without such layers.
            The driver replaces them when the structure of the model changes.
    """

    def __init__(
        self,
        name: str,
        state: State,
        healings: Mapping[str, Healing],
        pending: PendingEntries,
        warnings: list[str],
        accumulation: Accumulation,
    ) -> None:
        self.name = name
        self.healing = healings[name]
        self.accumulation = accumulation
        self.buffers: LayerBuffers | None = None
        self._state = state
        self._healings = healings
        self._pending = pending
        self._warnings = warnings
        self._baseline: StepNorms | None = None
        """Gradient norms of the last step without an alarm."""
        self.restart()

    def restart(self) -> None:
        """Counts the step of the engine's new state as read. Call it after a load. A sync."""
        self._last_step = int(self.healing.live_engine.state.step)

    def judged(self, norms: StepNorms) -> None:
        """Keeps a step that was judged now, without a sync. See `StepListener.judged`."""
        step = self.healing.healed_step
        observed = any(healing.has_seen_loss for healing in self._healings.values())
        line = step.measurer.missing_loss(observed=observed)
        if line:
            self._warnings.append(line)
        entry = PendingEntry(
            optimizer=self,
            record=step.live_engine.pending_record(self.name),
            norms=norms,
            marks=step.all_reduce.last_marks,
            engine_reads_rate=step.live_engine.step_engine.limits_lr,
        )
        self._pending.append(entry)

    def ended(self, skipped: bool | Tensor) -> None:
        """See `StepListener.ended`."""
        self.accumulation.has_ended = True
        if self.buffers is not None:
            self.buffers.end(skipped)

    def stepped(self) -> None:
        """See `StepListener.stepped`."""
        self.accumulation.on_step()

    def read(self, entry: PendingEntry) -> StepRecord:
        """Reads an entry. The entries of an optimizer have to be read in order.

        A record with a cause gets evidence: the tensors whose gradients were unusual. To find them
        is a sync.

        Args:
            entry: an entry of this optimizer.

        Returns:
            The record of the step. There is no judgment if a GradScaler has skipped the step.
        """
        record = entry.record()
        if record.step == self._last_step:
            # A GradScaler has skipped this step: the state has the previous step's record.
            return record.unjudged(Why.EXTERNAL)
        self._last_step = record.step
        norms = entry.norms
        # The engine reads the rate only if the host has limited it. Otherwise the record has the
        # rate of an earlier step, or none.
        if record.lr is None or not entry.engine_reads_rate:
            record = record._replace(lr=max(norms.rates, default=None))
        if not record.cause:
            if norms.params:
                self._baseline = norms
            return record
        rank_signals: tuple[float, float] | None = None
        if self.healing.ranks > 1:
            rank_signals = norms.rank_signals()
        evidence, nan_by_optimizer = self._evidence(record, norms)
        return record._replace(
            evidence=evidence, by_optimizer=nan_by_optimizer, rank_signals=rank_signals
        )

    def _evidence(
        self, record: StepRecord, norms: StepNorms
    ) -> tuple[tuple[SuspectGradient, ...], bool]:
        """Compares the norms of an alarm's step with the last step that had no alarm.

        Returns the suspect tensors, and whether the optimizer would make NaN of finite gradients.
        Sharded norms are reduced over the ranks, so every rank has to call it for the same steps.
        """
        if not norms.params:
            return (), False  # only other ranks have gradients
        values = norms.to_host()
        usual: np.ndarray | None = None
        if self._baseline is not None:
            known: dict[int, float] = {}
            for p, norm in zip(self._baseline.params, self._baseline.to_host(), strict=True):
                known[id(p)] = norm
            usual = np.array([known.get(id(p), 0.0) for p in norms.params], np.float32)
        names = live_state.parameter_names(self._state, norms.params)
        nan_by_optimizer = is_nan_by_optimizer(record.cause, values)
        return suspect_gradients(values, usual, names), nan_by_optimizer


class PendingStep:
    """The judged steps between two calls of `TorchDriver.take_dispatch`, as one step.

    Implements `healcore.runtime.driver.PendingDispatch`. An optimizer that has stepped twice has
    two entries.

    Args:
        entries: the judged steps to read, in order.
        early: records of earlier steps, which are read already.

    Attributes:
        count: see `PendingDispatch`.
        vote_requested: see `PendingDispatch`.
    """

    count = 1

    def __init__(self, entries: Sequence[PendingEntry], early: Sequence[StepRecord]) -> None:
        self._entries = entries
        self._early = early
        self._records: list[StepRecord] | None = None
        self.vote_requested = False

    def read(self) -> list[list[StepRecord]]:
        """The records of the only step, in order. Waits only for what has not arrived yet.

        Later calls return the same records.
        """
        if self._records is None:
            for entry in self._entries:
                if entry.marks is not None and StepMarks(*entry.marks.read()).votes > 0:
                    self.vote_requested = True
            records = [*self._early]
            for entry in self._entries:
                records.append(entry.optimizer.read(entry))
            self._records = records  # only when all are read: an error is raised again
            self._entries = ()
        return [self._records]
