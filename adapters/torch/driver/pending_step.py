"""Judged steps whose records the host has not read yet.

The `FollowedOptimizer` of each optimizer keeps a judged step as a `PendingEntry`, in one list for
all optimizers of a run. The entries of one dispatch are a `PendingStep`, which the Healer reads
some dispatches later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from healcore.core.step_record import (
    StepRecord,
    SuspectGradient,
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
"""Maximum number of steps that are not read. A loop may take many steps per batch, as in RL."""


class PendingEntry:
    """One judged step of one optimizer, which is read once, after the earlier steps.

    Its numbers may still be on their way from an accelerator. `read` waits for them.

    Args:
        optimizer: the optimizer, which reads the step.
        record: reads the record of the engine.
        norms: the gradient norms of the step. They are released when the step is read.
        marks: the `StepMarks` of the ranks, on their way to the host. None for one rank alone.
    """

    def __init__(
        self,
        optimizer: FollowedOptimizer,
        record: PendingRecord,
        norms: StepNorms,
        marks: AsyncCopy | None,
    ) -> None:
        self._optimizer = optimizer
        self._pending = record
        self._norms = norms
        self._marks = marks
        self._record: StepRecord | None = None

    def read(self) -> StepRecord:
        """The record of the step. Later calls return the same record."""
        if self._record is None:
            self._record = self._optimizer.read(self._pending(), self._norms)
            self._norms = StepNorms()
        return self._record

    def requests_vote(self) -> bool:
        """Whether a rank has requested a vote in the step."""
        return self._marks is not None and StepMarks(*self._marks.read()).votes > 0


class FollowedOptimizer:
    """One optimizer of the state. It is the `StepListener` of the optimizer's healed step.

        judged ─► keeps the step as a `PendingEntry`, which the run reads some batches later
        ended  ─► LayerBuffers   saves or restores what the forward pass has written
                  Accumulation   no gradient is left that no step has used

    It refers to these parts and not to the driver, because hooks of the optimizer refer to it, and
    Python does not collect a cycle through these hooks.

    Args:
        name: name of the optimizer in the state.
        state: the state of the run.
        healings: the handle of each optimizer, by name.
        pending: the steps of all optimizers that the run has not taken, oldest first.
        warnings: lines for the log of the run.
        accumulation: knows the gradients since the last step of this optimizer.

    Attributes:
        name: name of the optimizer in the state.
        healing: the handle of the optimizer.
        accumulation: see the argument.
        buffers: the buffers of the layers that this optimizer trains. The driver sets them, and
            replaces them when the structure of the model changes.
    """

    buffers: LayerBuffers

    def __init__(
        self,
        name: str,
        state: State,
        healings: Mapping[str, Healing],
        pending: list[PendingEntry],
        warnings: list[str],
        accumulation: Accumulation,
    ) -> None:
        self.name = name
        self.healing = healings[name]
        self.accumulation = accumulation
        self._state = state
        self._healings = healings
        self._pending = pending
        self._warnings = warnings
        self._baseline: StepNorms | None = None
        """Gradient norms of the last step without an alarm."""

    def judged(self, norms: StepNorms) -> None:
        """Keeps a step that was judged now, without a sync. See `StepListener.judged`."""
        step = self.healing.healed_step
        observed = any(healing.has_seen_loss for healing in self._healings.values())
        line = step.measurer.missing_loss(observed=observed)
        if line:
            self._warnings.append(line)
        record = step.live_engine.pending_record(self.name)
        self._pending.append(PendingEntry(self, record, norms, step.all_reduce.last_marks))
        if len(self._pending) > MAX_PENDING:
            # Many steps for one batch: what is kept for a step must not fill the memory.
            self._pending[-1 - MAX_PENDING].read()

    def ended(self, skipped: bool | Tensor) -> None:
        """See `StepListener.ended`."""
        self.buffers.end(skipped)
        self.accumulation.on_step()

    def read(self, record: StepRecord, norms: StepNorms) -> StepRecord:
        """Adds to a record what the host knows of the step. Call it in the order of the steps.

        A record with a cause gets evidence: the tensors whose gradients were unusual. To find them
        is a sync.

        Args:
            record: the record of the engine.
            norms: the gradient norms of the step.
        """
        if not record.judged:
            return record
        if record.lr is None:
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
