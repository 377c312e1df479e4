"""A small transformer with LayerNorm and AdamW, and faults that begin in the middle of the run.

The task is a random table of the symbol after each pair of symbols, with 1 % of noise: the loss
falls to a small value, so that lost progress shows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.healbench.problem import MAIN, Problem, task
from benchmarks.healbench.tasks.loops import damaged_once
from benchmarks.healbench.tasks.models import ByteModel, plain_loop, seeded, warmup_cosine
from benchmarks.healbench.tasks.sick_data import with_bad_batches

STEPS = 500
_MIDDLE = STEPS // 2
_RATE = 1.5e-2  # of 5e-3 to 2.5e-2 the one with the lowest held-out loss
_SYMBOLS = 8
_ROWS, _LENGTH = 16, 12
_METRIC = "held-out loss, nats per symbol"


def _sequences(rows: int, table: Tensor, generator: torch.Generator) -> Tensor:
    """Each symbol is the table's entry for the two before it; 1 % are drawn at random."""
    symbols = torch.randint(_SYMBOLS, (rows, _LENGTH + 1), generator=generator)
    noise = torch.rand(rows, _LENGTH + 1, generator=generator) < 0.01
    for k in range(2, _LENGTH + 1):
        follows = table[symbols[:, k - 2], symbols[:, k - 1]]
        symbols[:, k] = torch.where(noise[:, k], symbols[:, k], follows)
    return symbols


@task("stationary", _METRIC)
def small_transformer(
    seed: int, rate: float = 1.0, extra: Callable[[int], float] | None = None
) -> Problem:
    """A one-block transformer on sequences: each pair of symbols has a successor. AdamW."""
    # `rate` and `extra` are factors of the learning rate, `extra` by step.
    generator = seeded(seed)
    table = torch.randint(_SYMBOLS, (_SYMBOLS, _SYMBOLS), generator=generator)
    model = ByteModel(width=32, layers=1, context=_LENGTH)
    model.embedding, model.head = nn.Embedding(_SYMBOLS, 32), nn.Linear(32, _SYMBOLS)
    sequences = _sequences(STEPS * _ROWS, table, generator)
    held_out = _sequences(2048, table, generator)
    optimizer = AdamW(model.parameters(), lr=rate * _RATE)
    usual = warmup_cosine(optimizer, STEPS, warmup=30, floor=0.1).lr_lambdas[0]
    scheduler = LambdaLR(optimizer, lambda step: usual(step) * (extra(step) if extra else 1.0))

    def loss_fn(batch: Tensor) -> Tensor:
        """The first symbol of a row has no pair before it."""
        scores = model(batch[:, :-1])[:, 1:]
        return F.cross_entropy(scores.flatten(0, 1), batch[:, 2:].flatten())

    return plain_loop(
        model,
        loss_fn,
        list(sequences.view(STEPS, _ROWS, -1)),
        optimizer,
        lambda: float(loss_fn(held_out)),
        scheduler,
    )


# -- learning rates -------------------------------------------------------------------------------


def _jump(seed: int, times: float, steps: int) -> Problem:
    """The rate is `times` as high for that many steps from the middle on."""

    def extra(step: int) -> float:
        return times if _MIDDLE <= step < _MIDDLE + steps else 1.0

    return small_transformer(seed, extra=extra)


# -- damage ---------------------------------------------------------------------------------------

Damage = Callable[[nn.Module, AdamW], None]


def _damaged(seed: int, damage: Damage, steps: int = 1) -> Problem:
    """`damage` is done between iterations, from the middle on, as often as `steps`."""

    @torch.no_grad()
    def change(problem: Problem) -> None:
        optimizer = problem.optimizers[MAIN]
        assert isinstance(optimizer, AdamW)
        damage(problem.modules["model"], optimizer)

    return damaged_once(small_transformer(seed), _MIDDLE, change, steps)


def _weight(model: nn.Module) -> nn.Parameter:
    return model.get_parameter("blocks.0.qkv.weight")


def _layer(model: nn.Module, _: AdamW) -> None:
    _weight(model).mul_(50.0)


def _slow(model: nn.Module, _: AdamW) -> None:
    _weight(model)[:, :8].mul_(1.05)


def _flipped_weight(model: nn.Module, _: AdamW) -> None:
    flat = _weight(model).view(-1)
    flat[flat.abs().argmax()] *= 2.0**16


def _flipped_moment(model: nn.Module, optimizer: AdamW) -> None:
    moments = optimizer.state[_weight(model)]
    moments["exp_avg"].view(-1)[moments["exp_avg"].abs().argmax()] *= 2.0**16


# -- data -----------------------------------------------------------------------------------------


def _random_symbols(batch: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(_SYMBOLS, batch.shape, generator=generator)


def _shard(seed: int, batches: int) -> Problem:
    bad = range(_MIDDLE, _MIDDLE + batches)
    return with_bad_batches(small_transformer(seed), seed, bad, _random_symbols)


def _sick(name: str, family: str, about: str, build: Callable[..., Any], **options: Any) -> None:
    register = task(family, _METRIC, name=name, about=about, reference="small_transformer")
    register(partial(build, **options))


for _times in (10, 30, 100):
    _sick(
        f"start_{_times}x",
        "learning rate",
        f"The small transformer at {_times} times its learning rate from the first step on.",
        small_transformer,
        rate=float(_times),
    )
    _sick(
        f"jump_{_times}x",
        "learning rate",
        f"The same; the rate jumps to {_times} times in the middle and stays there.",
        _jump,
        times=float(_times),
        steps=STEPS,
    )
for _steps in (20, 45):
    for _times in (30, 100, 300):
        _sick(
            f"window_{_steps}_{_times}x",
            "learning rate",
            f"The same; the rate is {_times} times as high for {_steps} steps in the middle.",
            _jump,
            times=float(_times),
            steps=_steps,
        )
for _name, _damage, _steps, _about in (
    ("layer_50x", _layer, 1, "in the middle the weights of one layer become 50 times as large"),
    ("slow_damage", _slow, 100, "256 weights of one layer grow by 5 % per step, 100 times"),
    ("flipped_weight", _flipped_weight, 1, "in the middle a weight becomes 65,536 times as large"),
    ("flipped_moment", _flipped_moment, 1, "in the middle a first moment grows 65,536 times"),
):
    _sick(_name, "damage", f"The same; {_about}.", _damaged, damage=_damage, steps=_steps)
for _batches in (10, 40, 100):
    _sick(
        f"shard_{_batches}",
        "poisoned data",
        f"The same; {_batches} batches in a row in the middle are random symbols.",
        _shard,
        batches=_batches,
    )
