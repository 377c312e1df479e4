"""What a run did, step by step, read from the device one step late."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from healcore.core.verdict import Action, Cause, Decision

ARMS = ("unprotected", "fixed clip", "healed")
"""Nothing at all; the norm clipped to 1.0, which is what most people run; healcore."""
FIXED_CLIP = 1.0


class Step(NamedTuple):
    """One step, on the host."""

    step: int
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
    depth: int = 0
    """How far back, where the action is a rollback."""


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
    """Called once per step, in order, when it has been read."""
    on_rollback: Callable[[History, int, int], None] = lambda history, step, to: None
    """Called when the run goes back, with both steps."""
    steps: list[Step] = field(default_factory=list)
    rollbacks: list[tuple[int, int]] = field(default_factory=list)
    """(step at which the run went back, step that it went back to)."""
    held_out_loss: float = math.nan
    """Nats per byte on text it never saw, at the end."""
    stopped: bool = False
    """The policy's budget was spent, and it stopped the run."""
    _waiting: tuple[int, Any, Any, float, Decision | None] | None = None

    def record(
        self,
        step: int,
        *,
        loss: Any,
        grad_norm: Any,
        learning_rate: float,
        decision: Decision | None = None,
    ) -> Step | None:
        """Takes a step's numbers, on whatever device, and returns the step before, read.

        Args:
            step: index of the step.
            loss: 0-d array or tensor.
            grad_norm: 0-d array or tensor.
            learning_rate: the schedule's.
            decision: of the healed runs, 0-d arrays or tensors.
        """
        before = self._read()
        self._waiting = (step, loss, grad_norm, learning_rate, decision)
        return before

    def went_back(self, step: int, to: int) -> None:
        """Says that after `step` the run goes on from what it was before step `to`."""
        self.rollbacks.append((step, to))
        self.on_rollback(self, step, to)

    def finish(self, held_out_loss: Any) -> None:
        """Reads what is left."""
        self._read()
        self.held_out_loss = float(held_out_loss)

    def _read(self) -> Step | None:
        if self._waiting is None:
            return None
        index, loss, norm, rate, decision = self._waiting
        self._waiting = None
        step = Step(index, float(loss), float(norm), rate)
        if decision is not None:
            step = step._replace(
                grad_scale=float(decision.grad_scale),
                skip=bool(decision.skip),
                lr_scale=float(decision.lr_scale),
                cause=Cause(int(decision.cause)),
                action=Action(int(decision.action)),
                depth=int(decision.rollback_depth),
            )
        elif self.arm == "fixed clip" and step.grad_norm > FIXED_CLIP:
            step = step._replace(grad_scale=FIXED_CLIP / step.grad_norm)
        self.steps.append(step)
        self.on_step(self, step)
        return step

    # -- what tables and pictures ask -----------------------------------------------------------

    def column(self, name: str) -> np.ndarray:
        """One field of all steps, (steps,)."""
        return np.asarray([getattr(step, name) for step in self.steps])

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

    def mean_loss(self, until: int | None = None, over: int = 20) -> float:
        """Mean training loss of the `over` steps before `until` (the end, if None)."""
        part = [step.loss for step in self.steps if until is None or step.step < until]
        return float(np.mean(part[-over:])) if part else math.nan
