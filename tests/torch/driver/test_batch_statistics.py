"""A skipped step leaves no trace in batch statistics either."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from healcore.torch.driver import TorchDriver
from tests.torch.bit_comparison import bits
from tests.torch.driver.small_run import NAN, ROLLS_BACK, roll_back

FUSED = partial(AdamW, lr=0.01, fused=True)
PLAIN = partial(AdamW, lr=0.01, fused=False)
SPIKE = 1e4

every_way = pytest.mark.parametrize(
    ("where", "optimizer"),
    [("host", FUSED), ("host", PLAIN), ("device", FUSED), ("device", PLAIN)],
    ids=["host fused", "host", "device fused", "device"],
)


def network(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4, **options)
    return nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 1))


def statistics(model: nn.Module) -> Any:
    return bits(dict(model.named_buffers()))


class NormRun:
    """A healed model with statistics, on batches of small numbers or of given values."""

    def __init__(self, optimizer: Any, where: str = "host", **options: Any) -> None:
        self.model = network(**options)
        self.norm: Any = self.model[1]
        self.optimizer = optimizer(self.model.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.driver = TorchDriver(self.state, ROLLS_BACK, attach={"engine": where})

    @property
    def statistics(self) -> Any:
        return statistics(self.model)

    def backward(self, i: int, factor: float = 1.0) -> Tensor:
        random = torch.Generator().manual_seed(i)
        loss = self.model(torch.randn(8, 3, generator=random) * factor).square().mean()
        (loss * (factor if factor == factor else 1.0)).backward()
        return loss

    def step(self, i: int, factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        self.backward(i, factor)
        self.optimizer.step()


@every_way
@pytest.mark.parametrize("factor", [NAN, SPIKE])
@pytest.mark.parametrize("options", [{}, {"momentum": None}], ids=["ema", "cumulative"])
def test_a_skip_restores_them_to_the_bit(where: str, optimizer: Any, factor: float, options: Any):
    run, twin = NormRun(optimizer, where=where, **options), network(**options)
    for i in range(6):
        run.step(i)
    before, weights = run.statistics, bits(list(run.model.parameters()))
    twin.load_state_dict(run.model.state_dict())
    run.step(6, factor)
    assert bits(list(run.model.parameters())) == weights, "it was skipped"
    assert run.statistics == before
    run.step(7)
    twin(torch.randn(8, 3, generator=torch.Generator().manual_seed(7)))
    assert run.statistics == statistics(twin), "the next step is the model's own"


@every_way
def test_all_of_an_accumulated_step_is_restored(where: str, optimizer: Any):
    run = NormRun(optimizer, where=where)
    for bad in (None, 0, 1, 2):
        before = run.statistics
        for i in range(3):
            run.backward(i, NAN if i == bad else 1.0)
        run.optimizer.step()
        run.optimizer.zero_grad()
        assert (run.statistics == before) == (bad is not None)


@every_way
@pytest.mark.parametrize("skip", [False, True])
def test_two_optimizers_restore_their_own_layers(where: str, optimizer: Any, skip: bool):
    """The loop of every GAN: the generator's backward comes after the critic's step."""
    torch.manual_seed(0)
    generator, critic = network(), nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
    state = {
        "generator": generator,
        "critic": critic,
        "g": optimizer(generator.parameters()),
        "c": optimizer(critic.parameters()),
    }
    driver = TorchDriver(state, ROLLS_BACK, attach={"engine": where})
    own = statistics(critic)
    for bad in (False, False, skip):
        made = generator(torch.randn(8, 3))
        moved = statistics(generator)
        real = torch.full((8, 1), NAN) if bad else torch.randn(8, 1)
        (critic(real).mean() - critic(made.detach()).mean()).backward()
        state["c"].step()
        state["c"].zero_grad()
        assert (statistics(critic) == own) == bad
        own = statistics(critic)
        assert statistics(generator) == moved
        critic(made).mean().backward()
        state["g"].step()
        state["g"].zero_grad()
        assert statistics(generator) == moved
    driver.close()


def test_a_rollback_and_a_load_are_not_undone_by_the_next_skip():
    run = NormRun(FUSED)
    store = run.driver.store(None)
    run.step(0)
    store.save(1, run.driver.state(), healing=run.driver.engines())
    saved = run.statistics
    for i in range(1, 4):
        run.step(i)
    roll_back(run.driver, store.restore(1, run.driver.state()))
    assert run.statistics == saved
    run.step(4, NAN)
    assert run.statistics == saved
    run.norm.reset_running_stats()
    run.driver.expect_change()
    fresh = run.statistics
    run.step(5, NAN)
    assert run.statistics == fresh
