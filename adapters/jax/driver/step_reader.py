"""Finds out on the host which steps a run has taken, and makes their records; compiled blocks.

A compiled step leaves its records on the device. Reading them at once would make the host wait for
each step. So each dispatch begins a copy and returns, and the Healer reads the copy some dispatches
later, when the numbers have long arrived:

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

**A block** of `Healer.scan` is one `lax.scan` over the program's update:

    state, outputs = lax.scan(update, state, steps)            # the program's own loop
    state, (outputs, records) = lax.scan(body, state, steps)   # one block

The host does not see the updates within a block, so the block has to return what the Healer reads
of each of them. The ring of records in a state has room for the steps of one update only, and the
next update overwrites it. So the body returns the ring after each update, and `lax.scan` stacks it:

    healer.scan(update, state, 120, every=50)

    updates     0 ... 49        50 ... 99        100 ... 119
    device      [ block 0 ]     [ block 1 ]      [ block 2 ]
                  |    |          |     |          |     |
    host      records  state  records   state  records   state
              of 50    50     of 50     100    of 20     120

Between two blocks the Healer reads the records, and may save, compare and roll back. Any other
dispatch is one update.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from operator import is_not
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from healcore.core.decision import NONFINITE
from healcore.core.step_record import (
    RECORD_FIELDS,
    StepRecord,
    Why,
    is_nan_by_optimizer,
    suspect_gradients,
    unpack_record,
)
from healcore.jax.driver.engines import EngineEntry
from healcore.jax.heal_state import HealState, HealStateError, steps_judged
from healcore.jax.trees import Path, PyTree, arrays_of, node_at, with_arrays

if TYPE_CHECKING:
    from healcore.jax.store.coordination import VoteMarks

LOOP_LINE = "state = healer.update(step(healer.state, batch))"
"""The line of a training loop that starts each step from the current state, for messages."""
_STEP_FIELDS = [RECORD_FIELDS.index("loss"), RECORD_FIELDS.index("grad_norm")]
"""Indices in a record that no edit of the Healer changes."""


class EngineReading(NamedTuple):
    """The part of one engine's state that the host reads, after one update."""

    step: int
    """Number of steps judged."""
    ring: np.ndarray
    """The records of the last steps, see `HealState.heal_records`."""
    norms: np.ndarray
    """float32 (n,): norm of each gradient leaf at the last step."""

    def row(self, step: int) -> np.ndarray:
        """The record of a step in the ring, where a later step overwrites it.

        Args:
            step: number of the step, from 1.
        """
        return self.ring[(step - 1) % len(self.ring)]


BlockRecords = list[tuple[Any, Any]]
"""The records and the norms of each engine on the device, with a first axis over the updates."""


def block_records(states: Iterable[HealState]) -> BlockRecords:
    """What the host reads of the states after one update, without the axis over the updates.

    Args:
        states: the HealState of each engine.
    """
    return [(state.heal_records, state.heal_leaf_norms) for state in states]


@jax.jit
def _as_block(records: BlockRecords) -> BlockRecords:
    """Copies the records of one update, whose state the next step may donate."""
    return jax.tree.map(lambda array: array[None], records)


Readings = Callable[[], list[list[EngineReading]]]
"""Waits for a copy, and returns the reading of each engine after each update of a dispatch."""


def _begin_copy(states: Sequence[HealState], block: BlockRecords | None = None) -> Readings:
    """Begins to copy the records of one update, or of a block. Nothing waits for the copy.

    A program that has waited for its loss has waited for the records of its update too. They are
    then copied at once, which takes a third of the time of one more compiled function.
    """
    records = block or block_records(states)
    if block is None and all(array.is_ready() for array in jax.tree.leaves(records)):
        records = jax.tree.map(lambda array: np.array(array)[None], records)
    else:
        if block is None:
            records = _as_block(records)
        for array in jax.tree.leaves(records):
            array.copy_to_host_async()

    @functools.cache
    def read() -> list[list[EngineReading]]:
        engines = []
        for rows, norms in records:
            readings = []
            for ring, last_norms in zip(np.asarray(rows), np.asarray(norms), strict=True):
                readings.append(EngineReading(int(steps_judged(ring)), ring, last_norms))
            engines.append(readings)
        return [list(update) for update in zip(*engines, strict=True)]

    return read


