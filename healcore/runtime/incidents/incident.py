"""The argument of a hook: one incident, as an immutable value."""

from __future__ import annotations

from typing import NamedTuple

from healcore.core.evidence import Evidence
from healcore.core.step_record import Readings
from healcore.core.verdict import Action, Cause, Decision
from healcore.runtime.store.protocol import Saved

Batch = tuple[int, int]
"""A batch's id: epoch, and index within it. A `BatchId` is one."""


class Facts(NamedTuple):
    """The state of the run, read-only: nothing in it refers to the `Healer`."""

    run: str = ""
    """Id of the run, as in its events."""
    policy: str = ""
    observes: bool = False
    """The policy only observes: what a hook returns is not carried out."""
    framework: str = ""
    rank: int = 0
    learning_rate: float | None = None
    """The user's own, without the multiplier; None: unknown."""
    rollbacks: int = 0
    """Carried out so far."""
    last_good: int | None = None
    """Step of the newest known-good checkpoint."""
    checkpoints: tuple[Saved, ...] = ()


class Incident(NamedTuple):
    """One step for which the policy has ordered something."""

    number: int
    """From 1, over the whole run."""
    step: int
    """The step that was judged, from 0. The loop is `lag` steps ahead of it."""
    onset: int
    """Step of the incident's first alarm."""
    cause: Cause
    decision: Decision
    """As ordered. A hook may override `decision.action`; the rest has happened."""
    readings: Readings
    engine: str = ""
    """The optimizer's name, if there are several."""
    evidence: tuple[Evidence, ...] = ()
    """Tensors whose gradients were not finite or stood out, the worst first."""
    batches: tuple[Batch, ...] = ()
    """Ids of the step's batches."""
    facts: Facts = Facts()

    @property
    def action(self) -> Action:
        """The actions that are ordered."""
        return Action(int(self.decision.action))
