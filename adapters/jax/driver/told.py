"""One step's numbers on their way from the device: packed into one vector, copied behind the loop.

One vector, because each copy to the host has a fixed price; packed right after the step, because
the next one may donate the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from healcore.core.verdict import Action, Cause, Decision
from healcore.jax.driver.engines import Found
from healcore.jax.driver.evidence import worst
from healcore.jax.driver.places import value
from healcore.jax.state import HealState
from healcore.runtime.driver import Told

FIELDS = (
    "heal_step",
    "heal_incident_onset",
    "heal_incident_number",
    "heal_incident_open",
    "heal_last_decision_action",
    "heal_last_decision_cause",
    "heal_last_decision_rollback_depth",
    "heal_last_decision_skip",
    "heal_last_decision_grad_scale",
    "heal_last_decision_lr_scale",
    "heal_last_loss",
    "heal_last_grad_norm",
    "heal_last_threshold",
    "heal_last_z",
    "heal_last_z_loss",
)
"""int32, bool and float32, all 0-d, in the order in which they are packed."""
_INTEGERS = 8


class Numbers:
    """What the engines hold at one moment, on its way.

    Args:
        engines: of the run.
        states: theirs, leaves may be nnx.Variables. They are packed now, and may be donated then.
    """

    def __init__(self, engines: Sequence[Found], states: Sequence[HealState]) -> None:
        self._ends = np.cumsum([len(FIELDS) + len(engine.leaves) for engine in engines])[:-1]
        self._packed = _pack([_wanted(state) for state in states])
        self._packed.copy_to_host_async()

    def words(self) -> list[np.ndarray]:
        """The packed words of each engine."""
        return np.split(np.asarray(self._packed), self._ends)

    def steps(self) -> np.ndarray:
        """How many steps each engine has judged."""
        return np.asarray([words[0] for words in self.words()])


class Arriving:
    """A step whose numbers are on their way; a `healcore.runtime.driver.Handle`.

    Args:
        engines: of the run.
        before: the numbers before the step.
        after: those after it.
    """

    def __init__(self, engines: Sequence[Found], before: Numbers, after: Numbers) -> None:
        self._engines = engines
        self._before = before
        self._after = after

    def read(self) -> list[Told]:
        """The step, one entry per engine, also for one that has judged nothing in it."""
        words, moved = self._after.words(), self.moved()
        return [_told(*each) for each in zip(self._engines, words, moved, strict=True)]

    def moved(self) -> np.ndarray:
        """How many steps each engine has judged in this one."""
        return self._after.steps() - self._before.steps()


def _wanted(state: HealState) -> tuple[list[Any], Any]:
    return [value(state.heal_state[name]) for name in FIELDS], value(state.heal_leaf_norms)


@jax.jit
def _pack(states: list[tuple[list[Any], Any]]) -> jax.Array:
    """Everything as int32, bit for bit."""
    words = []
    for scalars, norms in states:
        words += [_bits(scalar)[None] for scalar in scalars] + [_bits(norms)]
    return jnp.concatenate(words)


def _bits(array: jax.Array) -> jax.Array:
    if array.dtype == jnp.bool_:
        return array.astype(jnp.int32)
    return jax.lax.bitcast_convert_type(array, jnp.int32)


def _told(engine: Found, words: np.ndarray, moved: int) -> Told:
    told = _decoded(engine, words)
    if moved:
        return told
    # Another optimizer's step, or gradients were only accumulated (optax.MultiSteps around
    # `protect`): the state still tells of the step before, whose order was given already.
    decision = told.decision._replace(
        grad_scale=1.0, skip=False, action=Action(0), cause=Cause(0), rollback_depth=0
    )
    return told._replace(decision=decision, evidence=(), judged=False)


def _decoded(engine: Found, words: np.ndarray) -> Told:
    step, onset, incident, is_open, action, cause, depth, skip = map(int, words[:_INTEGERS])
    numbers = words[_INTEGERS:].view(np.float32)
    scalars = len(FIELDS) - _INTEGERS
    grad_scale, lr_scale, loss, norm, threshold, z, z_loss = map(float, numbers[:scalars])
    decision = Decision(
        grad_scale=grad_scale,
        skip=bool(skip),
        lr_scale=lr_scale,
        action=Action(action),
        cause=Cause(cause),
        rollback_depth=depth,
    )
    return Told(
        engine=engine.name,
        engine_step=step,
        decision=decision,
        onset=onset,
        incident=incident,
        incident_open=bool(is_open),
        loss=loss,
        grad_norm=norm,
        threshold=threshold,
        z=z,
        z_loss=z_loss,
        evidence=worst(engine.leaves, numbers[scalars:]) if cause else (),
    )
