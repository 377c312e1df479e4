"""`FollowedOptimizer`: the steps, gradients and buffers of one optimizer of a run.

It keeps a judged step as a `PendingEntry`, in one list for all optimizers of a run. The entries of
one dispatch are a `PendingStep`, which the Healer reads some dispatches later.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from healcore.core.step_record import (
    StepRecord,
    SuspectGradient,
    is_nan_by_optimizer,
    suspect_gradients,
)
from healcore.torch import live_state
from healcore.torch.attachment import Healing
from healcore.torch.driver.buffers import LayerBuffers
from healcore.torch.live_engine import AsyncCopy, PendingRecord
from healcore.torch.live_state import State
from healcore.torch.measurement import Measurement
from healcore.torch.ranks import StepMarks

MAX_PENDING = 256
"""Maximum number of steps that are not read. A loop may take many steps per batch, as in RL."""


class PendingEntry:
    """One judged step of one optimizer, which is read once, after the earlier steps.

    Its numbers may still be on their way from an accelerator. `read` waits for them.

    Args:
        add_evidence: `FollowedOptimizer.read` of the optimizer.
        record: reads the record of the engine.
        measured: what was measured of the step. Released when the step is read.
        marks: the `StepMarks` of the ranks, on their way to the host. None for one rank alone.

    Attributes:
        requests_vote: whether a rank has requested a vote in the step, once it was read.
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
        self.requests_vote = False

    def read(self) -> StepRecord:
        """The record of the step. Later calls return the same record."""
        if self._record is None:
            self._record = self._add_evidence(self._pending(), self._measured)
            self._measured = Measurement()
            if self._marks is not None:
                self.requests_vote = StepMarks(*self._marks.read()).votes > 0
        return self._record


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
        records: list[StepRecord] = []
        for entry in self._entries:
            records.append(entry.read())
            self.vote_requested |= entry.requests_vote
        return [records]


