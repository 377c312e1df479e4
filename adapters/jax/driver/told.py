"""One step's numbers on their way from the device: packed into one vector, copied behind the loop.

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

from healcore.core.verdict import Action, Cause, Decision
from healcore.jax import packing
from healcore.jax.driver.engines import Found
from healcore.jax.driver.evidence import worst
from healcore.jax.driver.places import value
from healcore.jax.records import Counts, between, last
from healcore.jax.state import HealState
from healcore.runtime.driver import Told


class Read(NamedTuple):
    """What one engine holds."""

    counts: Counts
    records: np.ndarray
    norms: np.ndarray
    """float32 (n,), of the last step's gradients."""


class Numbers:
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
        self._read: list[Read] | None = None

    def read(self) -> list[Read]:
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


class Arriving:
    """A dispatch whose numbers are on their way; a `healcore.runtime.driver.Handle`.

    Args:
        engines: of the run.
        before: the numbers before it.
        after: those after it.
        count: steps that it is taken to have; None: read them off the device now.
        lost: called with the steps of the dispatch, and how many of them have no record.
    """

    def __init__(
        self,
        engines: Sequence[Found],
        before: Numbers,
        after: Numbers,
        count: int | None = None,
        lost: Callable[[int, int], object] = lambda steps, missing: None,
    ) -> None:
        self._engines = engines
        self._before = before
        self._after = after
        self._lost = lost
        self._steps: list[list[Told]] | None = None
        self.count = self._had() if count is None else count

    @property
    def found(self) -> int | None:
        """How many steps it had; None as long as nobody has read it."""
        return None if self._steps is None else len(self._steps)

    def steps(self) -> list[list[Told]]:
        """Its steps: as many as the engine with the fewest has judged in it, at least one.

        Another engine's (five updates of a critic for one of a generator) are told with them.
        """
        if self._steps is None:
            self._steps = [[] for _ in range(self._had())]
            for each in zip(self._engines, self._before.read(), self._after.read(), strict=True):
                self._tell(*each, self._steps)
        return self._steps

    def _had(self) -> int:
        return min((int(moved) for moved in self.moved() if moved > 0), default=1)

    def _tell(self, engine: Found, before: Read, after: Read, steps: list[list[Told]]) -> None:
        """Adds what one engine has judged to the steps."""
        moved = after.counts.steps - before.counts.steps
        rows, missing = (
            between(after.records, before.counts, after.counts) if moved > 0 else ([], 0)
        )
        for row in rows:
            step = int(row[0])
            # The norms of earlier steps have been overwritten.
            norms = after.norms if step == after.counts.steps else after.norms[:0]
            place = (step - 1 - before.counts.steps) * len(steps) // moved
            steps[place].append(_decoded(engine, row, norms))
        for told in steps:
            if not any(each.engine == engine.name for each in told):
                told.append(_idle(engine, after))
        if missing:
            self._lost(moved, missing)

    def read(self) -> list[Told]:
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


def _idle(engine: Found, read: Read) -> Told:
    """A step in which it has judged nothing, or of which there is no record."""
    told = _decoded(engine, last(read.records, read.counts.steps), read.norms)
    # Another optimizer's step, or gradients were only accumulated (optax.MultiSteps around
    # `protect`): the state still tells of the step before, whose order was given already.
    decision = told.decision._replace(
        grad_scale=1.0, skip=False, action=Action(0), cause=Cause(0), rollback_depth=0
    )
    return told._replace(
        engine_step=read.counts.steps, decision=decision, evidence=(), judged=False
    )


def _split(words: np.ndarray, shape: tuple[int, ...]) -> Read:
    end = 2 + math.prod(shape)
    counts = Counts(int(words[0]), int(words[1]))
    return Read(counts, words[2:end].reshape(shape), words[end:].view(np.float32))


def _decoded(engine: Found, record: np.ndarray, norms: np.ndarray) -> Told:
    found = dict(zip(packing.TOLD_INTS, map(int, record), strict=False))
    floats = record[len(packing.TOLD_INTS) :].view(np.float32)
    numbers = dict(zip(packing.TOLD_FLOATS, map(float, floats), strict=True))
    decision = Decision(
        grad_scale=numbers["last_decision_grad_scale"],
        skip=bool(found["last_decision_skip"]),
        lr_scale=numbers["last_decision_lr_scale"],
        action=Action(found["last_decision_action"]),
        cause=Cause(found["last_decision_cause"]),
        rollback_depth=found["last_decision_rollback_depth"],
    )
    return Told(
        engine=engine.name,
        engine_step=found["step"],
        decision=decision,
        onset=found["incident_onset"],
        incident=found["incident_number"],
        incident_open=bool(found["incident_open"]),
        loss=numbers["last_loss"],
        grad_norm=numbers["last_grad_norm"],
        threshold=numbers["last_threshold"],
        z=numbers["last_z"],
        z_loss=numbers["last_z_loss"],
        evidence=worst(engine.leaves, norms) if decision.cause else (),
    )
