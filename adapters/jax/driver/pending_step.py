"""`StepReader`: reads the records of a dispatch's steps, which are copied from the device.

The records are copied to the host as one vector, because each copy has a fixed cost. The copy
begins right after the dispatch, because the next dispatch may donate the state:

    StepReader.dispatch ─► start_read ─► Dispatch, some dispatches later read ─► StepRecords
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from healcore.core.decision import (
    RECORD_FIELDS,
    StepRecord,
    is_by_optimizer,
    suspects,
    unpack_record,
)
from healcore.jax import engine_rows
from healcore.jax.driver.engines import EngineEntry
from healcore.jax.driver.live_state import array_of
from healcore.jax.heal_state import HealState, HealStateError

Result = TypeVar("Result")

_SEEN = [RECORD_FIELDS.index(name) for name in ("loss", "grad_norm")]
"""Indices in a record that no edit of the Healer changes."""


class HostView(NamedTuple):
    """The part of one engine's state that the host reads."""

    step: int
    """Number of steps judged."""
    ring: np.ndarray
    """The rows of the last steps: records of a block, or rows of `HealState.heal_engine`."""
    norms: np.ndarray
    """float32 (n,): norm of each gradient leaf at the last step."""

    def record(self, step: int) -> np.ndarray:
        """The record of one step, see `engine_rows.records`.

        Args:
            step: number of the step, from 1. The ring must still have its record.

        Returns:
            The numbers of `RECORD_FIELDS`, in order.
        """
        row = self.ring[(step - 1) % len(self.ring)]
        if len(row) == len(RECORD_FIELDS):
            return row
        return engine_rows.record(row)


Views = Callable[[], list[list[HostView]]]
"""Waits for the copy, and returns each engine's `HostView` after each update of a dispatch."""


class _Once(Generic[Result]):
    """A function without arguments that is computed at the first call.

    `functools.cache` would copy the names of each function, in every step.
    """

    def __init__(self, compute: Callable[[], Result]) -> None:
        self._compute: Callable[[], Result] | None = compute
        self._result: Any = None

    def __call__(self) -> Result:
        if self._compute is not None:
            self._result = self._compute()
            self._compute = None  # frees what the function refers to
        return self._result


def start_read(states: Sequence[HealState]) -> Views:
    """Begins to copy each engine's `HostView` after one update; the states may be donated then.

    A program that has waited for its loss has waited for these arrays too. They are then copied at
    once, which takes a quarter of the time of one more compiled function.

    Args:
        states: the state of each engine after the update, on the device.

    Returns:
        A function that waits for the copy, and returns the views of the one update.
    """
    arrays = [(array_of(state.heal_engine), array_of(state.heal_leaf_norms)) for state in states]
    if _are_ready(arrays):
        views: list[HostView] = []
        for rows, norms in arrays:
            views.append(_host_view(np.array(rows), np.array(norms)))
        return lambda: [views]
    shapes = [(rows.shape, norms.size) for rows, norms in arrays]
    copied = _pack(arrays)
    copied.copy_to_host_async()

    def read() -> list[list[HostView]]:
        packed = np.asarray(copied)
        results: list[HostView] = []
        for shape, tensors in shapes:
            end = math.prod(shape)
            rows = packed[:end].reshape(shape)
            norms = packed[end : end + tensors]
            results.append(_host_view(rows, norms.view(np.float32)))
            packed = packed[end + tensors :]
        return [results]

    return _Once(read)


def _are_ready(arrays: list[tuple[Any, Any]]) -> bool:
    """Whether all arrays were computed, and none is divided or copied among devices."""
    for pair in arrays:
        for array in pair:
            if not array.is_ready():
                return False
            if not isinstance(array.sharding, jax.sharding.SingleDeviceSharding):
                return False
    return True


def _host_view(rows: np.ndarray, norms: np.ndarray) -> HostView:
    """The view of a `HealState.heal_engine` and of the norms of its tensors."""
    return HostView(int(engine_rows.steps_judged(rows)), rows[1:], norms)


class EngineRecords(NamedTuple):
    """The arrays of one engine's `HostView`, with a first axis over the updates of a block."""

    step: Any
    rows: Any
    norms: Any


