"""Batches whose labels are each moved on by one class, as after a wrong map of the classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.healbench.problem import Problem, task
from benchmarks.healbench.tasks.short_runs import (
    CLASSES,
    METRICS,
    PLACES,
    adamw_mlp,
    momentum_mlp,
)
from benchmarks.healbench.tasks.sick_data import with_bad_batches

FAMILY = "shifted labels"
BATCHES = 30


def _shifted(batch: tuple[Tensor, Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Labels of one class more."""
    return batch[0], (batch[1] + 1) % CLASSES


def _some_shifted(seed: int, build: Callable[[int], Problem], first: int) -> Problem:
    bad = range(first, first + BATCHES)
    return with_bad_batches(build(seed), seed, bad, _shifted)


for _place, _build in (("early", momentum_mlp), ("middle", adamw_mlp), ("late", momentum_mlp)):
    task(
        FAMILY,
        METRICS[_build.__name__],
        name=f"shifted_labels_{_place}",
        about=f"`{_build.__name__}`; the labels of {BATCHES} batches from step {PLACES[_place]} "
        "on are one class too high.",
        reference=_build.__name__,
    )(partial(_some_shifted, build=_build, first=PLACES[_place]))
