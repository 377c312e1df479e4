"""What a run did, step by step, read from the device one step late."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from healcore.core.verdict import Action, Cause, Decision
from healcore.demo.rollbacks import Rollback

ARMS = ("unprotected", "fixed clip", "healed")
"""Nothing at all; the norm clipped to 1.0, which is what most people run; healcore's `Healer`."""
FIXED_CLIP = 1.0


class Step(NamedTuple):
    """One step, on the host."""

    step: int
    batch: int
    """Index of its batch: the step's own, until batches are left out."""
    loss: float
    """Training loss before the update; NaN and Inf as they were."""
    grad_norm: float
    """Global L2 norm before any clipping."""
    learning_rate: float
    """The schedule's, with its mistake."""
    grad_scale: float = 1.0
    skip: bool = False
    lr_scale: float = 1.0
    cause: Cause = Cause(0)
    action: Action = Action(0)


@dataclass
class History:
    """The record of one run: which framework, protected how, from which seed.

    `record` keeps a step's numbers where they are and reads those of the step before, which have
    arrived by then: the loop never waits for the step that it has just sent off.
    """

    framework: str
    arm: str
    seed: int = 0
    on_step: Callable[[History, Step], None] = lambda history, step: None
    """Called once per step, in the order of taking them, when it has been read."""
    steps: list[Step] = field(default_factory=list)
    """As they were taken, those of branches that were given up too."""
    held_out_loss: float = math.nan
    """Nats per byte on text it never saw, at the end."""
    rollbacks: tuple[Rollback, ...] = ()
    """Of a healed run, from its events."""
    ending: str | None = None
    """Of a healed run, from its events: `completed`, `stopped`, ..."""
    _waiting: tuple[int, int, Any, Any, float, Decision | None] | None = None

    def record(
        self,
        step: int,
        *,
        batch: int,
        loss: Any,
        grad_norm: Any,
        learning_rate: float,
        decision: Decision | None = None,
    ) -> None:
        """Takes a step's numbers, on whatever device, and reads those of the step before.

        Args:
            step: index of the step.
            batch: index of its batch.
            loss: 0-d array or tensor.
            grad_norm: 0-d array or tensor.
            learning_rate: the schedule's.
            decision: of the healed runs, 0-d arrays or tensors.
        """
        self._read()
        self._waiting = (step, batch, loss, grad_norm, learning_rate, decision)

    def finish(self, held_out_loss: Any) -> None:
        """Reads what is left."""
        self._read()
        self.held_out_loss = float(held_out_loss)

    def _read(self) -> None:
        if self._waiting is None:
            return
        index, batch, loss, norm, rate, decision = self._waiting
        self._waiting = None
        step = Step(index, batch, float(loss), float(norm), rate)
        if decision is not None:
            step = step._replace(
                grad_scale=float(decision.grad_scale),
                skip=bool(decision.skip),
                lr_scale=float(decision.lr_scale),
                cause=Cause(int(decision.cause)),
                action=Action(int(decision.action)),
            )
        elif self.arm == "fixed clip" and step.grad_norm > FIXED_CLIP:
            step = step._replace(grad_scale=FIXED_CLIP / step.grad_norm)
        self.steps.append(step)
        self.on_step(self, step)

    # -- what tables and pictures ask -----------------------------------------------------------

    def column(self, name: str) -> np.ndarray:
        """One field of all steps, (steps,)."""
        return column(self.steps, name)

    @property
    def stopped(self) -> bool:
        """The policy has ended the run."""
        return self.ending == "stopped"

    @property
    def branches(self) -> list[list[Step]]:
        """The steps, parted where the run went back; the last branch begins where it went to."""
        parts: list[list[Step]] = []
        for step in self.steps:
            if not parts or step.step <= parts[-1][-1].step:
                parts.append([])
            parts[-1].append(step)
        return parts

    @property
    def kept(self) -> list[Step]:
        """The steps that have led to the result: without what a rollback has undone."""
        steps: list[Step] = []
        for branch in self.branches:
            steps = [one for one in steps if one.step < branch[0].step] + branch
        return steps

    @property
    def given_up(self) -> list[list[Step]]:
        """For each time that the run went back, the steps that this has undone."""
        branches = self.branches
        return [
            [one for one in branch if one.step >= after[0].step]
            for branch, after in itertools.pairwise(branches)
        ]

    def count(self, flag: Action) -> int:
        """Steps whose decision carries a flag."""
        return sum(bool(step.action & flag) for step in self.steps)

    @property
    def clips(self) -> int:
        """Steps taken with smaller gradients than they had."""
        return sum(step.grad_scale < 1.0 and not step.skip for step in self.steps)

    @property
    def skips(self) -> int:
        """Steps not taken."""
        return sum(step.skip for step in self.steps)

    @property
    def spikes(self) -> int:
        """Steps whose loss stood a quarter above the median of the 25 before, or was not finite."""
        found, recent = 0, []
        for step in self.steps:
            if not math.isfinite(step.loss):
                found += 1
                continue
            if len(recent) >= 5 and step.loss > 1.25 * float(np.median(recent[-25:])):
                found += 1
            recent.append(step.loss)
        return found

    def mean_loss(self, until: int, over: int = 20) -> float:
        """Mean training loss of the `over` kept steps before that with batch `until`."""
        part = [step.loss for step in self.kept if step.batch < until]
        return float(np.mean(part[-over:])) if part else math.nan


def column(steps: Sequence[Step], name: str) -> np.ndarray:
    """One field of some steps, (steps,)."""
    return np.asarray([getattr(step, name) for step in steps])
