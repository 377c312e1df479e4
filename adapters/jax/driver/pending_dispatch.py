"""The records of a dispatch's steps, on their way to the host: one vector, copied behind the loop.

One vector, because each copy to the host has a fixed price; packed right after the step, because
the next one may donate the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from healcore.core import step_record
from healcore.core.evidence import Evidence, standouts
from healcore.core.step_record import StepRecord
from healcore.jax import packing
from healcore.jax.driver.engines import Found
from healcore.jax.driver.places import value
from healcore.jax.records import Counts, between, last
from healcore.jax.state import HealState


class Readback(NamedTuple):
    """What one engine holds."""

    counts: Counts
    records: np.ndarray
    norms: np.ndarray
    """float32 (n,), of the last step's gradients."""


class PendingReadback:
    """What the engines hold at one moment, on its way.

    Args:
        engines: of the run.
        states: theirs, leaves may be nnx.Variables. They are packed now, and may be donated then.
    """

    def __init__(self, engines: Sequence[Found], states: Sequence[HealState]) -> None:
        wanted = [_wanted(state) for state in states]
        self._shapes = [records.shape for _, records, _ in wanted]
        sizes = [2 + math.prod(records.shape) + norms.shape[0] for _, records, norms in wanted]
        self._ends = np.cumsum(sizes)[:-1]
        self._packed = _pack(wanted)
        self._packed.copy_to_host_async()
        self._read: list[Readback] | None = None

    def read(self) -> list[Readback]:
        """What each engine holds; waits only if it has not arrived yet."""
        if self._read is None:
            self._read = [
                _split(words, shape)
                for words, shape in zip(
                    np.split(np.asarray(self._packed), self._ends), self._shapes, strict=True
                )
            ]
        return self._read

    def steps(self) -> np.ndarray:
        """How many steps each engine has judged."""
        return np.asarray([each.counts.steps for each in self.read()])


class Dispatch:
    """A dispatch whose records are on their way; a `healcore.runtime.driver.PendingDispatch`.

    Args:
        engines: of the run.
        before: what the engines held before it.
        after: and after it.
        usual: of each engine the norms at its last step without an alarm; kept up to date.
        count: steps that it is taken to have; None: read them off the device now.
        lost: called with the steps of the dispatch, and how many of them have no record.
    """

    def __init__(
        self,
        engines: Sequence[Found],
        before: PendingReadback,
        after: PendingReadback,
        usual: dict[str, np.ndarray],
        count: int | None = None,
        lost: Callable[[int, int], object] = lambda steps, missing: None,
    ) -> None:
        self._engines = engines
        self._before = before
        self._after = after
        self._usual = usual
        self._lost = lost
        self._steps: list[list[StepRecord]] | None = None
        self.count = self._had() if count is None else count

    @property
    def found(self) -> int | None:
        """How many steps it had; None as long as nobody has read it."""
        return None if self._steps is None else len(self._steps)

    def steps(self) -> list[list[StepRecord]]:
        """Its steps: as many as the engine with the fewest has judged in it, at least one.

        Another engine's (five updates of a critic for one of a generator) are in them.
        """
        if self._steps is None:
            self._steps = [[] for _ in range(self._had())]
            for each in zip(self._engines, self._before.read(), self._after.read(), strict=True):
                self._add(*each, self._steps)
        return self._steps

    def _had(self) -> int:
        return min((int(moved) for moved in self.moved() if moved > 0), default=1)

    def _add(
        self, engine: Found, before: Readback, after: Readback, steps: list[list[StepRecord]]
    ) -> None:
        """Adds what one engine has judged to the steps."""
        moved = after.counts.steps - before.counts.steps
        rows, missing = (
            between(after.records, before.counts, after.counts) if moved > 0 else ([], 0)
        )
        for row in rows:
            record = step_record.unpack(row, engine.name)
            if record.step == after.counts.steps:  # norms of earlier ones have been overwritten
                record = record._replace(evidence=self._evidence(engine, record, after.norms))
            steps[(record.step - 1 - before.counts.steps) * len(steps) // moved].append(record)
        for records in steps:
            if not any(each.engine == engine.name for each in records):
                records.append(_idle(engine, after))
        if missing:
            self._lost(moved, missing)

    def _evidence(
        self, engine: Found, record: StepRecord, norms: np.ndarray
    ) -> tuple[Evidence, ...]:
        if not record.cause:
            self._usual[engine.name] = norms
            return ()
        worst = standouts(norms, self._usual.get(engine.name))
        return tuple(Evidence(engine.leaves[i], float(norms[i])) for i in worst)

    def read(self) -> list[StepRecord]:
        """The last step, one entry per engine, also for one that has judged nothing in it."""
        return self.steps()[-1]

    def moved(self) -> np.ndarray:
        """How many steps each engine has judged in this one."""
        return self._after.steps() - self._before.steps()


def _wanted(state: HealState) -> tuple[Any, Any, Any]:
    return value(state.heal_ints), value(state.heal_records), value(state.heal_leaf_norms)


@jax.jit
def _pack(states: list[tuple[Any, Any, Any]]) -> jax.Array:
    """Everything as int32, bit for bit."""
    words = []
    for ints, records, norms in states:
        bits = jax.lax.bitcast_convert_type(norms, jnp.int32)
        counts = jnp.stack([packing.step(ints), packing.marks(ints).orders])
        words += [counts, records.ravel(), bits]
    return jnp.concatenate(words)


def _idle(engine: Found, read: Readback) -> StepRecord:
    """A step in which it has judged nothing, or of which there is no record."""
    # Another optimizer's step, or gradients were only accumulated (optax.MultiSteps around
    # `protect`): the state still holds the step before, whose order was given already.
    record = step_record.unpack(last(read.records, read.counts.steps), engine.name)
    return record.unjudged()._replace(step=read.counts.steps, judged=False)


def _split(words: np.ndarray, shape: tuple[int, ...]) -> Readback:
    end = 2 + math.prod(shape)
    counts = Counts(int(words[0]), int(words[1]))
    return Readback(counts, words[2:end].reshape(shape), words[end:].view(np.float32))
