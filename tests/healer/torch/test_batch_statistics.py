"""A step that was skipped leaves no trace in batch statistics either."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW

from healcore.torch import attach
from healcore.torch.driver import TorchDriver
from tests.healer.torch.runs import GOES_BACK, NAN, OBSERVES, go_back
from tests.torch.bits import bits
from tests.torch.test_syncs import CountSyncs

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


def mean(model: nn.Sequential) -> Tensor:
    return model.get_buffer("1.running_mean").clone()


class Life:
    """A model with statistics, healed; batches of small numbers, or of whatever is asked for."""

    def __init__(
        self, optimizer: Any, policy: Any = GOES_BACK, where: str = "host", **options: Any
    ) -> None:
        self.model = network(**options)
        self.norm: Any = self.model[1]
        self.optimizer = optimizer(self.model.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.driver = TorchDriver(self.state, policy, attach={"engine": where})

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
def test_a_skip_puts_them_back_to_the_bit(where: str, optimizer: Any, factor: float, options: Any):
    life, twin = Life(optimizer, where=where, **options), network(**options)
    for i in range(6):
        life.step(i)
    before, weights = life.statistics, bits(list(life.model.parameters()))
    twin.load_state_dict(life.model.state_dict())
    life.step(6, factor)
    assert bits(list(life.model.parameters())) == weights, "it was skipped"
    assert life.statistics == before
    life.step(7)
    twin(torch.randn(8, 3, generator=torch.Generator().manual_seed(7)))
    assert life.statistics == statistics(twin), "the next step is as ever"


@every_way
def test_healthy_steps_are_those_of_a_model_alone(where: str, optimizer: Any):
    life, alone = Life(optimizer, where=where), Life(optimizer, where=where)
    alone.driver.close()
    for i in range(5):
        life.step(i)
        alone.step(i)
        assert life.statistics == alone.statistics


@every_way
def test_all_of_an_accumulated_step_goes_back(where: str, optimizer: Any):
    life = Life(optimizer, where=where)
    for bad in (None, 0, 1, 2):
        before = life.statistics
        for i in range(3):
            life.backward(i, NAN if i == bad else 1.0)
        life.optimizer.step()
        life.optimizer.zero_grad()
        assert (life.statistics == before) == (bad is not None)


@every_way
def test_an_observed_skip_touches_nothing(where: str, optimizer: Any):
    life = Life(optimizer, OBSERVES, where)
    life.step(0)
    life.step(1, NAN)
    assert mean(life.model).isnan().all()


def test_later_evaluations_of_a_closure_go_back_too():
    life = Life(partial(LBFGS, max_iter=3))
    evaluations = 0

    def closure(bad: int | None) -> Tensor:
        nonlocal evaluations
        evaluations += 1
        life.optimizer.zero_grad()
        return life.backward(evaluations, NAN if evaluations == bad else 1.0)

    life.optimizer.step(partial(closure, None))
    before = life.statistics
    life.optimizer.step(partial(closure, evaluations + 2))
    assert life.statistics == before


@every_way
@pytest.mark.parametrize("skip", [False, True])
def test_two_optimizers_keep_to_their_own_layers(where: str, optimizer: Any, skip: bool):
    """The loop of every GAN: the generator's backward comes after the critic's step."""
    torch.manual_seed(0)
    generator, critic = network(), nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
    state = {
        "generator": generator,
        "critic": critic,
        "g": optimizer(generator.parameters()),
        "c": optimizer(critic.parameters()),
    }
    driver = TorchDriver(state, GOES_BACK, attach={"engine": where})
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


@every_way
def test_what_nobody_judged_leaves_nothing_that_is_not_finite(where: str, optimizer: Any):
    """A GradScaler that does not call step(), a loop that goes on with the next batch itself."""
    life = Life(optimizer, where=where)
    life.step(0)
    before = mean(life.model)
    life.model(torch.full((8, 3), NAN))
    life.step(1)
    assert torch.equal(mean(life.model), before)
    life.step(2)
    assert not torch.equal(mean(life.model), before)


@every_way
def test_what_a_scaler_skips_leaves_nothing_either(where: str, optimizer: Any):
    """It does not call step() where the kernel does not know of it: hence finite and no more."""
    life = Life(optimizer, where=where)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for i in range(4):
        before = statistics(life.model)
        life.optimizer.zero_grad()
        x = torch.randn(8, 3) * (NAN if i == 2 else 1.0)
        scaler.scale(life.model(x).square().mean()).backward()
        scaler.step(life.optimizer)
        scaler.update()
        if optimizer is FUSED:
            assert (statistics(life.model) == before) == (i == 2)
    assert scaler.get_scale() == 4.0
    assert all(each.isfinite().all() for each in life.model.buffers())


@every_way
def test_a_compiled_model_is_none_the_wiser(where: str, optimizer: Any):
    life = Life(optimizer, where=where)
    life.driver.close()
    compiled: Any = torch.compile(life.model, backend="aot_eager")
    state = {"model": compiled, "optimizer": life.optimizer}
    driver = TorchDriver(state, GOES_BACK, attach={"engine": where})
    for i in range(4):
        before = statistics(life.model)
        life.optimizer.zero_grad()
        compiled(torch.randn(8, 3) * (NAN if i == 2 else 1.0)).square().mean().backward()
        life.optimizer.step()
        assert (statistics(life.model) == before) == (i == 2)
    driver.close()


def test_layers_of_nobodys_are_kept_finite_and_no_more():
    """An average of the model's is written between two steps, a target network runs in train()."""
    torch.manual_seed(0)
    model, average = network(), network()
    optimizer = FUSED(model.parameters())
    state = {"model": model, "average": average, "optimizer": optimizer}
    driver = TorchDriver(state, GOES_BACK)
    for i, factor in enumerate([1.0, 1.0, NAN]):
        optimizer.zero_grad()
        (model(torch.randn(8, 3)).mean() * factor).backward()
        optimizer.step()
        average.get_buffer("1.running_mean").fill_(float(i))
    assert mean(average).eq(2).all()
    average(torch.full((8, 3), NAN))
    optimizer.zero_grad()
    model(torch.randn(8, 3)).mean().backward()
    optimizer.step()
    assert mean(average).isfinite().all()
    driver.close()


