"""A byte-level language model without normalisation: wrong learning rates, and damage.

Nothing in this model bounds the scale of its activations, so a rate some times too high makes
the loss jump to 1e7 and more. AdamW's steps have the size of the rate whatever the gradient's, so
clipping does not help.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.healbench.problem import MAIN, Problem, task
from benchmarks.healbench.tasks.loops import damaged_once
from benchmarks.healbench.tasks.models import (
    ByteModel,
    byte_corpus,
    held_out_windows,
    plain_loop,
    text_windows,
    warmup_cosine,
)

LM_STEPS = 600
BEST_RATE = 0.02
"""Of 0.010, 0.014, 0.020, 0.028 and 0.040 under clipping to 1.0: the lowest held-out loss."""
_ROWS = 16
_LENGTH = 24  # bytes of a row
_WARMUP = 60

LM_METRIC = "held-out loss"
"""Nats per byte on 24,576 bytes of files that no batch comes from."""


@task("stationary", LM_METRIC)
def norm_free_lm(
    seed: int, rate: float = 1.0, extra: Callable[[int], float] | None = None
) -> Problem:
    """Byte-level transformer without LayerNorm on Python sources, AdamW at its best rate."""
    # `rate` and `extra` are factors of the learning rate, `extra` by step. Batches are windows,
    # int64 (16, 25).
    torch.manual_seed(seed)
    model = ByteModel(context=_LENGTH, norm=False)
    generator = torch.Generator().manual_seed(seed)
    windows = text_windows(byte_corpus()[0], LM_STEPS * _ROWS, _LENGTH, generator)
    optimizer = AdamW(model.parameters(), lr=rate * BEST_RATE)
    scheduler = warmup_cosine(optimizer, LM_STEPS, _WARMUP)
    if extra is not None:
        cosine = scheduler.lr_lambdas[0]
        scheduler = LambdaLR(optimizer, lambda step: cosine(step) * extra(step))

    return plain_loop(
        model,
        model.loss,
        list(windows.view(LM_STEPS, _ROWS, _LENGTH + 1)),
        optimizer,
        lambda: float(model.loss(held_out_windows(1024, _LENGTH))),
        scheduler,
    )


def _window(step: int) -> float:
    return 16.0 if 270 <= step < 315 else 1.0


def _creep(step: int) -> float:
    """1 until step 120, then 1 % more with every step, up to 16."""
    return min(16.0, 1.01 ** max(0, step - 120))


_sick = partial(task, "learning rate", LM_METRIC, reference="norm_free_lm")
for _times in (3, 6.7, 10, 30):
    _sick(
        name=f"lr_{_times:g}x",
        about=f"The byte model without LayerNorm at {_times:g} times its best learning rate.",
        quick=_times in (6.7, 10),
    )(partial(norm_free_lm, rate=_times))
_sick(
    name="lr_window",
    about="The same at its best rate, but 16 times that for steps 270 to 314.",
)(partial(norm_free_lm, extra=_window))
_sick(
    name="slow_divergence",
    about="The same, but from step 120 the rate grows by 1 % per step, up to 16 times.",
)(partial(norm_free_lm, extra=_creep))


# -- damage: a rollback to an earlier checkpoint does not meet it again ---------------------------

_TOP_EXPONENT_BIT = 2.0**16
"""By how much a float16 below 2 grows when the top bit of its exponent flips."""


def _weight(problem: Problem, name: str) -> nn.Parameter:
    return problem.modules["model"].get_parameter(name)


def _moments(optimizer: Optimizer, name: str) -> list[Tensor]:
    return [state[name] for state in optimizer.state.values() if name in state]


@torch.no_grad()
def _flip_weight(problem: Problem) -> None:
    flat = _weight(problem, "blocks.0.mlp.2.weight").view(-1)
    flat[flat.abs().argmax()] *= _TOP_EXPONENT_BIT


def _flip_moment(problem: Problem) -> None:
    weight = _weight(problem, "blocks.1.mlp.0.weight")
    problem.optimizers[MAIN].state[weight]["exp_avg_sq"].zero_()


def _forget_second_moments(problem: Problem) -> None:
    for second in _moments(problem.optimizers[MAIN], "exp_avg_sq"):
        second.mul_(1e-12)


@task("damage", LM_METRIC, reference="norm_free_lm")
def bit_flip_weight(seed: int) -> Problem:
    """The norm-free byte model; after 400 steps one weight becomes 65,536 times as large."""
    return damaged_once(norm_free_lm(seed), 400, _flip_weight)


@task("damage", LM_METRIC, reference="norm_free_lm")
def bit_flip_moment(seed: int) -> Problem:
    """The same; after 400 steps the second moments of one weight matrix read as zero."""
    return damaged_once(norm_free_lm(seed), 400, _flip_moment)


@task("damage", LM_METRIC, reference="norm_free_lm", quick=True)
def poisoned_resume(seed: int) -> Problem:
    """The same; after 300 steps all second moments are lost, and the first ones are not."""
    return damaged_once(norm_free_lm(seed), 300, _forget_second_moments)
