"""The runs that the demo compares: how each is protected, and what is recorded of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from healcore.policy import Policy

ARMS = ("unprotected", "fixed clip", "healed")
"""Nothing at all; the norm clipped to 1.0, which is what most people run; healcore's `Healer`."""
FIXED_CLIP = 1.0
PROBATION = 20
"""Healthy steps after which a checkpoint is known-good; the presets take 100, a third of a run."""
SAVE_EVERY = 10
"""Steps between two checkpoints."""


def shortened(policy: Policy) -> Policy:
    """The policy with a probation that fits in a short run. Nothing else of it is changed."""
    rollback = policy.rollback
    probation = min(rollback.probation, PROBATION)
    return policy.model_copy(
        update={"rollback": rollback.model_copy(update={"probation": probation})}
    )


class Step(NamedTuple):
    """One step."""

    step: int
    batch: int
    """Index of its batch: the step's own, until batches are left out."""
    loss: Any
    """Training loss before the update: a 0-d array or tensor, a float once the run has ended."""
    grad_norm: Any
    """Global L2 norm before any clipping, likewise."""


@dataclass
class DemoRun:
    """One run: which framework, protected how, from which seed, and what became of it."""

    framework: str
    arm: str
    seed: int = 0
    folder: Path = Path()
    """Of a healed run's checkpoints, events, metrics, postmortem and report."""
    steps: list[Step] = field(default_factory=list)
    """As they were taken, those that a rollback has undone too."""
    held_out_loss: float = math.nan
    """Nats per byte on text it never saw, at the end."""
    events: Sequence[Mapping[str, Any]] = ()
    """Of a healed run."""

    def __str__(self) -> str:
        seed = f", seed {self.seed}" if self.seed else ""
        return f"{self.framework} {self.arm}{seed}"

    def finish(self, held_out_loss: Any) -> None:
        """Brings all numbers to the host."""
        self.held_out_loss = float(held_out_loss)
        self.steps = [
            one._replace(loss=float(one.loss), grad_norm=float(one.grad_norm)) for one in self.steps
        ]

    def column(self, name: str) -> np.ndarray:
        """One field of all steps, (steps,)."""
        return np.asarray([getattr(step, name) for step in self.steps])

    def mean_loss(self, until: int, over: int = 20) -> float:
        """Mean training loss of the `over` steps before batch `until`, without undone ones."""
        kept: list[Step] = []
        for one in self.steps:
            while kept and kept[-1].step >= one.step:
                kept.pop()
            kept.append(one)
        part = [one.loss for one in kept if one.batch < until]
        return float(np.mean(part[-over:])) if part else math.nan

    @property
    def rollbacks(self) -> list[Mapping[str, Any]]:
        """Its events of that kind."""
        return [event for event in self.events if event["kind"] == "rollback"]

    @property
    def ending(self) -> str | None:
        """`completed`, `stopped`, ...; None: the events do not say."""
        return next((event["ending"] for event in self.events if event["kind"] == "end"), None)


def number(loss: float) -> str:
    """A loss between 2 and 1e13 in a few characters."""
    if not math.isfinite(loss):
        return "NaN" if math.isnan(loss) else "inf"
    return f"{loss:.2f}" if abs(loss) < 1000 else f"{loss:.0e}"