def test_frozen_affine_free_and_late_layers_belong_to_who_trains_around_them():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 1))
    optimizer = SGD(model.parameters(), lr=0.01)
    driver = TorchDriver({"model": model, "optimizer": optimizer}, GOES_BACK)

    def step(factor: float) -> bool:
        before = statistics(model)
        optimizer.zero_grad()
        (model(torch.randn(8, 3) * factor).mean()).backward()
        optimizer.step()
        return statistics(model) == before

    assert not step(1.0)
    assert step(NAN)
    model.append(nn.BatchNorm1d(1).requires_grad_(False))
    driver.items()  # a checkpoint is taken
    assert not step(1.0)
    assert step(NAN)
    model.double().float()  # other tensors in the same layers
    assert not step(1.0)
    assert step(NAN)


@every_way
@pytest.mark.parametrize("factor", [1.0, NAN])
@pytest.mark.parametrize("train", [True, False])
def test_a_backward_after_the_step_does_not_mind(
    where: str, optimizer: Any, factor: float, train: bool
):
    norm = nn.BatchNorm1d(4, affine=False)
    model = nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 1))
    state = {"model": model, "optimizer": optimizer(model.parameters())}
    driver = TorchDriver(state, GOES_BACK, attach={"engine": where})
    inputs = torch.randn(8, 4, requires_grad=True)
    norm.train(train)
    later = norm(inputs).square().sum()
    model(torch.randn(8, 3) * factor).mean().backward()
    state["optimizer"].step()
    later.backward()
    assert inputs.grad is not None
    driver.close()


def test_going_back_and_loading_are_not_undone_by_the_next_skip():
    life = Life(FUSED)
    store = life.driver.store(None, ())
    life.step(0)
    store.save(1, life.driver.items(), healing=life.driver.healing())
    saved = life.statistics
    for i in range(1, 4):
        life.step(i)
    go_back(life.driver, store.restore(1, life.driver.items()))
    assert life.statistics == saved
    life.step(4, NAN)
    assert life.statistics == saved
    life.norm.reset_running_stats()
    life.driver.expect_change()
    fresh = life.statistics
    life.step(5, NAN)
    assert life.statistics == fresh


@pytest.mark.parametrize("where", ["host", "device"])
def test_nothing_waits_for_them(where: str):
    life = Life(FUSED, where=where)
    with CountSyncs() as syncs:
        for i in range(4):
            life.step(i, NAN if i == 2 else 1.0)
    assert syncs.count == 0


def test_models_without_such_layers_pay_nothing():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.InstanceNorm1d(4))
    driver = TorchDriver({"model": model, "optimizer": FUSED(model.parameters())}, GOES_BACK)
    assert driver.healings["optimizer"].hooks.on_ended is None
    observed = Life(FUSED, OBSERVES)
    assert observed.driver.healings["optimizer"].hooks.on_ended is None


def test_closing_ends_it():
    life = Life(FUSED)
    heal = life.driver.healings["optimizer"]
    assert heal.hooks.on_ended is not None
    life.driver.close()
    assert heal.hooks.on_ended is None
    attach(life.optimizer, GOES_BACK)
    life.step(0, NAN)
    assert mean(life.model).isnan().all(), "attach alone knows of no modules"
