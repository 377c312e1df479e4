"""Defines the runs that the demo compares, their outcomes, and the claims about them."""

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
"""No protection; gradients clipped to norm 1.0, the usual protection; healcore's `Healer`."""
FIXED_CLIP = 1.0
PROBATION = 20
"""Healthy steps until a checkpoint is known-good; the presets have 100, a third of a demo run."""
SAVE_EVERY = 10


def shortened(policy: Policy) -> Policy:
    """The same policy with a probation of at most `PROBATION`, for a short run."""
    rollback = policy.rollback
    probation = min(rollback.probation, PROBATION)
    return policy.model_copy(
        update={"rollback": rollback.model_copy(update={"probation": probation})}
    )


class Step(NamedTuple):
    """One step of a run."""

    step: int
    batch: int
    """Index of the batch; it exceeds `step` after a rollback that skips batches."""
    loss: Any
    """Training loss before the update: a 0-d array or tensor, a float after `DemoRun.finish`."""
    grad_norm: Any
    """Global L2 norm before any clipping; the same types."""


@dataclass
class DemoRun:
    """One run: its framework, arm, seed and data."""

    framework: str
    arm: str
    seed: int = 0
    folder: Path = Path()
    steps: list[Step] = field(default_factory=list)
    """All steps in the order taken, also those that a rollback has undone."""
    held_out_loss: float = math.nan
    """Nats per byte on held-out text, at the end."""
    events: Sequence[Mapping[str, Any]] = ()

    def __str__(self) -> str:
        seed = f", seed {self.seed}" if self.seed else ""
        return f"{self.framework} {self.arm}{seed}"

    def finish(self, held_out_loss: Any) -> None:
        """Converts losses and norms to floats."""
        self.held_out_loss = float(held_out_loss)
        self.steps = [
            one._replace(loss=float(one.loss), grad_norm=float(one.grad_norm)) for one in self.steps
        ]

    def column(self, name: str) -> np.ndarray:
        """One field of all steps, (steps,)."""
        return np.asarray([getattr(step, name) for step in self.steps])

    def mean_loss(self, until: int, over: int = 20) -> float:
        """Mean training loss of the last `over` steps before batch `until`, without undone ones."""
        kept: list[Step] = []
        for one in self.steps:
            while kept and kept[-1].step >= one.step:
                kept.pop()
            kept.append(one)
        part = [one.loss for one in kept if one.batch < until]
        return float(np.mean(part[-over:])) if part else math.nan

    @property
    def rollbacks(self) -> list[Mapping[str, Any]]:
        """The rollback events."""
        return [event for event in self.events if event["kind"] == "rollback"]

    @property
    def ending(self) -> str | None:
        """`completed`, `stopped`, ...; None without an end event."""
        return next((event["ending"] for event in self.events if event["kind"] == "end"), None)


def number(loss: float) -> str:
    """A loss in at most 6 characters."""
    if not math.isfinite(loss):
        return "NaN" if math.isnan(loss) else "inf"
    return f"{loss:.2f}" if abs(loss) < 1000 else f"{loss:.0e}"


class Outcome(enum.Enum):
    """How a run ended, by its held-out loss."""

    TRAINED = "trained"
    """Better than a model of byte pairs, so it uses context."""
    NEITHER = "in between"
    """Better than a model of byte frequencies only, or stopped by the policy."""
    FAILED = "failed"
    """No better than a model of byte frequencies, or not finite."""


class DemoClaim(NamedTuple):
    """One claim about one run."""

    text: str
    holds: bool


def outcome(run: DemoRun, corpus: Corpus) -> Outcome:
    """The outcome of one finished run."""
    loss = run.held_out_loss
    if not math.isfinite(loss) or loss >= corpus.byte_frequency_loss:
        return Outcome.FAILED
    if loss >= corpus.byte_pair_loss or run.ending == "stopped":
        return Outcome.NEITHER
    return Outcome.TRAINED


def claims(runs: Sequence[DemoRun], scenario: Scenario) -> list[DemoClaim]:
    """Checks every claim about finished runs; there is none about runs with a fixed clip."""
    found, corpus = [], scenario.corpus
    frequencies, pairs = f"{corpus.byte_frequency_loss:.2f}", f"{corpus.byte_pair_loss:.2f}"
    unprotected = {(run.framework, run.seed): run for run in runs if run.arm == "unprotected"}
    for run in runs:
        loss = number(run.held_out_loss)
        if run.arm == "unprotected":
            text = f"{run}: fails, no better than byte frequencies ({frequencies})"
            failed = outcome(run, corpus) is Outcome.FAILED
            found.append(DemoClaim(f"{text} on unseen text: {loss}", failed))
        elif run.arm == "healed":
            text = f"{run}: trains, better than byte pairs ({pairs})"
            trained = run.held_out_loss < corpus.byte_pair_loss
            found.append(DemoClaim(f"{text} on unseen text: {loss}", trained))
            completed = run.ending == "completed"
            found.append(
                DemoClaim(f"{run}: runs to its end: {run.ending or 'not known'}", completed)
            )
            if plain := unprotected.get((run.framework, run.seed)):
                found += _rollback_claims(plain, run, scenario)
    return found


def _rollback_claims(plain: DemoRun, healed: DemoRun, scenario: Scenario) -> Iterator[DemoClaim]:
    """Claims that the unprotected run diverged, and that a rollback saved the healed one."""
    before, without = healed.mean_loss(scenario.empty), plain.mean_loss(scenario.empty)
    ruined = not without < scenario.corpus.byte_frequency_loss
    yield DemoClaim(f"{plain}: is ruined before the empty batch already: {number(without)}", ruined)
    better = before < (math.inf if math.isnan(without) else without)
    text = f"{healed}: is better off before the empty batch: {number(before)}"
    yield DemoClaim(f"{text}, unprotected {number(without)}", better)
    backs = [back for back in healed.rollbacks if back["onset"] in scenario.mistaken]
    onsets = ", ".join(f"step {back['onset']}" for back in backs) or "never"
    text = f"{healed}: rolls back while the learning rate is wrong: {onsets}"
    yield DemoClaim(text, bool(backs))
    for back in backs:
        where = ", where it had started" if back["initial"] else ""
        text = f"{healed}: rolls back to a known-good checkpoint: step {back['checkpoint']}{where}"
        yield DemoClaim(text, not back["initial"])
        done = Rollback.of(EventRecord.model_validate(back))
        text = f"{healed}: lowers the rate: {done.lr_text or 'no'}"
        yield DemoClaim(text, done.lowers_lr)
