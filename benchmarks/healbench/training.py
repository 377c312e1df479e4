"""The loop around a problem, and the points where an arm can act. The base class does nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.healbench.problem import MAIN, Problem


@dataclass
class Counts:
    """Counts of an arm's interventions in a run."""

    clips: int = 0
    finite_skips: int = 0
    nonfinite_skips: int = 0
    lr_cuts: int = 0
    rollbacks: int = 0
    lr_scale: float = 1.0
    """Smallest LR multiplier at the end of the run; 1 for an arm without a multiplier."""
    stopped: str = ""
    """Why the arm ended the run before its data was used up; empty: it did not."""
    evidence: dict[str, float] = field(default_factory=dict)
    """Forward passes and the first rollback of a Healer, see `arms/healing.py:Healed`."""


class Stopped(Exception):
    """Raised by an arm to end the run."""


class Run:
    """One run of a problem under one arm: `with Arm(problem) as run: run.train()`.

    Args:
        problem: the program before its first step, of either framework.
    """

    def __init__(self, problem: Any) -> None:
        self.problem = problem
        self.counts = Counts()
        self.steps = 0
        """Iterations of the loop, those that were undone included."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        return None


class Training(Run):
    """A run in torch.

    The base class is the arm `nothing`. Others override `batches`, `before_backward` or `admit`.
    """

    problem: Problem

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._accumulating: set[str] = set()
        """Optimizers with gradients of micro-batches whose step has not been taken."""

    def weights(self) -> Iterator[bytes]:
        """The present parameters and buffers of all modules."""
        for _, module in sorted(self.problem.modules.items()):
            for tensor in module.state_dict().values():
                yield tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()

    def train(self) -> None:
        """The loop, to the end of the data or until the arm stops it."""
        try:
            for batch in self.batches():
                self.problem.step(batch, self.update)
                self.steps += 1
        except Stopped as why:
            self.counts.stopped = str(why)

    def update(
        self, loss: Tensor, optimizer: str = MAIN, *, step: bool = True, share: float = 1.0
    ) -> None:
        """Backward and step; see `Update`."""
        problem, scaler = self.problem, self.problem.scaler
        inner = problem.optimizers[optimizer]
        if optimizer not in self._accumulating:
            inner.zero_grad()
        self.before_backward(loss, optimizer)
        part = share * loss
        (part if scaler is None else scaler.scale(part)).backward()
        if not step:
            self._accumulating.add(optimizer)
            return
        self._accumulating.discard(optimizer)
        if scaler is not None:
            scaler.unscale_(inner)
        if problem.after_backward is not None:
            problem.after_backward()
        if self.admit(inner, loss):
            inner.step() if scaler is None else scaler.step(inner)
        if scaler is not None:
            scaler.update()
        if optimizer in problem.schedulers:
            problem.schedulers[optimizer].step()

    # -- what arms override ---------------------------------------------------------------------

    def batches(self) -> Iterable[Any]:
        """The data, in order."""
        return iter(self.problem.batches)

    def before_backward(self, loss: Tensor, optimizer: str) -> None:
        """Sees the loss before its backward pass."""

    def admit(self, optimizer: Optimizer, loss: Tensor) -> bool:
        """Sees (and may clip) the unscaled gradients; False skips the step."""
        return True