class Dispatch(NamedTuple):
    """Implements `healcore.runtime.driver.PendingDispatch`: a dispatch that is being copied.

    A dispatch is one call of the program's compiled step, which may have several steps. The Healer
    queues it, and calls `read` a few dispatches later.
    """

    read: Callable[[], list[list[StepRecord]]]
    """Waits for the copy, and returns the records of each step, oldest step first."""
    count: int
    """Expected number of steps, which `read` may correct."""
    votes: Callable[[], bool] | None
    """The value of `vote_requested`, known once all processes have begun this dispatch."""

    @property
    def vote_requested(self) -> bool:
        """Whether the processes of the run vote after this dispatch.

        All processes have to vote after the same dispatch: a process that votes alone waits
        forever. So the answer is the same in each process. Read it only after `read`.
        """
        return self.votes is not None and self.votes()


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
    """

    def __init__(
        self, engines: Sequence[EngineEntry], accumulates: bool, warn: Callable[[str], object]
    ) -> None:
        self._engines, self._accumulates, self._warn = engines, accumulates, warn
        self._has_warned = False
        self._last: Callable[[], list[EngineReading]]
        """Waits for the reading after the last dispatch."""
        self._last_counters: list[Any]
        """The arrays of `counters_of` at the last dispatch."""
        self.block: BlockRecords | None = None
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
        self.block = None
        after = _begin_copy(states)
        self._last = lambda: after()[-1]
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

    def change_structure(self, engines: Sequence[EngineEntry], states: Sequence[HealState]) -> None:
        """Continues with another structure of the state, after the first step with it.

        Waits for the device. Nobody has seen the state from which this step started, so the reader
        assumes as many steps as usual.

        Args:
            engines: the engines of the new state, with the names of the earlier engines.
            states: the HealState of each engine after the step.
        """
        self._engines, self._usual_norms = engines, {}
        steps = max(1, round(self._stride or 1))  # a mean of a block may be a fraction
        before = []
        for reading in _begin_copy(states)()[-1]:
            before.append(reading._replace(step=max(reading.step - steps, 0)))
        self._last = lambda: before

    def dispatch(self, states: Sequence[HealState], votes: VoteMarks | None) -> Dispatch | None:
        """Begins to copy the dispatch since the last call to the host.

        The first call waits for the device, to learn the number of steps. Later dispatches are
        assumed to have as many. `read` of the result corrects a wrong number: the last dispatch of
        an epoch may have fewer steps.

        Args:
            states: the HealState of each engine after the dispatch.
            votes: counts the dispatches of several processes, and says after which they vote.

        Returns:
            The dispatch, or None if there was no step. Its `read` raises HealStateError as
            `_steps_of_update` says.
        """
        if self.has_read(states):
            return None
        self.skip_to(states)
        before, block = self._last, self.block
        self.block = None
        after = _begin_copy(states, block)
        self._last = lambda: after()[-1]
        has_vote = None
        if votes is not None:
            has_vote = votes.begin_dispatch()
        read = functools.cache(lambda: self._steps(before(), after(), is_block=block is not None))
        updates = 1
        if block is not None:
            updates = len(block[0][0])
        if self._stride is None:
            self._stride = len(read()) / updates
        return Dispatch(read, max(1, round(self._stride * updates)), has_vote)

    def _steps(
        self, before: list[EngineReading], updates: list[list[EngineReading]], *, is_block: bool
    ) -> list[list[StepRecord]]:
        """The records of each step of a dispatch, at least one step.

        An update of a block may take no optimizer step, as in off-policy learning, and is not a
        step then. A dispatch without any step counts as one step that no engine has judged.
        """
        steps: list[list[StepRecord]] = []
        earlier = before
        for after in updates:
            of_update, changed = self._steps_of_update(earlier, after)
            if changed:
                steps += of_update
            earlier = after
        if steps:
            self._stride = len(steps) / len(updates)
            self._accumulated, self._untaken = self._untaken, 0
            return steps
        [records], _ = self._steps_of_update(before, updates[-1])
        if is_block or self._accumulates:
            return [records]
        self._untaken += 1
        if self._untaken <= self._accumulated:
            return [records]
        if not self._has_warned:
            self._has_warned = True
            self._warn(_UNTAKEN)
        return [[record.unjudged(Why.STATE_KEPT) for record in records]]

    def _steps_of_update(
        self, before: list[EngineReading], after: list[EngineReading]
    ) -> tuple[list[list[StepRecord]], bool]:
        """The records of each step between two reads, at least one; and whether a state changed.

        The number of steps is the smallest number that any engine has judged in this update. An
        engine with more (five updates of a critic for one update of the generator) has several
        records per step.

        Raises:
            HealStateError: the state of an engine was reset, by `tx.init`, or the dispatch has more
                steps than the state has records.
        """
        counts = []
        for engine, old, new in zip(self._engines, before, after, strict=True):
            _check_continues(engine, old, new)
            if new.step > old.step:
                counts.append(new.step - old.step)
        steps: list[list[StepRecord]] = [[] for _ in range(min(counts, default=1))]
        changed = bool(counts)
        for engine, old, new in zip(self._engines, before, after, strict=True):
            count = new.step - old.step
            for i in range(count):
                record = self._record(engine, new, old.step + i + 1)
                steps[i * len(steps) // count].append(record)
            if count:
                continue
            # An engine does not judge steps of other optimizers, or micro-batches of an
            # optax.MultiSteps around `protect`. The Healer knows the order in the last row.
            why = Why.NOT_DUE
            if _is_left_out(old, new):
                why, changed = Why.EXTERNAL, True
            idle = unpack_record(new.row(new.step), engine.name).unjudged(why)
            for records in steps:
                records.append(idle._replace(step=new.step))
        return steps, changed

    def _record(self, engine: EngineEntry, new: EngineReading, step: int) -> StepRecord:
        """The record of one step of an engine, with its suspect gradients."""
        record = unpack_record(new.row(step), engine.name)
        if step != new.step:  # its norms are overwritten
            return record
        if not record.cause:
            self._usual_norms[engine.name] = new.norms
            return record
        usual = self._usual_norms.get(engine.name)
        return record._replace(
            evidence=suspect_gradients(new.norms, usual, engine.tensor_names),
            by_optimizer=is_nan_by_optimizer(record.cause, new.norms),
        )


_UNTAKEN = (
    "an update has not changed the healing state: a guard of the training step (where, lax.cond, "
    "optax.apply_if_finite, a loss scale) has kept the old state. The step counts as skipped, and "
    "no detector sees it. protect skips bad steps itself: remove the guard. To accumulate "
    "gradients, write protect(optax.MultiSteps(optimizer, k))"
)


def _check_continues(engine: EngineEntry, old: EngineReading, new: EngineReading) -> None:
    """Raises HealStateError unless the dispatch continued from the state of the dispatch before."""
    has_changed = new.step < old.step
    if new.step == old.step:
        # A step that is not judged, or that the caller skips, does not change these fields.
        before, after = old.row(new.step)[_STEP_FIELDS], new.row(new.step)[_STEP_FIELDS]
        has_changed = before.tobytes() != after.tobytes()
    if has_changed:
        raise HealStateError(
            f'the optimizer state of "{engine.name}" does not continue the state of the step '
            f"before: it has step {new.step}, after step {old.step}. Start each step from "
            f"healer.state, `{LOOP_LINE}`, and call tx.init(params) once, before the Healer: "
            "within the loop it loses the moments, the detectors and the budgets. To reset only "
            "the moments: with_heal_state(without_heal_state(tx.init(params)), like=old)"
        )
    steps = new.step - old.step
    if steps > len(new.ring):
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
    judged_as = new.row(new.step)[RECORD_FIELDS.index("cause")]
    return not (judged_as & NONFINITE or np.isfinite(new.norms).all())


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


# -- compiled blocks of Healer.scan ----------------------------------------------------------------

Update = Callable[[Any, Any], tuple[Any, Any]]
"""(state, number of the update) -> (state, outputs), as for `lax.scan`."""


def compiled_block(
    update: Update, like: PyTree, paths: Sequence[Path], *, donate: bool
) -> Callable[[PyTree, np.ndarray], tuple[Any, Any, BlockRecords]]:
    """Makes the compiled block of an update, which is compiled once for each number of updates.

    Functions and texts in the state are constants of the compiled program, see `trees.arrays_of`.

    Args:
        update: the program's function.
        like: a state of the program, to which all later states have to fit.
        paths: path of each HealState in the state.
        donate: whether a block reuses the memory of the state that it begins with.

    Returns:
        A function of the arrays of a state and the numbers of the updates. It returns the arrays
        after the last update, the outputs of the updates, stacked, and what the host reads of each
        update.
    """

    def body(arrays: PyTree, step: Any) -> tuple[Any, Any]:
        state, outputs = _checked(update(with_arrays(like, arrays), step), like)
        records = block_records(node_at(state, path) for path in paths)
        return arrays_of(state), (outputs, records)

    def block(arrays: PyTree, steps: Any) -> tuple[Any, Any, Any]:
        arrays, (outputs, records) = lax.scan(body, arrays, steps)
        return arrays, outputs, records

    return jax.jit(block, donate_argnums=(0,) if donate else ())


def _checked(result: Any, like: PyTree) -> tuple[Any, Any]:
    """The new state and the outputs, as `update` has returned them.

    Raises:
        HealStateError: `result` is not a pair, or its state has another structure than `like`.
    """
    if isinstance(result, tuple | list) and len(result) == 2:
        state, outputs = result
        if jax.tree.structure(state) == jax.tree.structure(like):
            return state, outputs
    raise HealStateError(
        "`update` of healer.scan gets a state and the number of the update, and returns the "
        "new state, of the same structure, and its outputs, as a function for lax.scan does. "
        "Write `return state, outputs`, or `return state, None` for no outputs"
    )


class Scan:
    """One call of `Healer.scan`.

    Args:
        live: returns the live state.
        take_block: makes the state after a block the live state, with the records of its updates.
        block: the result of `compiled_block`.
    """

    def __init__(
        self,
        live: Callable[[], PyTree],
        take_block: Callable[[PyTree, BlockRecords], None],
        block: Callable[[PyTree, np.ndarray], tuple[Any, Any, BlockRecords]],
    ) -> None:
        self._live, self._take_block, self._block = live, take_block, block
        self._outputs: dict[int, Any] = {}
        """Number of each block's first update -> its outputs."""

    def run(self, first: int, count: int) -> None:
        """Dispatches a block, and returns without waiting for the device.

        After a rollback, `first` is lower than before. The outputs of the undone updates are then
        replaced.

        Args:
            first: number of the block's first update, from 0.
            count: number of its updates.
        """
        live = self._live()
        steps = np.arange(first, first + count, dtype=np.int32)
        arrays, outputs, records = self._block(arrays_of(live), steps)
        for number in [*self._outputs]:
            if number >= first:
                del self._outputs[number]
        self._outputs[first] = outputs
        self._take_block(with_arrays(live, arrays), records)

    def outputs(self) -> Any:
        """The outputs of all blocks, stacked, as from the program's own `lax.scan`."""
        if self._outputs:
            return jax.tree.map(lambda *parts: jnp.concatenate(parts), *self._outputs.values())
        one = jax.eval_shape(self._block, arrays_of(self._live()), np.zeros(1, np.int32))[1]
        return jax.tree.map(lambda each: jnp.zeros((0, *each.shape[1:]), each.dtype), one)
