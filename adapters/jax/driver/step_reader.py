"""Finds out on the host which steps a run has taken, and makes their records.

A compiled step leaves its records on the device. Reading them at once would make the host wait for
each step. So each dispatch begins a copy and returns (`engine_readings`), and the Healer reads the
copy some dispatches later, when the numbers have long arrived:

    device   step 1 | step 2 | step 3 | ...
    copy            | rows 1 | rows 2 | ...
    host                              read 1 | read 2 | ...

The device does not say how many steps a dispatch has had. The reader compares the counter of each
engine with the counter after the dispatch before. Here `lax.scan` runs 3 steps in one call, and the
ring of the state holds the rows of the last 64 steps:

    after dispatch 6     step 18     ring: ... 16 17 18
    after dispatch 7     step 21     ring: ... 16 17 18 19 20 21
                                                        --------
                                                        3 steps, so 3 records
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import is_not
from typing import Any, NamedTuple

import numpy as np

from healcore.core.decision import NONFINITE
from healcore.core.step_record import (
    RECORD_FIELDS,
    StepRecord,
    Why,
    is_nan_by_optimizer,
    suspect_gradients,
    unpack_record,
)
from healcore.jax.driver.engine_readings import (
    BlockRecords,
    CachedResult,
    EngineReading,
    Readings,
    start_read,
    start_read_of_block,
)
from healcore.jax.driver.engines import EngineEntry
from healcore.jax.heal_state import HealState, HealStateError

LOOP_LINE = "state = healer.update(step(healer.state, batch))"
"""The line of a training loop that starts each step from the current state, for messages."""
_STEP_FIELDS = [RECORD_FIELDS.index("loss"), RECORD_FIELDS.index("grad_norm")]
"""Indices in a record that no edit of the Healer changes."""


class Dispatch(NamedTuple):
    """Implements `healcore.runtime.driver.PendingDispatch`: a dispatch that is being copied.

    A dispatch is one call of the program's compiled step, which may have several steps. The Healer
    queues it, and calls `read` a few dispatches later.
    """

    read: Callable[[], list[list[StepRecord]]]
    """Waits for the copy, and returns the records of each step, oldest step first."""
    count: int
    """Expected number of steps, which `read` may correct."""
    votes: Callable[[], bool]
    """The value of `vote_requested`, which is known once all processes have begun this dispatch."""

    @property
    def vote_requested(self) -> bool:
        """Whether the processes of the run vote after this dispatch.

        All processes have to vote after the same dispatch: a process that votes alone waits
        forever. So the answer is the same in each process. Read it only after `read`.
        """
        return self.votes()


class StepReader:
    """Reads the steps of a run's engines, dispatch by dispatch.

    `dispatch` begins to copy, and the result's `read` compares the copy with the copy before:

    ============================  ==============================================================
    engine's counter              the dispatch was
    ============================  ==============================================================
    n higher                      n steps of this engine
    equal, with new norms         a step that the caller has skipped (`externally_skipped`)
    equal, and nothing changed    a part of an accumulation, or a step that a guard has undone
    lower                         an error: `tx.init` was called within the loop
    ============================  ==============================================================

    Args:
        engines: the engines of the run.
        accumulates: whether an optax.MultiSteps hides micro-batches from an engine.
        warn: called with a warning, once.
        reads_rate: whether the policy reads the learning rate. If not, records have no rate.
    """

    def __init__(
        self,
        engines: Sequence[EngineEntry],
        accumulates: bool,
        warn: Callable[[str], object],
        *,
        reads_rate: bool,
    ) -> None:
        self._engines, self._accumulates, self._warn = engines, accumulates, warn
        self._reads_rate = reads_rate
        self._has_warned = False
        self._last: Readings
        self._last_counters: list[Any]
        """The arrays of `counters_of` at the last dispatch."""
        self._block: BlockRecords | None = None
        """The records of a block that `dispatch` has not returned."""
        self._stride: float | None = None
        """Number of steps of one update, or None if unknown."""
        self._usual_norms: dict[str, np.ndarray] = {}
        """Name of an engine -> its gradient norms, float32 (n,), at its last step without alarm."""
        self._untaken = 0
        """Number of the latest updates in a row that left the healing state unchanged."""
        self._accumulated = 0
        """What `_untaken` was before the previous change. It is the same in every accumulation."""

    def restart(self, states: Sequence[HealState]) -> None:
        """Sets the states from which the next dispatch starts. Drops steps not dispatched yet.

        Called at the start of a run and after each rollback. Without it, the counters before the
        rollback would be compared with lower counters, as if the program had called `tx.init`.

        Args:
            states: the HealState of each engine.
        """
        self._block = None
        self._last = start_read(states)
        self.skip_to(states)

    def has_read(self, states: Sequence[HealState]) -> bool:
        """Whether `dispatch` has returned every step. Does not wait for the device.

        Args:
            states: the HealState of each engine now.
        """
        return not any_replaced(counters_of(states), self._last_counters)

    def skip_to(self, states: Sequence[HealState]) -> None:
        """Counts a change of the states, such as an edit of the Healer, as no step.

        Args:
            states: the HealState of each engine after the change.
        """
        self._last_counters = counters_of(states)

    def add_block(self, records: BlockRecords) -> None:
        """Sets the records of a block of `Healer.scan`, which the next `dispatch` returns.

        Args:
            records: what the compiled block has returned.
        """
        self._block = records

    def for_new_structure(
        self, engines: Sequence[EngineEntry], states: Sequence[HealState]
    ) -> StepReader:
        """Makes the reader for a new structure of the state, after the first step with it.

        Waits for the device.

        A program may widen a layer between two steps. Nobody has seen the state from which the
        first step after this change started, so the reader assumes as many steps as usual.

        Args:
            engines: the engines of the new state, with the names of the earlier engines.
            states: the HealState of each engine after the step.

        Returns:
            The reader, whose next `dispatch` returns this step.
        """
        reader = StepReader(engines, self._accumulates, self._warn, reads_rate=self._reads_rate)
        reader._stride = self._stride
        reader._last_counters, reader._block = self._last_counters, self._block
        steps = max(1, round(self._stride or 1))  # a mean of a block may be a fraction
        [after] = start_read(states)()
        before = []
        for reading in after:
            before.append(reading._replace(step=max(reading.step - steps, 0)))
        reader._last = lambda: [before]
        return reader

    def dispatch(
        self, states: Sequence[HealState], begin_vote: Callable[[], Callable[[], bool]]
    ) -> Dispatch | None:
        """Begins to copy the dispatch since the last call to the host.

        The first call waits for the device, to learn the number of steps. Later dispatches are
        assumed to have as many. `read` of the result corrects a wrong number: the last dispatch of
        an epoch may have fewer steps.

        Args:
            states: the HealState of each engine after the dispatch.
            begin_vote: counts a dispatch, and returns a function that says whether the processes
                of the run vote after it.

        Returns:
            The dispatch, or None if there was no step. Its `read` raises HealStateError as
            `_steps_of_update` says.
        """
        counters = counters_of(states)
        if not any_replaced(counters, self._last_counters):
            return None
        self._last_counters = counters
        votes = begin_vote()
        before = self._last
        block = self._block
        if block is None:
            after = start_read(states)
            updates = 1
            steps = self._steps
        else:
            self._block = None
            after = start_read_of_block(block)
            updates = len(block[0].rows)
            steps = self._steps_of_block
        self._last = after
        read = CachedResult(lambda: steps(before()[-1], after()))
        if self._stride is None:
            self._stride = len(read()) / updates
        return Dispatch(read, max(1, round(self._stride * updates)), votes)

    def _steps(
        self, before: list[EngineReading], readings: list[list[EngineReading]]
    ) -> list[list[StepRecord]]:
        """The records of each step of a dispatch of one update, at least one step."""
        [after] = readings
        steps, changed = self._steps_of_update(before, after)
        self._stride = len(steps)
        if not self._was_taken(changed):
            return [[record.unjudged(Why.STATE_KEPT) for record in steps[0]]]
        return steps

    def _steps_of_block(
        self, before: list[EngineReading], readings: list[list[EngineReading]]
    ) -> list[list[StepRecord]]:
        """The records of each step of a block of `Healer.scan`, at least one step.

        An update may take no optimizer step, as in off-policy learning, and is not a step then. A
        block without any step counts as one step that no engine has judged.
        """
        steps: list[list[StepRecord]] = []
        earlier = before
        for after in readings:
            of_update, changed = self._steps_of_update(earlier, after)
            if changed:
                steps += of_update
            earlier = after
        if not steps:
            return self._steps_of_update(before, readings[-1])[0]
        self._stride = len(steps) / len(readings)
        return steps

    def _steps_of_update(
        self, before: list[EngineReading], after: list[EngineReading]
    ) -> tuple[list[list[StepRecord]], bool]:
        """The records of each step between two reads, at least one; and whether a state changed.

        The number of steps is the smallest number that any engine has judged in this dispatch. An
        engine with more (five updates of a critic for one update of the generator) has several
        records per step.

        Raises:
            HealStateError: the state of an engine was reset, by `tx.init`, or the dispatch has more
                steps than the state has records.
        """
        steps: list[list[StepRecord]] = [[] for _ in range(_count(before, after))]
        changed = False
        for engine, old, new in zip(self._engines, before, after, strict=True):
            _check_continues(engine, old, new)
            left_out = _is_left_out(old, new)
            without_step = Why.EXTERNAL if left_out else Why.NOT_DUE
            self._add(engine, old.step, new, steps, without_step)
            changed |= new.step != old.step or left_out
        return steps, changed

    def _add(
        self,
        engine: EngineEntry,
        first: int,
        new: EngineReading,
        steps: list[list[StepRecord]],
        without_step: Why,
    ) -> None:
        """Adds an engine's records of the steps after step `first`.

        `without_step` is why the engine has no step of its own where it has none.
        """
        for number in range(first, new.step):
            record = self._record(engine, new, number + 1)
            if record.step == new.step:  # norms of earlier steps are overwritten
                if record.cause:
                    usual = self._usual_norms.get(engine.name)
                    record = record._replace(
                        evidence=suspect_gradients(new.norms, usual, engine.tensor_names),
                        by_optimizer=is_nan_by_optimizer(record.cause, new.norms),
                    )
                else:
                    self._usual_norms[engine.name] = new.norms
            steps[(number - first) * len(steps) // (new.step - first)].append(record)
        if new.step - first >= len(steps):
            return  # each step has a record of this engine
        for records in steps:
            if not any(record.engine == engine.name for record in records):
                # An engine does not judge steps of other optimizers, or micro-batches of an
                # optax.MultiSteps around `protect`. The Healer knows the order in the last row.
                idle = self._record(engine, new, new.step).unjudged(without_step)
                records.append(idle._replace(step=new.step))

    def _record(self, engine: EngineEntry, view: EngineReading, step: int) -> StepRecord:
        """The record of one step of an engine."""
        return unpack_record(view.record(step), engine.name, reads_rate=self._reads_rate)

    def _was_taken(self, changed: bool) -> bool:
        """Whether an update was a step or part of an accumulation; see `_untaken`."""
        if changed:
            self._accumulated = self._untaken
            self._untaken = 0
            return True
        self._untaken += 1
        taken = self._accumulates or self._untaken <= self._accumulated
        if not taken and not self._has_warned:
            self._has_warned = True
            self._warn(_UNTAKEN)
        return taken


_UNTAKEN = (
    "an update has not changed the healing state: a guard of the training step (where, lax.cond, "
    "optax.apply_if_finite, a loss scale) has kept the old state. The step counts as skipped, and "
    "no detector sees it. protect skips bad steps itself: remove the guard. To accumulate "
    "gradients, write protect(optax.MultiSteps(optimizer, k))"
)


def _count(before: Sequence[EngineReading], after: Sequence[EngineReading]) -> int:
    """Smallest number of steps that an engine has judged, at least 1."""
    counts = []
    for old, new in zip(before, after, strict=True):
        if new.step > old.step:
            counts.append(new.step - old.step)
    return min(counts, default=1)


def _check_continues(engine: EngineEntry, old: EngineReading, new: EngineReading) -> None:
    """Raises HealStateError unless the dispatch continued from the state of the dispatch before."""
    if new.step < old.step or (new.step == old.step and _has_changed(old, new)):
        raise HealStateError(
            f'the optimizer state of "{engine.name}" does not continue the state of the step '
            f"before: it has step {new.step}, after step {old.step}. Start each step from "
            f"healer.state, `{LOOP_LINE}`, and call tx.init(params) once, before the Healer: "
            "within the loop it loses the moments, the detectors and the budgets. To reset only "
            "the moments: with_heal_state(without_heal_state(tx.init(params)), like=old)"
        )
    if new.step - old.step > len(new.ring):
        steps = new.step - old.step
        raise HealStateError(
            f"one dispatch has {steps} steps, and the state holds the records of {len(new.ring)}: "
            f"write protect(tx, policy, records={steps})"
        )


def _is_left_out(old: EngineReading, new: EngineReading) -> bool:
    """Whether a step without a judgment was called with `externally_skipped`.

    Such a step has norms of its own, unlike one that keeps its old state. Two overflows in a row
    may have equal norms, but these are not of the last step that was judged, which was finite.
    """
    if new.norms.tobytes() != old.norms.tobytes():
        return True
    judged_as = new.record(new.step)[RECORD_FIELDS.index("cause")]
    return not (judged_as & NONFINITE or np.isfinite(new.norms).all())


def _has_changed(old: EngineReading, new: EngineReading) -> bool:
    """Whether the record of the newest step differs, in what no edit of the Healer changes.

    A step that is not judged, or that the caller skips, does not change the record.
    """
    before = old.record(new.step)[_STEP_FIELDS]
    after = new.record(new.step)[_STEP_FIELDS]
    return before.tobytes() != after.tobytes()


def any_replaced(arrays: list[Any], others: list[Any]) -> bool:
    """Whether any array was replaced by another object, as each step does. Reads no values.

    Args:
        arrays: the arrays now.
        others: as many arrays of an earlier state.
    """
    return any(map(is_not, arrays, others))


def counters_of(states: Iterable[HealState]) -> list[Any]:
    """The array with each engine's counter of steps. Each step replaces these arrays.

    Args:
        states: the HealState of each engine.
    """
    return [state.heal_engine for state in states]
