"""A byte-level language model without normalisation at wrong learning rates, and at the right one.

Nothing in this model bounds the scale of its activations, so a rate some times too high makes
the loss jump to 1e7 and more. AdamW's steps have the size of the rate whatever the gradient's, so
clipping does not help.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.healbench.problem import MAIN, Problem, Task, Update
from benchmarks.healbench.tasks.models import (
    ByteModel,
    byte_corpus,
    held_out_windows,
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


def norm_free_lm(
    seed: int, rate: float = 1.0, extra: Callable[[int], float] | None = None
) -> Problem:
    """A two-layer transformer without LayerNorm on the standard library's sources.

    Args:
        seed: of the weights and of the batches.
        rate: learning rate in units of `BEST_RATE`.
        extra: further factor of the learning rate by step, part of the user's schedule.

    Returns:
        A problem whose batches are windows, int64 (16, 25).
    """
    torch.manual_seed(seed)
    model = ByteModel(context=_LENGTH, norm=False)
    generator = torch.Generator().manual_seed(seed)
    windows = text_windows(byte_corpus()[0], LM_STEPS * _ROWS, _LENGTH, generator)
    optimizer = AdamW(model.parameters(), lr=rate * BEST_RATE)
    scheduler = warmup_cosine(optimizer, LM_STEPS, _WARMUP)
    if extra is not None:
        cosine = scheduler.lr_lambdas[0]
        scheduler = LambdaLR(optimizer, lambda step: cosine(step) * extra(step))

    def step(batch: Tensor, update: Update) -> None:
        update(model.loss(batch))

    def evaluate() -> float:
        with torch.no_grad():
            return float(model.loss(held_out_windows(1024, _LENGTH)))

    return Problem(
        modules={"model": model},
        optimizers={MAIN: optimizer},
        batches=list(windows.view(LM_STEPS, _ROWS, _LENGTH + 1)),
        step=step,
        evaluate=evaluate,
        schedulers={MAIN: scheduler},
        loss_fn=model.loss,
    )


def _window(step: int) -> float:
    return 16.0 if 270 <= step < 315 else 1.0


def _creep(step: int) -> float:
    """1 until step 120, then 1 % more with every step, up to 16."""
    return min(16.0, 1.01 ** max(0, step - 120))


def _wrong_rate(times: float, quick: bool = False) -> Task:
    return Task(
        name=f"lr_{times:g}x",
        kind="sick",
        metric=LM_METRIC,
        build=partial(norm_free_lm, rate=times),
        about=f"The byte model without LayerNorm at {times:g} times its best learning rate.",
        reference="norm_free_lm",
        quick=quick,
    )


TASKS: tuple[Task, ...] = (
    Task(
        name="norm_free_lm",
        kind="healthy",
        metric=LM_METRIC,
        build=norm_free_lm,
        about="Byte-level transformer without LayerNorm on Python sources, AdamW at its best rate.",
        family="stationary",
    ),
    _wrong_rate(3),
    _wrong_rate(6.7, quick=True),
    _wrong_rate(10, quick=True),
    _wrong_rate(30),
    Task(
        name="lr_window",
        kind="sick",
        metric=LM_METRIC,
        build=partial(norm_free_lm, extra=_window),
        about="The same at its best rate, but 16 times that for steps 270 to 314.",
        reference="norm_free_lm",
    ),
    Task(
        name="slow_divergence",
        kind="sick",
        metric=LM_METRIC,
        build=partial(norm_free_lm, extra=_creep),
        about="The same, but from step 120 the rate grows by 1 % per step, up to 16 times.",
        reference="norm_free_lm",
    ),
)
