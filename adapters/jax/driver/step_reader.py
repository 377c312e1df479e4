"""Reads on the host what the engines of a run have decided: the records of the steps.

A compiled step leaves its records on the device. Reading them at once would make the host wait for
each step. So each dispatch starts a copy and returns, and the Healer reads the copy some dispatches
later, when the numbers have long arrived:

    device   step 1 | step 2 | step 3 | ...
    copy            | rows 1 | rows 2 | ...
    host                              read 1 | read 2 | ...

The copy begins right after the dispatch, because the next dispatch may donate the state. All arrays
are copied as one vector, because each copy has a fixed cost.

The device does not say how many steps a dispatch has had. The reader finds it out: it compares the
counter of each engine with the counter after the dispatch before (`StepReader`). A program that
sums gradients itself may be in the middle of a window: `SummedGradients` knows whether it is
complete.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from operator import is_not
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from healcore.core.decision import (
    RECORD_FIELDS,
    StepRecord,
    is_by_optimizer,
    suspect_gradients,
    unpack_record,
)
from healcore.jax import engine_rows
from healcore.jax.driver.engines import EngineEntry
from healcore.jax.driver.program_state import array_of
from healcore.jax.heal_state import HealState, HealStateError
from healcore.runtime.store.ranks import Ranks

Result = TypeVar("Result")

LINE = "state = healer.update(step(healer.state, batch))"
"""The line of a training loop that starts each step from the current state, for messages."""
_SEEN = [RECORD_FIELDS.index("loss"), RECORD_FIELDS.index("grad_norm")]
"""Indices in a record that no edit of the Healer changes."""


class EngineReading(NamedTuple):
    """The part of one engine's state that the host reads.

    Two readings, before and after a dispatch, show which steps the dispatch has had.
    """

    step: int
    """Number of steps judged."""
    ring: np.ndarray
    """The rows of the last steps: records of a block, or rows of `HealState.heal_engine`."""
    norms: np.ndarray
    """float32 (n,): norm of each gradient leaf at the last step."""

    def record(self, step: int) -> np.ndarray:
        """Returns the record of one step from the ring.

        Args:
            step: number of the step, from 1. It has to be one of the last ``len(ring)`` steps,
                because a later step overwrites an older row.

        Returns:
            int32 (``len(RECORD_FIELDS)``,), floats by their bits, see `engine_rows.records`.
        """
        row = self.ring[(step - 1) % len(self.ring)]
        if len(row) == len(RECORD_FIELDS):
            return row
        return engine_rows.record(row)


Readings = Callable[[], list[list[EngineReading]]]
"""Waits for the copy, and returns each engine's `EngineReading` after each update of a dispatch."""


class _CachedResult(Generic[Result]):
    """A function without arguments that is computed at the first call.

    `functools.cache` would copy the names of each function, in every step.
    """

    def __init__(self, compute: Callable[[], Result]) -> None:
        self._compute: Callable[[], Result] | None = compute
        self._result: Any = None

    def __call__(self) -> Result:
        if self._compute is not None:
            self._result = self._compute()
            self._compute = None
        return self._result


def start_read(states: Sequence[HealState]) -> Readings:
    """Begins to copy each engine's `EngineReading` after one update.

    The driver calls this function after each dispatch. The next dispatch may then donate the
    states: the copy no longer needs their arrays.

    A program that has waited for its loss has waited for these arrays too. They are then copied at
    once, which takes a quarter of the time of one more compiled function.

    Args:
        states: the HealState of each engine. Leaves may be nnx Variables.

    Returns:
        A function that waits for the copy and returns a list with one entry, because a dispatch
        without a block is one update: the `EngineReading` of each engine.
    """
    arrays = []
    for state in states:
        arrays.append((array_of(state.heal_engine), array_of(state.heal_leaf_norms)))
    if _are_ready(arrays):
        engines = []
        for rows, norms in arrays:
            engines.append(_reading_of(np.array(rows), np.array(norms)))
        return lambda: [engines]
    shapes = []
    for rows, norms in arrays:
        shapes.append((rows.shape, norms.size))
    copied = _pack(arrays)
    copied.copy_to_host_async()

    def read() -> list[list[EngineReading]]:
        packed = np.asarray(copied)
        results = []
        for shape, tensors in shapes:
            end = math.prod(shape)
            rows = packed[:end].reshape(shape)
            norms = packed[end : end + tensors].view(np.float32)
            results.append(_reading_of(rows, norms))
            packed = packed[end + tensors :]
        return [results]

    return _CachedResult(read)