BlockRecords = list[EngineRecords]
"""The records of each engine, on the device."""


def block_records(states: Sequence[HealState]) -> BlockRecords:
    """What the host reads of the states after one update of a block. Traced into the block.

    Args:
        states: the state of each engine after the update.
    """
    found: BlockRecords = []
    for state in states:
        rows = state.heal_engine
        step = engine_rows.steps_judged(rows)
        ring = engine_rows.records(rows)
        found.append(EngineRecords(step, ring, state.heal_leaf_norms))
    return found


def start_read_of_block(records: BlockRecords) -> Views:
    """Begins to copy each engine's `HostView` after each update of a block.

    Args:
        records: the records of each engine, with a first axis over the updates.

    Returns:
        A function that waits for the copy, and returns the views of each update.
    """
    for array in jax.tree.leaves(records):
        array.copy_to_host_async()

    def read() -> list[list[HostView]]:
        engines = [EngineRecords(*map(np.asarray, engine)) for engine in records]
        views: list[list[HostView]] = []
        for update in range(len(engines[0].step)):
            of_update: list[HostView] = []
            for engine in engines:
                step = int(engine.step[update])
                of_update.append(HostView(step, engine.rows[update], engine.norms[update]))
            views.append(of_update)
        return views

    return _Once(read)


@jax.jit
def _pack(states: list[tuple[Any, ...]]) -> jax.Array:
    """Packs the arrays into one int32 vector. Floats keep their bits."""
    parts = []
    for rows, norms in states:
        parts += [rows.ravel(), jax.lax.bitcast_convert_type(norms, jnp.int32)]
    return jnp.concatenate(parts)


class Dispatch(NamedTuple):
    """Implements `healcore.runtime.driver.PendingDispatch`: a dispatch that is being copied."""

    read: Callable[[], list[list[StepRecord]]]
    """See `PendingDispatch.read`."""
    count: int
    """See `PendingDispatch.count`."""
    votes: Callable[[], bool]
    """Whether the processes of the run vote after this dispatch."""

    @property
    def vote_requested(self) -> bool:
        """Whether the processes of the run vote after this dispatch."""
        return self.votes()


