"""Training whose arithmetic fails: NaN in the data, an infinite or wrongly scaled loss, overflow.

Every task is the classifier of `sick_base_mlp`. A run that takes no step from a gradient that is
not finite is cured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from benchmarks.healbench.problem import Problem, Update
from benchmarks.healbench.tasks.sick_data import (
    MLP_STEPS,
    Rows,
    mlp_task,
    sick_base_mlp,
    spread,
    with_bad_batches,
)

_task = partial(mlp_task, "arithmetic")

# -- data -----------------------------------------------------------------------------------------


def _missing(batch: Rows, generator: torch.Generator) -> Rows:
    """A few missing values that a join has left as NaN."""
    x = batch.x.clone()
    rows = torch.randint(len(x), (3,), generator=generator)
    x[rows, 0] = torch.nan
    return Rows(x, batch.y, batch.weight)


def _divided_by_zero(batch: Rows, generator: torch.Generator) -> Rows:
    """An importance weight 1 / p whose p was 0."""
    weight = batch.weight.clone()
    weight[torch.randint(len(weight), (1,), generator=generator)] = torch.inf
    return Rows(batch.x, batch.y, weight)


def _loss_times_64(batch: Rows, generator: torch.Generator) -> Rows:
    """A sum where the mean of the rows was meant."""
    del generator
    return Rows(batch.x, batch.y, 64 * batch.weight)


def _scattered(seed: int, share: float, damage: Callable[..., Rows]) -> Problem:
    return with_bad_batches(sick_base_mlp(seed), seed, spread(MLP_STEPS, share, seed), damage)


@_task(quick=True)
def nan_burst(seed: int) -> Problem:
    """The classifier; 12 batches in a row have NaN in some of their rows."""
    first = MLP_STEPS // 2
    return with_bad_batches(sick_base_mlp(seed), seed, range(first, first + 12), _missing)


@_task()
def loss_times_64(seed: int) -> Problem:
    """The classifier; for 60 batches the loss is the sum and not the mean of its rows."""
    first = MLP_STEPS // 2
    return with_bad_batches(sick_base_mlp(seed), seed, range(first, first + 60), _loss_times_64)


# -- half precision -------------------------------------------------------------------------------


_FIRST_SCALE = 2.0**32  # the first 15 steps or so overflow


class StaticScale:
    """Loss scaling as people wrote it before `GradScaler`: one number, halved by hand.

    The backward pass runs on gradients times `scale`, and what arrives at each parameter is
    divided by it again. Nothing here keeps an overflowed gradient from the optimizer.
    """

    def __init__(self, modules: dict[str, torch.nn.Module], scale: float) -> None:
        self.scale = scale
        self.overflowed = False
        for module in modules.values():
            for parameter in module.parameters():
                parameter.register_hook(self._unscale)

    def _unscale(self, gradient: Tensor) -> Tensor:
        self.overflowed |= not bool(gradient.isfinite().all())
        return gradient / self.scale

    def scaled(self, loss: Tensor) -> Tensor:
        """The same value, whose gradient is `scale` times as large."""
        return loss.detach() + self.scale * (loss - loss.detach())

    def halve_after_overflow(self) -> None:
        """Called at the end of each iteration."""
        if self.overflowed:
            self.scale /= 2
        self.overflowed = False

    def state_dict(self) -> dict[str, float]:
        """For checkpoints."""
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Back to a checkpoint."""
        self.scale = state["scale"]


def _half(problem: Problem) -> Callable[[Rows], Tensor]:
    """The problem's loss with its matrix products in float16, forward and backward."""
    full = problem.loss_fn
    assert full is not None

    def loss_fn(batch: Rows) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return full(batch)

    return loss_fn


@_task(quick=True)
def fp16_overflow(seed: int) -> Problem:
    """The classifier in float16 under a GradScaler whose first steps all overflow."""
    problem = sick_base_mlp(seed)
    loss_fn = _half(problem)

    def step(batch: Rows, update: Update) -> None:
        update(loss_fn(batch))

    problem.step, problem.loss_fn = step, loss_fn
    problem.scaler = GradScaler("cpu", init_scale=_FIRST_SCALE)
    return problem


@_task()
def fp16_unscaled_overflow(seed: int) -> Problem:
    """The same with a scale of the user's own that keeps no overflowed gradient back."""
    problem = sick_base_mlp(seed)
    loss_fn = _half(problem)
    scale = StaticScale(problem.modules, _FIRST_SCALE)

    def step(batch: Rows, update: Update) -> None:
        update(scale.scaled(loss_fn(batch)))
        scale.halve_after_overflow()

    problem.step, problem.loss_fn = step, loss_fn
    problem.state["scale"] = scale
    return problem


_task(
    name="nan_batches",
    about="The classifier; 1 % of the batches have NaN in three of their 64 rows.",
)(partial(_scattered, share=0.01, damage=_missing))
_task(
    name="inf_loss",
    about="The classifier; in 0.5 % of the batches a row has an infinite importance weight.",
)(partial(_scattered, share=0.005, damage=_divided_by_zero))
