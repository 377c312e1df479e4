"""What a hook gets to see: one incident, as a value that nobody can change."""

from __future__ import annotations

from typing import NamedTuple

from healcore.core.evidence import Evidence
from healcore.core.step_record import Readings
from healcore.core.verdict import Action, Cause, Decision
from healcore.runtime.store.protocol import Saved

Batch = tuple[int, int]
"""A batch's id: epoch and index in it. A `BatchId` is one."""


class Facts(NamedTuple):
    """How the run stands. To look at: nothing in here leads back into the `Healer`."""

    run: str = ""
    """Id of the run, as in its events."""
    policy: str = ""
    observes: bool = False
    """The policy watches and changes nothing; what a hook answers is not carried out."""
    framework: str = ""
    rank: int = 0
    learning_rate: float | None = None
    """The user's own, without the multiplier; None where it is not known."""
    rollbacks: int = 0
    """Carried out so far."""
    last_good: int | None = None
    """Step of the newest known-good checkpoint."""
    checkpoints: tuple[Saved, ...] = ()


class Incident(NamedTuple):
    """One step on which the policy has ordered something."""

    number: int
    """From 1, over the whole run."""
    step: int
    """The step that was judged, from 0. The loop is `lag` steps further by now."""
    onset: int
    """The step of the incident's first alarm."""
    cause: Cause
    decision: Decision
    """As ordered. `decision.action` is what the hook may override; the rest has happened."""
    readings: Readings
    engine: str = ""
    """The optimizer's name, where there are several."""
    evidence: tuple[Evidence, ...] = ()
    """Tensors whose gradients were not finite or stood out, the worst first."""
    batches: tuple[Batch, ...] = ()
    """Ids of the step's data."""
    facts: Facts = Facts()

    @property
    def action(self) -> Action:
        """What is ordered."""
        return Action(int(self.decision.action))