class StepReader:
    """Reads the steps of a run's engines.

    An engine's state counts the steps that it has judged, and keeps the records of the last ones in
    a ring. So the steps of a dispatch are the difference of two reads, after the dispatch before
    and after this dispatch:

        read before: step 7      read after: step 9      records 8 and 9 of the ring

    Args:
        engines: the engines of the run.
        accumulates: whether an optax.MultiSteps hides micro-batches from an engine.
        warn: called with a warning, once.
    """

    def __init__(
        self, engines: Sequence[EngineEntry], accumulates: bool, warn: Callable[[str], object]
    ) -> None:
        self._engines = engines
        self._accumulates = accumulates
        self._warn = warn
        self._has_warned = False
        self._last: Views
        """Reads the states from which the next dispatch starts. Set by `restart`."""
        self._stride: float | None = None
        """Number of steps of one update, or None if unknown."""
        self._usual_norms: dict[str, np.ndarray] = {}
        """Name of an engine -> its gradient norms, float32 (n,), at its last step without alarm."""
        self._untaken = 0
        """Latest updates in a row that left the healing state unchanged."""
        self._accumulated = 0
        """The number of these before the previous change. The same in every accumulation."""

    def restart(self, states: Sequence[HealState]) -> None:
        """Sets the states from which the next dispatch starts, at the start and after a load.

        Args:
            states: the state of each engine, on the device.
        """
        self._last = start_read(states)

    def continues(self, engines: Sequence[EngineEntry], states: Sequence[HealState]) -> StepReader:
        """A reader that continues with another structure, after its first step. Waits for it.

        Nobody has seen the state from which this step started.

        Args:
            engines: the engines in the new structure.
            states: the state of each engine after the first step.
        """
        reader = StepReader(engines, self._accumulates, self._warn)
        reader._stride = self._stride
        steps = self._stride or 1
        [after] = start_read(states)()
        before = [view._replace(step=max(view.step - steps, 0)) for view in after]
        reader._last = lambda: [before]
        return reader

    def dispatch(
        self,
        states: Sequence[HealState],
        votes: Callable[[], bool],
        block: BlockRecords | None = None,
    ) -> Dispatch:
        """Begins to copy what the host reads of a dispatch.

        The first call waits for the device, to learn the number of steps. Later dispatches are
        assumed to have as many; a wrong number (the last dispatch of an epoch may have fewer) is
        corrected by `read`.

        Args:
            states: the state of each engine that the dispatch has returned.
            votes: returns whether the processes of the run vote after this dispatch.
            block: the records of a block of `Healer.scan`, or None for a single update.

        Returns:
            The dispatch, to be read later.
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
        read = _Once(lambda: steps(before()[-1], after()))
        if self._stride is None:
            self._stride = len(read()) / updates
        return Dispatch(read, max(1, round(self._stride * updates)), votes)

    def _steps(self, before: list[HostView], views: list[list[HostView]]) -> list[list[StepRecord]]:
        """The records of each step of a dispatch of one update, at least one step."""
        [after] = views
        steps, changed = self._steps_of_update(before, after)
        self._stride = len(steps)
        if not self._was_taken(changed):
            return [[record._replace(taken=False) for record in steps[0]]]
        return steps

    def _steps_of_block(
        self, before: list[HostView], views: list[list[HostView]]
    ) -> list[list[StepRecord]]:
        """The records of each step of a block of `Healer.scan`, at least one step.

        An update may take no optimizer step, as in off-policy learning, and is no step then. A
        block without any step counts as one step that no engine has judged.
        """
        steps: list[list[StepRecord]] = []
        earlier = before
        for after in views:
            of_update, changed = self._steps_of_update(earlier, after)
            if changed:
                steps += of_update
            earlier = after
        if not steps:
            return self._steps_of_update(before, views[-1])[0]
        self._stride = len(steps) / len(views)
        return steps

    def _steps_of_update(
        self, before: list[HostView], after: list[HostView]
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
        self, engine: EngineEntry, first: int, new: HostView, steps: list[list[StepRecord]]
    ) -> None:
        """Adds an engine's records of the steps after step `first`."""
        for number in range(first, new.step):
            record = unpack_record(new.record(number + 1), engine.name)
            if record.step == new.step:  # norms of earlier steps are overwritten
                if record.cause:
                    usual = self._usual_norms.get(engine.name)
                    record = record._replace(
                        evidence=suspects(new.norms, usual, engine.leaves),
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
                # optax.MultiSteps around `protect`. The order in the last row was handled already.
                idle = unpack_record(new.record(new.step), engine.name).unjudged()
                records.append(idle._replace(step=new.step, judged=False))

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


def _count(before: Sequence[HostView], after: Sequence[HostView]) -> int:
    """Smallest number of steps that an engine has judged, at least 1."""
    counts: list[int] = []
    for old, new in zip(before, after, strict=True):
        if new.step > old.step:
            counts.append(new.step - old.step)
    return min(counts, default=1)


def _check_continues(engine: EngineEntry, old: HostView, new: HostView) -> None:
    """Raises HealStateError unless `new` follows from `old` by steps whose records exist."""
    if new.step < old.step or (new.step == old.step and _has_changed(old, new)):
        raise HealStateError(
            f'the optimizer state of "{engine.name}" was reset, with step {new.step} after '
            f"step {old.step}: tx.init(params) within the loop loses the moments, "
            "the detectors and the budgets. Call it once, before the Healer. To reset only the "
            "moments: with_heal_state(without_heal_state(tx.init(params)), like=old)"
        )
    if new.step - old.step > len(new.ring):
        steps = new.step - old.step
        raise HealStateError(
            f"one dispatch has {steps} steps, and the state holds the records of {len(new.ring)}: "
            f"write protect(tx, policy, records={steps})"
        )


def _has_changed(old: HostView, new: HostView) -> bool:
    """Whether the record of the newest step differs, in what no edit of the Healer changes.

    A step that is not judged, or that the caller skips, does not change the record.
    """
    before = old.record(new.step)[_SEEN]
    after = new.record(new.step)[_SEEN]
    return before.tobytes() != after.tobytes()
