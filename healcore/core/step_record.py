"""`StepRecord`: the numbers of one step, for the runtime, metrics files and `healcore replay`."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from healcore.core.evidence import Evidence
from healcore.core.verdict import Action, Cause, Decision

_STATE_PATHS = {
    "step": "step",
    "onset": "incident.onset",
    "incident": "incident.number",
    "incident_open": "incident.open",
    "action": "last.decision.action",
    "cause": "last.decision.cause",
    "rollback_depth": "last.decision.rollback_depth",
    "skip": "last.decision.skip",
    "grad_scale": "last.decision.grad_scale",
    "lr_scale": "last.decision.lr_scale",
    "loss": "last.loss",
    "grad_norm": "last.grad_norm",
    "threshold": "last.threshold",
    "z": "last.z",
    "z_loss": "last.z_loss",
}
"""Place of each number in an EngineState, in the order in which they are packed."""

INTS = 8  # the first numbers are int32 or bool, the rest float32

_from_state = attrgetter(*_STATE_PATHS.values())


class Readings(NamedTuple):
    """The numbers behind a cause. Any of them may be NaN or Inf."""

    loss: float  # last finite loss
    grad_norm: float  # last finite global norm of the gradients, before clipping
    threshold: float  # the norm above which the step would have been clipped; 0: none in force
    z: float  # the clipping rule's score of the norm
    z_loss: float  # the loss-spike detector's score


class StepRecord(NamedTuple):
    """One step as one engine judged it: Python values on the host, arrays in a replay.

    Decisions are as ordered; in observe mode they were not enforced.
    """

    step: Any  # steps that the engine has judged; unchanged if it did not judge this one
    onset: Any  # index (in steps judged) of the first alarm of the last incident; -1: none
    incident: Any  # number of the last incident, from 1; 0: none yet
    incident_open: Any  # bool: one is open, of more than skipped non-finite steps
    action: Any  # `Action` flags
    cause: Any  # `Cause` flags
    rollback_depth: Any  # known-good checkpoints to go back if ROLLBACK is ordered, else 0
    skip: Any  # bool
    grad_scale: Any  # factor on the gradients, 1 = untouched
    lr_scale: Any  # the learning-rate multiplier
    loss: Any  # this and the following as in `Readings`
    grad_norm: Any
    threshold: Any
    z: Any
    z_loss: Any
    engine: str = ""  # name of the optimizer in the run's state: each has an engine
    evidence: tuple[Evidence, ...] = ()  # only for steps with a cause: the worst first, at most 10
    # Loss and gradient norm of this rank alone; only for steps with a cause, with several ranks
    of_rank: tuple[float, float] | None = None
    judged: bool = True  # False: gradients were only accumulated, for the update of a later step

    @property
    def decision(self) -> Decision:
        """As ordered, without `group_scale`, which may have thousands of numbers."""
        return Decision(*(getattr(self, name) for name in Decision._fields[:6]))

    @property
    def readings(self) -> Readings:
        """The numbers behind its cause."""
        return Readings(*(getattr(self, name) for name in Readings._fields))

    def unjudged(self) -> StepRecord:
        """The record of a step that the engine did not judge: no cause, nothing ordered."""
        return self._replace(
            action=Action(0), cause=Cause(0), rollback_depth=0, skip=False, grad_scale=1.0
        )


FIELDS = StepRecord._fields[: len(_STATE_PATHS)]  # in the order in which they are packed


def numbers(state: Any) -> tuple[Any, ...]:
    """The numbers of the last step: arrays of an EngineState, in the order of `FIELDS`."""
    return _from_state(state)


def leaf_paths() -> list[str]:
    """Paths of the numbers in an EngineState, in the order of `FIELDS`."""
    return list(_STATE_PATHS.values())


def on_host(values: Sequence[Any], engine: str = "") -> StepRecord:
    """A record in Python values, from scalars in the order of `FIELDS`."""
    step, onset, incident, is_open, action, cause, depth, skip = map(int, values[:INTS])
    return StepRecord(
        step,
        onset,
        incident,
        bool(is_open),
        Action(action),
        Cause(cause),
        depth,
        bool(skip),
        *map(float, values[INTS:]),
        engine=engine,
    )


def unpack(packed: np.ndarray, engine: str = "") -> StepRecord:
    """A record from int32 (`len(FIELDS)`,): the integers, then the bits of the floats."""
    return on_host(packed[:INTS].tolist() + packed[INTS:].view(np.float32).tolist(), engine)
