"""Copies the records of a dispatch's steps to the host while the loop continues.

The records are copied as one vector, because each copy has a fixed cost. The copy begins right
after the dispatch, because the next dispatch may donate the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from healcore.core import step_record
from healcore.core.evidence import Evidence, evidence
from healcore.core.step_record import StepRecord
from healcore.jax import state_layout
from healcore.jax.driver.engines import EngineEntry
from healcore.jax.driver.live_state import array_of
from healcore.jax.heal_state import HealState, HealStateError
from healcore.jax.state_layout import StepCounts, last_record, records_between, unpack_record

_SEEN = [step_record.FIELDS.index(name) for name in ("loss", "grad_norm")]
"""Indices in a record that no edit of the Healer changes."""


class Readback(NamedTuple):
    """The part of one engine's state that the host reads, and what follows from it."""

    counts: StepCounts
    records: np.ndarray
    norms: np.ndarray
    """float32 (n,): norm of each gradient leaf at the last step."""
    steps: list[StepRecord]
    """Records since the previous readback, oldest first."""
    missing: int
    """Number of these steps without a record."""


class PendingReadback:
    """An asynchronous copy of each engine's `Readback`. `states` may be donated after the start.

    Args:
        states: the healing states.
        engines: the engines of the run.
        before: the previous readback, or None if `states` have taken no step since.
    """

    def __init__(
        self,
        states: Sequence[HealState],
        engines: Sequence[EngineEntry],
        before: PendingReadback | None,
    ) -> None:
        arrays = [
            (array_of(each.heal_ints), array_of(each.heal_records), array_of(each.heal_leaf_norms))
            for each in states
        ]
        self._shapes = [(records.shape, norms.shape[0]) for _, records, norms in arrays]
        self._packed = _pack(arrays)
        self._packed.copy_to_host_async()
        self._engines = engines
        self._before = before
        self._read: list[Readback] | None = None

    def read(self) -> list[Readback]:
        """The `Readback` of each engine. Waits until the copy has arrived."""
        if self._read is None:
            packed, found = np.asarray(self._packed), []
            for index, (shape, tensors) in enumerate(self._shapes):
                end = 2 + math.prod(shape)
                counts, records = StepCounts(*packed[:2].tolist()), packed[2:end].reshape(shape)
                norms, packed = packed[end : end + tensors], packed[end + tensors :]
                steps = self._steps(index, counts, records)
                found.append(Readback(counts, records, norms.view(np.float32), *steps))
            self._read, self._before = found, None  # frees the previous readback
        return self._read

    def _steps(
        self, index: int, counts: StepCounts, records: np.ndarray
    ) -> tuple[list[StepRecord], int]:
        """The end of a `Readback`."""
        if self._before is None:
            return [], 0
        before = self._before.read()[index].counts
        if counts.steps <= before.steps:
            return [], 0
        rows, missing = records_between(records, before, counts)
        return [unpack_record(row, self._engines[index].name) for row in rows], missing


