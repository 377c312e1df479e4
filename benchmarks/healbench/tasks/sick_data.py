"""Training that is fine except for some batches: garbage, shuffled targets.

A bad batch is bad by its index, so a run that leaves those batches out is cured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW

from benchmarks.healbench.problem import Problem, task
from benchmarks.healbench.tasks.learning_rates import LM_METRIC, LM_STEPS, norm_free_lm
from benchmarks.healbench.tasks.models import mlp, plain_loop, warmup_cosine

MLP_STEPS = 1500
MLP_RATE = 0.01  # under clipping to 1.0: 0.003 is 10 % worse, 0.02 the same to 2 %
_ROWS = 64
_FEATURES = 8
_CLASSES = 6
_CLUSTERS = 4  # per class
_HELD_OUT = 16384

MLP_METRIC = "held-out loss"
"""Cross entropy in nats on 16,384 fresh rows; nobody gets below 0.097, the true posterior's."""

_T = TypeVar("_T")


class Rows(NamedTuple):
    """One batch of `sick_base_mlp`."""

    x: Tensor
    """float32 (64, 8)."""
    y: Tensor
    """int64 (64,)."""
    weight: Tensor
    """float32 (64,): of each row in the loss; 1 in every healthy batch."""


class Replaced(Sequence[_T]):
    """A sequence with some of its elements replaced, each when it is asked for.

    Args:
        healthy: all other elements.
        bad: element by index, made from the healthy one.
    """

    def __init__(self, healthy: Sequence[_T], bad: Mapping[int, Callable[[_T], _T]]) -> None:
        self.healthy = healthy
        self.bad = bad

    def __len__(self) -> int:
        return len(self.healthy)

    @overload
    def __getitem__(self, i: int) -> _T: ...

    @overload
    def __getitem__(self, i: slice) -> Sequence[_T]: ...

    def __getitem__(self, i: int | slice) -> _T | Sequence[_T]:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        i = range(len(self))[i]
        return self.bad[i](self.healthy[i]) if i in self.bad else self.healthy[i]


# -- the healthy run ------------------------------------------------------------------------------


def clusters(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points around 24 centres, the same ones for every seed; four centres make a class.

    Returns:
        float32 (rows, 8) and int64 (rows,).
    """
    centres = 2.2 * torch.randn(
        _CLASSES * _CLUSTERS, _FEATURES, generator=torch.Generator().manual_seed(0)
    )
    chosen = torch.randint(len(centres), (rows,), generator=generator)
    noise = torch.randn(rows, _FEATURES, generator=generator)
    return centres[chosen] + noise, chosen // _CLUSTERS


@task("stationary", MLP_METRIC)
def sick_base_mlp(seed: int) -> Problem:
    """Small ReLU network on 24 Gaussian clusters in 6 classes, AdamW, cosine decay."""
    # Three linear layers that learn the classes of `clusters`, every row seen once.
    torch.manual_seed(seed)
    model = mlp(_FEATURES, 48, 48, _CLASSES)
    generator = torch.Generator().manual_seed(seed)
    x, y = clusters(MLP_STEPS * _ROWS, generator)
    ones = torch.ones(_ROWS)
    batches = [
        Rows(*pair, ones)
        for pair in zip(x.view(MLP_STEPS, _ROWS, _FEATURES), y.view(MLP_STEPS, _ROWS), strict=True)
    ]
    optimizer = AdamW(model.parameters(), lr=MLP_RATE)

    def loss_fn(batch: Rows) -> Tensor:
        each = F.cross_entropy(model(batch.x), batch.y, reduction="none")
        return (batch.weight * each).mean()

    def evaluate() -> float:
        held_out_x, held_out_y = clusters(_HELD_OUT, torch.Generator().manual_seed(1 << 20))
        return float(F.cross_entropy(model(held_out_x), held_out_y))

    scheduler = warmup_cosine(optimizer, MLP_STEPS)
    return plain_loop(model, loss_fn, batches, optimizer, evaluate, scheduler)


mlp_task = partial(task, metric=MLP_METRIC, reference="sick_base_mlp")
"""A fault in the run of `sick_base_mlp`."""

# -- the faults -----------------------------------------------------------------------------------


def fault_generator(seed: int, index: int = 0) -> torch.Generator:
    """For a fault's own draws, so that the other batches stay those of the healthy run."""
    return torch.Generator().manual_seed((seed << 20) + index + 1)


def spread(steps: int, share: float, seed: int) -> list[int]:
    """Which steps are bad: that share of all of them, at random; none of the first twentieth."""
    first = steps // 20
    order = torch.randperm(steps - first, generator=fault_generator(seed)) + first
    return sorted(order[: math.ceil(share * steps)].tolist())


def with_bad_batches(
    problem: Problem, seed: int, indices: Sequence[int], damage: Callable[..., Any]
) -> Problem:
    """The same problem, with `damage(batch, generator)` in place of the batches at `indices`."""
    bad = {i: lambda batch, i=i: damage(batch, generator=fault_generator(seed, i)) for i in indices}
    problem.batches = Replaced(problem.batches, bad)
    return problem


def _garbage(batch: Rows, generator: torch.Generator) -> Rows:
    """Numbers that were never standardised: the wrong columns, thirty times as large."""
    x = 30.0 * torch.randn(batch.x.shape, generator=generator)
    y = torch.randint(_CLASSES, batch.y.shape, generator=generator)
    return Rows(x, y, batch.weight)


def _random_bytes(windows: Tensor, generator: torch.Generator) -> Tensor:
    """Random bytes, as a decompressor gives at the wrong offset."""
    return torch.randint(256, windows.shape, generator=generator)


def _shuffled(batch: Rows, generator: torch.Generator) -> Rows:
    order = torch.randperm(len(batch.y), generator=generator)
    return Rows(batch.x, batch.y[order], batch.weight)


def _corrupt(seed: int, share: float) -> Problem:
    indices = spread(MLP_STEPS, share, seed)
    return with_bad_batches(sick_base_mlp(seed), seed, indices, _garbage)


@task("poisoned data", LM_METRIC, reference="norm_free_lm", quick=True)
def corrupt_40_in_a_row(seed: int) -> Problem:
    """The norm-free byte model; 40 batches in the middle are random bytes."""
    first = LM_STEPS // 2
    return with_bad_batches(norm_free_lm(seed), seed, range(first, first + 40), _random_bytes)


def _bad_shard(seed: int, batches: int) -> Problem:
    first = MLP_STEPS * 6 // 10
    return with_bad_batches(sick_base_mlp(seed), seed, range(first, first + batches), _shuffled)


for _percent in (0.1, 1, 5):
    mlp_task(
        "poisoned data",
        name=f"corrupt_{_percent}pct",
        about=f"The classifier; {_percent} % of the batches are garbage with large inputs.",
    )(partial(_corrupt, share=_percent / 100))
for _name, _count in (("permuted_labels", 4), ("bad_shard_15", 15), ("bad_shard_60", 60)):
    mlp_task(
        "poisoned data",
        name=_name,
        about=f"The classifier; the targets of {_count} batches in a row are shuffled.",
        quick=_count == 15,
    )(partial(_bad_shard, batches=_count))