class FollowedOptimizer:
    """One optimizer of the state. It is the `StepListener` of the optimizer's healed step.

    Many loops clear gradients only before the next backward pass, so hooks record each backward
    pass and step. Losses count too, because some wrappers write `.grad` without autograd.

        backward pass     ─► _on_backward  there are gradients that no step has used
        optimizer.step()  ─► judged        keeps a `PendingEntry`, which the run reads later
                             ended         saves or restores buffers; every gradient was used
        zero_grad()                        no hook: `in_progress` looks at `.grad`

    Hooks refer to it, and Python does not collect a cycle through hooks, so it has only a weak
    reference to the driver.

    Args:
        name: name of the optimizer in the state.
        state: the state of the run.
        healings: the handle of each optimizer, by name.
        pending: the steps of all optimizers that the run has not taken, oldest first.
        warnings: lines for the log of the run.
        after_step: a bound method, called with this object after each step.

    Attributes:
        name: name of the optimizer in the state.
        healing: the handle of the optimizer.
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
        after_step: Callable[[FollowedOptimizer], object],
    ) -> None:
        self.name = name
        self.healing = healings[name]
        self._step = self.healing.healed_step
        self._state = state
        self._healings = healings
        self._pending = pending
        self._warnings = warnings
        self._after_step = weakref.WeakMethod(after_step)
        self._baseline: Measurement | None = None
        """Gradient norms of the last step without an alarm."""
        self._reached = False
        """Whether a backward pass has run since the optimizer's last step."""
        self._watched: Tensor | None = None
        """The parameter with the hook. A hook on each parameter would cost time."""
        self._handle: Any = None
        self._hook: Any = torch.compiler.disable(self._on_backward)
        self._watch()

    # -- steps ----------------------------------------------------------------------------------

    def judged(self, measured: Measurement) -> None:
        """Keeps a step that was judged now, without a sync. See `StepListener.judged`."""
        step = self._step
        observed = False
        for healing in self._healings.values():
            observed |= healing.healed_step.measurer.has_seen_loss
        line = step.measurer.missing_loss(observed=observed)
        if line:
            self._warnings.append(line)
        record = step.live_engine.pending_record(self.name)
        self._pending.append(PendingEntry(self.read, record, measured, step.all_reduce.last_marks))
        if len(self._pending) > MAX_PENDING:
            # Many steps for one batch: what is kept for a step must not fill the memory.
            self._pending[-1 - MAX_PENDING].read()

    def ended(self, skipped: bool | Tensor) -> None:
        """See `StepListener.ended`. Gradients that are still in `.grad` are used from here on."""
        self.buffers.end(skipped)
        self._reached = False
        after_step = self._after_step()
        if after_step is not None:
            after_step(self)

    def read(self, record: StepRecord, measured: Measurement) -> StepRecord:
        """Adds to a record what the host knows of the step. Call it in the order of the steps.

        A record with a cause gets evidence: the tensors whose gradients were unusual. To find them
        is a sync.

        Args:
            record: the record of the engine.
            measured: what was measured of the step.
        """
        if not record.judged:
            return record
        if record.lr is None:
            record = record._replace(lr=max(measured.rates, default=None))
        if not record.cause:
            if measured.params:
                self._baseline = measured
            return record
        rank_signals: tuple[float, float] | None = None
        if self._step.all_reduce.ranks.world > 1:
            rank_signals = measured.rank_signals()
        evidence, nan_by_optimizer = self._evidence(record, measured)
        return record._replace(
            evidence=evidence, by_optimizer=nan_by_optimizer, rank_signals=rank_signals
        )

    def _evidence(
        self, record: StepRecord, measured: Measurement
    ) -> tuple[tuple[SuspectGradient, ...], bool]:
        """Compares the norms of an alarm's step with the last step that had no alarm.

        Returns the suspect tensors, and whether the optimizer would make NaN of finite gradients.
        Sharded norms are reduced over the ranks, so every rank has to call it for the same steps.
        """
        if not measured.params:
            return (), False  # only other ranks have gradients
        values = measured.to_host()
        known: dict[int, float] = {}
        if self._baseline is not None:
            known.update(zip(map(id, self._baseline.params), self._baseline.to_host(), strict=True))
        usual = np.array([known.get(id(p), 0.0) for p in measured.params], np.float32)
        names = live_state.parameter_names(self._state, measured.params)
        nan_by_optimizer = is_nan_by_optimizer(record.cause, values)
        return suspect_gradients(values, usual, names), nan_by_optimizer

    # -- gradients that no step has used --------------------------------------------------------

    @property
    def in_progress(self) -> bool:
        """Whether there are gradients that the optimizer has not stepped with.

        True if a backward pass or a loss has followed the last step, and a `.grad` is not None. The
        gradients of the last step stay in `.grad` until the loop calls `zero_grad`. They do not
        count.
        """
        self._watch()
        if not (self._reached or self._step.measurer.losses.weight):
            return False
        for group in self.healing.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    return True
        return False

    def ignore(self) -> None:
        """Drops the losses since the last step, and takes the gradients for used.

        A checkpoint has no losses, so a restored run judges its next step without them.
        """
        self._reached = False
        self._step.measurer.losses.clear()

    def clear(self, *, used: bool) -> None:
        """Drops the gradients and losses since the last step, which the program computes again.

        Args:
            used: whether gradients that the optimizer has stepped with are dropped too. Otherwise
                they become 0: a CUDA graph writes into their memory, and without `.grad` no later
                step would train.
        """
        self.healing.optimizer.zero_grad(set_to_none=used or self.in_progress)
        self.ignore()

    def close(self) -> None:
        """Removes the hook."""
        if self._handle is not None:
            self._handle.remove()

    def _watch(self) -> None:
        """Puts the hook on the first trained parameter, which the program may freeze or replace."""
        for group in self.healing.optimizer.param_groups:
            for p in group["params"]:
                if p is self._watched and p.requires_grad and p.is_leaf:
                    return
                if p.requires_grad and p.is_leaf:
                    self.close()
                    self._watched = p
                    self._handle = p.register_post_accumulate_grad_hook(self._hook)
                    return

    def _on_backward(self, _: Tensor) -> None:
        self._reached = True
