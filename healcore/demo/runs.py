"""The runs that the demo compares, their outcomes, and the claims about them."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from healcore.demo.scenario import Corpus, Scenario
from healcore.events.models import EventRecord
from healcore.policy import Policy
from healcore.runtime.incidents.rollback import Rollback

ARMS = ("unprotected", "fixed clip", "healed")
"""No protection; gradients clipped to norm 1.0, the usual protection; a `Healer`."""
FIXED_CLIP = 1.0
PROBATION = 20
"""Healthy steps until a checkpoint is known-good; the presets' 100 are a third of a run."""
SAVE_EVERY = 10


def with_short_probation(policy: Policy) -> Policy:
    """Returns the policy with a probation of at most `PROBATION`, for a short run."""
    rollback = policy.rollback
    probation = min(rollback.probation, PROBATION)
    return policy.model_copy(
        update={"rollback": rollback.model_copy(update={"probation": probation})}
    )


class Step(NamedTuple):
    """One training step."""

    step: int
    batch: int
    """Index of the batch; larger than `step` after a rollback that skipped batches."""
    loss: Any
    """Loss before the update: a 0-d array or tensor, or a float after `DemoRun.finish`."""
    grad_norm: Any
    """Global L2 norm before clipping, of the same types."""


@dataclass
class DemoRun:
    """One run: its framework, arm, seed and data."""

    framework: str
    arm: str
    seed: int = 0
    folder: Path = Path()
    steps: list[Step] = field(default_factory=list)
    """All steps in the order taken, including those that a rollback has undone."""
    held_out_loss: float = math.nan
    """Nats per byte on held-out text at the end of the run."""
    events: Sequence[Mapping[str, Any]] = ()

    def __str__(self) -> str:
        seed = f", seed {self.seed}" if self.seed else ""
        return f"{self.framework} {self.arm}{seed}"

    def finish(self, held_out_loss: Any) -> None:
        """Sets the held-out loss and converts all losses and norms to floats."""
        self.held_out_loss = float(held_out_loss)
        self.steps = [
            step._replace(loss=float(step.loss), grad_norm=float(step.grad_norm))
            for step in self.steps
        ]

    def column(self, name: str) -> np.ndarray:
        """One field of all steps, an array (steps,)."""
        return np.asarray([getattr(step, name) for step in self.steps])

    def mean_loss(self, until: int, over: int = 20) -> float:
        """Mean loss of the last `over` steps before batch `until`, except undone steps."""
        valid: list[Step] = []
        for step in self.steps:
            while valid and valid[-1].step >= step.step:
                valid.pop()
            valid.append(step)
        losses = [step.loss for step in valid if step.batch < until]
        return float(np.mean(losses[-over:])) if losses else math.nan

    @property
    def rollbacks(self) -> list[Mapping[str, Any]]:
        """The rollback events."""
        return [event for event in self.events if event["kind"] == "rollback"]

    @property
    def ending(self) -> str | None:
        """The kind of end, such as "completed" or "stopped"; None without an end event."""
        return next((event["ending"] for event in self.events if event["kind"] == "end"), None)


def format_loss(loss: float) -> str:
    """Formats a loss in at most 6 characters."""
    if not math.isfinite(loss):
        return "NaN" if math.isnan(loss) else "inf"
    return f"{loss:.2f}" if abs(loss) < 1000 else f"{loss:.0e}"


class Outcome(enum.Enum):
    """The result of a run, by its held-out loss."""

    TRAINED = "trained"
    """Better than a model of byte pairs, so the model uses context."""
    NEITHER = "in between"
    """Better than a model of byte frequencies only, or stopped by the policy."""
    FAILED = "failed"
    """No better than a model of byte frequencies, or not finite."""


class DemoClaim(NamedTuple):
    """A claim about one run, and whether it holds."""

    text: str
    holds: bool


def classify(run: DemoRun, corpus: Corpus) -> Outcome:
    """Classifies a finished run."""
    loss = run.held_out_loss
    if not math.isfinite(loss) or loss >= corpus.byte_frequency_loss:
        return Outcome.FAILED
    if loss >= corpus.byte_pair_loss or run.ending == "stopped":
        return Outcome.NEITHER
    return Outcome.TRAINED


def check_claims(runs: Sequence[DemoRun], scenario: Scenario) -> list[DemoClaim]:
    """Checks all claims about finished runs. Runs with a fixed clip have no claims."""
    checked, corpus = [], scenario.corpus
    frequencies, pairs = f"{corpus.byte_frequency_loss:.2f}", f"{corpus.byte_pair_loss:.2f}"
    unprotected = {(run.framework, run.seed): run for run in runs if run.arm == "unprotected"}
    for run in runs:
        loss = format_loss(run.held_out_loss)
        if run.arm == "unprotected":
            text = f"{run}: fails, no better than byte frequencies ({frequencies})"
            failed = classify(run, corpus) is Outcome.FAILED
            checked.append(DemoClaim(f"{text} on unseen text: {loss}", failed))
        elif run.arm == "healed":
            text = f"{run}: trains, better than byte pairs ({pairs})"
            trained = run.held_out_loss < corpus.byte_pair_loss
            checked.append(DemoClaim(f"{text} on unseen text: {loss}", trained))
            text = f"{run}: runs to its end: {run.ending or 'not known'}"
            checked.append(DemoClaim(text, run.ending == "completed"))
            if plain := unprotected.get((run.framework, run.seed)):
                checked += _rollback_claims(plain, run, scenario)
    return checked


def _rollback_claims(plain: DemoRun, healed: DemoRun, scenario: Scenario) -> Iterator[DemoClaim]:
    """Claims that the unprotected run diverged and that a rollback saved the healed run."""
    healed_loss = healed.mean_loss(scenario.empty_batch)
    plain_loss = plain.mean_loss(scenario.empty_batch)
    diverged = not plain_loss < scenario.corpus.byte_frequency_loss
    text = f"{plain}: diverges before the empty batch: {format_loss(plain_loss)}"
    yield DemoClaim(text, diverged)
    better = healed_loss < (math.inf if math.isnan(plain_loss) else plain_loss)
    text = f"{healed}: has a lower loss before the empty batch: {format_loss(healed_loss)}"
    yield DemoClaim(f"{text}, unprotected {format_loss(plain_loss)}", better)
    rollbacks = [event for event in healed.rollbacks if event["onset"] in scenario.wrong_lr_steps]
    onsets = ", ".join(f"step {event['onset']}" for event in rollbacks) or "never"
    text = f"{healed}: rolls back while the learning rate is wrong: {onsets}"
    yield DemoClaim(text, bool(rollbacks))
    for event in rollbacks:
        where = ", the initial one" if event["initial"] else ""
        text = f"{healed}: rolls back to a known-good checkpoint: step {event['checkpoint']}{where}"
        yield DemoClaim(text, not event["initial"])
        rollback = Rollback.of(EventRecord.model_validate(event))
        text = f"{healed}: lowers the rate: {rollback.lr_text or 'no'}"
        yield DemoClaim(text, rollback.lowers_lr)