def _are_ready(arrays: list[tuple[Any, Any]]) -> bool:
    """Whether all arrays were computed, and none is divided or copied among devices."""
    for pair in arrays:
        for array in pair:
            if not array.is_ready():
                return False
            if not isinstance(array.sharding, jax.sharding.SingleDeviceSharding):
                return False
    return True


def _reading_of(rows: np.ndarray, norms: np.ndarray) -> EngineReading:
    """The reading of a `HealState.heal_engine` and of the norms of its tensors."""
    return EngineReading(int(engine_rows.steps_judged(rows)), rows[1:], norms)


class EngineRecords(NamedTuple):
    """The arrays of one engine's `EngineReading`, with a first axis over the updates of a block.

    The ring of a state holds the records of one update only. A block has any number of updates, so
    the compiled block returns these arrays for each of its updates.
    """

    step: Any
    """int32 (updates,): number of steps judged after each update."""
    rows: Any
    """int32 (updates, records, n): the ring after each update, see `engine_rows.records`."""
    norms: Any
    """float32 (updates, leaves): norm of each gradient at the last step of each update."""


BlockRecords = list[EngineRecords]
"""The records of each engine, on the device."""


def block_records(states: Sequence[HealState]) -> BlockRecords:
    """Returns the arrays that the host reads of the states after one update of a block.

    Called while a block is traced, once in the body of its `lax.scan`.

    Args:
        states: the HealState of each engine after the update, traced.

    Returns:
        The records of each engine, without the axis over updates, which `lax.scan` adds.
    """
    found = []
    for state in states:
        rows = state.heal_engine
        step = engine_rows.steps_judged(rows)
        ring = engine_rows.records(rows)
        found.append(EngineRecords(step, ring, state.heal_leaf_norms))
    return found


def start_read_of_block(records: BlockRecords) -> Readings:
    """Begins to copy each engine's `EngineReading` after each update of a block.

    Args:
        records: what the compiled block has returned.

    Returns:
        A function that waits for the copies and returns the readings, oldest update first.
    """
    for array in jax.tree.leaves(records):
        array.copy_to_host_async()

    def read() -> list[list[EngineReading]]:
        engines = [EngineRecords(*map(np.asarray, engine)) for engine in records]
        readings = []
        for i in range(len(engines[0].step)):
            of_update = []
            for engine in engines:
                step = int(engine.step[i])
                of_update.append(EngineReading(step, engine.rows[i], engine.norms[i]))
            readings.append(of_update)
        return readings

    return _CachedResult(read)