class Dispatch:
    """Implements `healcore.runtime.driver.PendingDispatch`: a dispatch that is being copied.

    Args:
        engines: the engines of the run.
        before: readback of the previous dispatch, or of the start.
        after: readback of this dispatch.
        usual: engine name -> gradient norms at its last step without an alarm; updated here.
        count: assumed number of steps, or None to read the number from the device.
        on_missing: called with the number of steps and the number of steps without a record.
        votes: returns whether the processes of the run vote after this dispatch.
        on_bad_update: called with the names of tensors whose update was not finite.
        on_read: called with whether the dispatch has changed an engine's state; returns whether the
            dispatch was taken.
    """

    def __init__(
        self,
        engines: Sequence[EngineEntry],
        before: PendingReadback,
        after: PendingReadback,
        usual: dict[str, np.ndarray],
        count: int | None,
        on_missing: Callable[[int, int], object],
        votes: Callable[[], bool],
        on_bad_update: Callable[[list[str]], object],
        on_read: Callable[[bool], bool],
    ) -> None:
        self._engines = engines
        self._before = before
        self._after = after
        self._usual_norms = usual
        self._on_missing = on_missing
        self._votes = votes
        self._on_bad_update, self._on_read = on_bad_update, on_read
        self._steps: list[list[StepRecord]] | None = None
        self.count = self._count_steps() if count is None else count

    @property
    def vote_requested(self) -> bool:
        """Whether the processes of the run vote after this dispatch."""
        return self._votes()

    @property
    def steps_read(self) -> int | None:
        """Number of steps of this dispatch, or None before `steps` is called."""
        return None if self._steps is None else len(self._steps)

    def steps(self) -> list[list[StepRecord]]:
        """Returns the records of each step, at least one step.

        The number of steps is the smallest number that any engine has judged in this dispatch. An
        engine with more (five updates of a critic for one update of the generator) has several
        records per step. Raises HealStateError if the state of an engine is reset, by `tx.init`.
        """
        if self._steps is None:
            parts = list(zip(self._engines, self._before.read(), self._after.read(), strict=True))
            for each in parts:
                self._check_continues(*each)
            self._steps = [[] for _ in range(self._count_steps())]
            for each in parts:
                self._add(*each, self._steps)
            # A step with `externally_skipped` has new norms, unlike one that keeps its old state.
            changed = self._steps[0][0].judged or any(
                old.counts != new.counts or old.norms.tobytes() != new.norms.tobytes()
                for _, old, new in parts
            )
            if not self._on_read(changed):
                self._steps = [[each._replace(taken=False) for each in self._steps[0]]]
        return self._steps

    def _count_steps(self) -> int:
        pairs = zip(self._after.read(), self._before.read(), strict=True)
        moved = (after.counts.steps - before.counts.steps for after, before in pairs)
        return min((steps for steps in moved if steps > 0), default=1)

    def _check_continues(self, engine: EngineEntry, before: Readback, after: Readback) -> None:
        now, then = after.counts.steps, before.counts.steps
        if now > min(then, self.count):
            return
        seen = [last_record(each.records, now)[_SEEN].tobytes() for each in (before, after)]
        # A step that is not judged, or that the caller skips, does not change the record.
        if now < then or seen[0] != seen[1]:
            raise HealStateError(
                f'the optimizer state of "{engine.name}" was reset, with step {now} after '
                f"step {then}: tx.init(params) within the loop loses the moments, "
                "the detectors and the budgets. Call it once, before the Healer. To reset only the "
                "moments: with_heal_state(without_heal_state(tx.init(params)), like=old)"
            )

    def _add(
        self, engine: EngineEntry, before: Readback, after: Readback, steps: list[list[StepRecord]]
    ) -> None:
        moved = after.counts.steps - before.counts.steps
        for record in after.steps:
            if record.step == after.counts.steps:  # norms of earlier steps are overwritten
                found = self._evidence(engine, record, np.abs(after.norms))
                if marked := np.signbit(after.norms).nonzero()[0].tolist():
                    self._on_bad_update([engine.leaves[i] for i in marked])
                record = record._replace(evidence=found) if found else record
            steps[(record.step - 1 - before.counts.steps) * len(steps) // moved].append(record)
        for records in steps:
            if not any(each.engine == engine.name for each in records):
                records.append(_idle(engine, after))
        if after.missing:
            self._on_missing(moved, after.missing)

    def _evidence(
        self, engine: EngineEntry, record: StepRecord, norms: np.ndarray
    ) -> tuple[Evidence, ...]:
        if not record.cause:
            self._usual_norms[engine.name] = norms
            return ()
        return evidence(norms, self._usual_norms.get(engine.name), engine.leaves)


@jax.jit
def _pack(states: list[tuple[Any, Any, Any]]) -> jax.Array:
    """Packs the arrays into one int32 vector. Floats keep their bits."""
    parts = []
    for ints, records, norms in states:
        bits = jax.lax.bitcast_convert_type(norms, jnp.int32)
        counts = jnp.stack([state_layout.step(ints), state_layout.header(ints).orders])
        parts += [counts, records.ravel(), bits]
    return jnp.concatenate(parts)


def _idle(engine: EngineEntry, read: Readback) -> StepRecord:
    """The record for a step that the engine did not judge, or whose record is missing."""
    # An engine does not judge steps of other optimizers, or micro-batches of an optax.MultiSteps
    # around `protect`. The state still holds the previous step, whose order was handled already.
    record = unpack_record(last_record(read.records, read.counts.steps), engine.name)
    return record.unjudged()._replace(step=read.counts.steps, judged=False)