@jax.jit
def _pack(states: list[tuple[Any, ...]]) -> jax.Array:
    """Packs the arrays into one int32 vector. Floats keep their bits."""
    parts = []
    for rows, norms in states:
        parts += [rows.ravel(), jax.lax.bitcast_convert_type(norms, jnp.int32)]
    return jnp.concatenate(parts)


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
    """Returns `vote_requested`. Known once all processes have begun this dispatch."""

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
        self._stride: float | None = None
        """Number of steps of one update, or None if unknown."""
        self._usual_norms: dict[str, np.ndarray] = {}
        """Name of an engine -> its gradient norms, float32 (n,), at its last step without alarm."""
        self._untaken = 0
        """Number of the latest updates in a row that left the healing state unchanged."""
        self._accumulated = 0
        """What `_untaken` was before the previous change. It is the same in every accumulation."""

    def restart(self, states: Sequence[HealState]) -> None:
        """Sets the states from which the next dispatch starts.

        Called at the start of a run and after each rollback. Without it, the counters before the
        rollback would be compared with lower counters, as if the program had called `tx.init`.

        Args:
            states: the HealState of each engine.
        """
        self._last = start_read(states)

    def continues(self, engines: Sequence[EngineEntry], states: Sequence[HealState]) -> StepReader:
        """Makes a reader for a state of another structure, after its first step. Waits for it.

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
        steps = max(1, round(self._stride or 1))  # a mean of a block may be a fraction
        [after] = start_read(states)()
        before = []
        for reading in after:
            before.append(reading._replace(step=max(reading.step - steps, 0)))
        reader._last = lambda: [before]
        return reader

    def dispatch(
        self,
        states: Sequence[HealState],
        votes: Callable[[], bool],
        block: BlockRecords | None = None,
    ) -> Dispatch:
        """Begins to copy a dispatch to the host.

        The first call waits for the device, to learn the number of steps. Later dispatches are
        assumed to have as many. `read` of the result corrects a wrong number: the last dispatch of
        an epoch may have fewer steps.

        Args:
            states: the HealState of each engine after the dispatch.
            votes: returns whether the processes of the run vote after this dispatch.
            block: the records of a block of `Healer.scan`, or None for a dispatch of one update.

        Returns:
            The dispatch. Its `read` raises HealStateError as `_steps_of_update` says.
        """
        before = self._last
        if block is None:
            after = start_read(states)
            updates = 1
            steps = self._steps
        else:
            after = start_read_of_block(block)
            updates = len(block[0].rows)
            steps = self._steps_of_block
        self._last = after
        read = _CachedResult(lambda: steps(before()[-1], after()))
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
            return [[record._replace(taken=False) for record in steps[0]]]
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
            self._add(engine, old.step, new, steps)
            # A step with `externally_skipped` has new norms, unlike one that keeps its old state.
            changed |= new.step != old.step or new.norms.tobytes() != old.norms.tobytes()
        return steps, changed

    def _add(
        self, engine: EngineEntry, first: int, new: EngineReading, steps: list[list[StepRecord]]
    ) -> None:
        """Adds an engine's records of the steps after step `first`."""
        for number in range(first, new.step):
            record = self._record(engine, new, number + 1)
            if record.step == new.step:  # norms of earlier steps are overwritten
                if record.cause:
                    usual = self._usual_norms.get(engine.name)
                    record = record._replace(
                        evidence=suspect_gradients(new.norms, usual, engine.tensor_names),
                        by_optimizer=is_by_optimizer(record.cause, new.norms),
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
                idle = self._record(engine, new, new.step).unjudged()
                records.append(idle._replace(step=new.step, judged=False))

    def _record(self, engine: EngineEntry, view: EngineReading, step: int) -> StepRecord:
        """The record of one step of an engine."""
        record = unpack_record(view.record(step), engine.name)
        if not self._reads_rate:
            # An older saved state then has a rate of 0.
            record = record._replace(lr=None)
        return record

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
            f"healer.state, `{LINE}`, and call tx.init(params) once, before the Healer: within the "
            "loop it loses the moments, the detectors and the budgets. To reset only the moments: "
            "with_heal_state(without_heal_state(tx.init(params)), like=old)"
        )
    if new.step - old.step > len(new.ring):
        steps = new.step - old.step
        raise HealStateError(
            f"one dispatch has {steps} steps, and the state holds the records of {len(new.ring)}: "
            f"write protect(tx, policy, records={steps})"
        )


def _has_changed(old: EngineReading, new: EngineReading) -> bool:
    """Whether the record of the newest step differs, in what no edit of the Healer changes.

    A step that is not judged, or that the caller skips, does not change the record.
    """
    before = old.record(new.step)[_SEEN]
    after = new.record(new.step)[_SEEN]
    return before.tobytes() != after.tobytes()


class SummedGradients:
    """Implements `healcore.runtime.faults.microbatches.Gradients`: the loop sums the gradients.

    If a batch does not fit the memory, the Healer's loop repeats it in smaller parts. In JAX the
    program sums their gradients itself, so this class only knows whether a step has been taken.

    Args:
        counters: returns arrays that every optimizer step replaces by other objects.
    """

    def __init__(self, counters: Callable[[], list[Any]]) -> None:
        self._counters = counters
        self._begin: list[Any] | None = None

    def is_accumulating(self) -> bool:
        """Whether a window has begun without a step since.

        A part of a batch is then pending, and the loop may not repeat the batch as a whole.
        """
        return self._begin is not None and not self.has_stepped()

    def begin_window(self) -> None:
        """Records the counters of the current state, before the first part of a batch."""
        self._begin = self._counters()

    def has_stepped(self) -> bool:
        """Whether the state has been replaced since `begin_window`."""
        return self._begin is not None and differ(self._counters(), self._begin)

    def redo_window(self, kept_alive: list[Any], *, clear_cache: bool) -> None:
        """Frees unreferenced arrays before a batch is repeated in smaller parts.

        Args:
            kept_alive: objects that the loop has kept, such as the batch. Emptied.
            clear_cache: ignored, because XLA caches no memory of the device.
        """
        del clear_cache
        kept_alive.clear()
        gc.collect()  # an exception and its frames refer to each other

    def between_ranks(self, ranks: Ranks) -> str:
        """Returns the reason why several processes cannot repeat a step together.

        Args:
            ranks: the exchange between the processes, which cannot help here.
        """
        del ranks
        return (
            "the other processes wait in collectives of the compiled step, which this process has "
            "left"
        )


def differ(arrays: list[Any], others: list[Any]) -> bool:
    """Whether any array was replaced by another object, as each step does. Reads no values.

    Args:
        arrays: the arrays now.
        others: as many arrays of an earlier state.
    """
    return any(map(is_not, arrays, others))
