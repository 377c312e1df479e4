"""A skipped step leaves no trace in batch statistics either."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from healcore.torch.driver import TorchDriver
from tests.torch.bit_comparison import bits
from tests.torch.driver.small_run import NAN, ROLLS_BACK, roll_back

every_way = pytest.mark.parametrize(
    ("where", "fused"), [(where, fused) for where in ("host", "device") for fused in (True, False)]
)


def network(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4, **options)
    return nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 1))


def statistics(model: nn.Module) -> Any:
    return bits(dict(model.named_buffers()))


class NormRun:
    """A healed model with statistics, on batches of small numbers or of given values."""

    def __init__(self, where="host", fused=True, scales=False, **options: Any) -> None:
        self.model = network(**options)
        self.optimizer = AdamW(self.model.parameters(), lr=0.01, fused=fused)
        self.scaler = torch.amp.GradScaler("cpu", enabled=scales)
        state = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}
        self.driver = TorchDriver(state, ROLLS_BACK, attach={"engine": where})

    def step(self, *batches: int, factor: float = 1.0, bad: int | None = None) -> None:
        """A step on some batches; `factor` is for the batch `bad`, or the only one."""
        for i in batches:
            scale = factor if bad in (i, None) else 1.0
            x = torch.randn(8, 3, generator=torch.Generator().manual_seed(i))
            loss = self.model(x * scale).square().mean()
            self.scaler.scale(loss * (1.0 if math.isnan(scale) else scale)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


@every_way
@pytest.mark.parametrize(
    ("factor", "options"), [(NAN, {}), (1e4, {"momentum": None})], ids=["ema", "cumulative"]
)
def test_a_skip_restores_them_to_the_bit(where: str, fused: bool, factor: float, options: Any):
    run = NormRun(where, fused, **options)
    twin = network(**options)
    for i in range(6):
        run.step(i)
    before = statistics(run.model)
    weights = bits(list(run.model.parameters()))
    twin.load_state_dict(run.model.state_dict())
    run.step(6, factor=factor)
    assert bits(list(run.model.parameters())) == weights, "it was skipped"
    assert statistics(run.model) == before
    run.step(7)
    twin(torch.randn(8, 3, generator=torch.Generator().manual_seed(7)))
    assert statistics(run.model) == statistics(twin), "the next step is the model's own"
    for bad in (0, 1, 2):
        before = statistics(run.model)
        run.step(0, 1, 2, factor=NAN, bad=bad)
        assert statistics(run.model) == before, "all of an accumulated step"


@every_way
def test_two_optimizers_restore_their_own_layers(where: str, fused: bool):
    """The loop of every GAN: the generator's backward comes after the critic's step."""
    generator = network()
    critic = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
    g, c = (AdamW(each.parameters(), lr=0.01, fused=fused) for each in (generator, critic))
    state = {"generator": generator, "critic": critic, "g": g, "c": c}
    driver = TorchDriver(state, ROLLS_BACK, attach={"engine": where})
    own = statistics(critic)
    for bad in (False, False, True, False):
        made = generator(torch.randn(8, 3))
        moved = statistics(generator)
        real = torch.full((8, 1), NAN) if bad else torch.randn(8, 1)
        (critic(real).mean() - critic(made.detach()).mean()).backward()
        c.step()
        c.zero_grad()
        assert (statistics(critic) == own) == bad
        own = statistics(critic)
        assert statistics(generator) == moved
        critic(made).mean().backward()
        g.step()
        g.zero_grad()
        assert statistics(generator) == moved
    driver.close()


def test_no_nan_stays_until_the_next_step_if_a_scaler_drops_a_step():
    run = NormRun(fused=False, scales=True)
    for factor in (1.0, NAN):
        run.step(0, factor=factor)
        run.driver.take_dispatch()
    assert all(bool(buffer.isfinite().all()) for buffer in run.model.buffers())


def test_a_rollback_and_a_load_are_not_undone_by_the_next_skip():
    run = NormRun()
    store = run.driver.store(None)
    run.step(0)
    store.save(1, run.driver.state(), record=run.driver.engines())
    saved = statistics(run.model)
    for i in range(1, 4):
        run.step(i)
    roll_back(run.driver, store.restore(1, run.driver.state()))
    assert statistics(run.model) == saved
    run.step(4, factor=NAN)
    assert statistics(run.model) == saved
    norm: Any = run.model[1]
    norm.reset_running_stats()
    run.driver.expect_change()
    fresh = statistics(run.model)
    run.step(5, factor=NAN)
    assert statistics(run.model) == fresh


class Observer(nn.Module):
    """Keeps what it has seen in one of the ways in which modules write their buffers."""

    level: torch.Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        start = torch.zeros(0) if way == "resized" else torch.zeros(4)
        self.register_buffer("level", start)
        self.register_buffer("table", torch.full((3,), -math.inf))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean(0)
        if self.way == "counted":
            self.level.mul_(0.9).add_(mean, alpha=0.1)
        elif self.way == "data":
            self.level.data.copy_(self.level.data * 0.9 + mean * 0.1)
        elif self.way == "replaced":
            self.level = self.level * 0.9 + mean * 0.1
        else:
            known = self.level if self.level.numel() else torch.zeros_like(mean)
            self.level.resize_(mean.shape).copy_(known * 0.9 + mean * 0.1)
        self.seen += 1
        return x - self.level.sum()


class ObservedRun(NormRun):
    """A healed model with an observer."""

    def __init__(self, way: str, where: str = "host", fused: bool = True) -> None:
        torch.manual_seed(0)
        self.observer = Observer(way)
        self.model = nn.Sequential(nn.Linear(3, 4), self.observer, nn.Linear(4, 1))
        self.optimizer = AdamW(self.model.parameters(), lr=0.01, fused=fused)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        state = {"model": self.model, "optimizer": self.optimizer}
        self.driver = TorchDriver(state, ROLLS_BACK, attach={"engine": where})

    def step(self, *batches: int, **options: Any) -> None:
        super().step(*batches, **options)
        self.driver.take_dispatch()


@every_way
@pytest.mark.parametrize("way", ["counted", "data", "replaced", "resized"])
def test_a_skip_restores_what_a_forward_pass_has_written(way: str, where: str, fused: bool):
    run = ObservedRun(way, where, fused)
    for i in range(13 if where == "device" else 3):
        run.step(i)
    level, table = bits(run.observer.level), bits(run.observer.table)
    for bad in (NAN, NAN, math.inf):
        run.step(20, factor=bad)
        assert bits(run.observer.level) == level
    run.step(21)
    assert bits(run.observer.level) != level
    assert bool(run.observer.level.isfinite().all())
    level = bits(run.observer.level)
    run.step(0, 1, 2, factor=NAN, bad=1)
    assert bits(run.observer.level) == level, "all of an accumulated step"
    assert bits(run.observer.table) == table


@pytest.mark.parametrize("way", ["counted", "replaced", "resized"])
def test_the_first_step_may_be_the_bad_one(way: str):
    run = ObservedRun(way)
    start = run.observer.level.tolist()
    run.step(0, factor=NAN)
    assert run.observer.level.tolist() == start
    run.step(1)
    assert bool(run.observer.level.isfinite().all())


def test_what_the_program_writes_between_two_steps_stays():
    run = ObservedRun("counted")
    run.step(0)
    run.observer.level.fill_(2.0)  # at the end of the body, or before an epoch
    run.driver.take_dispatch()
    level = bits(run.observer.level)
    run.step(1, factor=NAN)
    assert bits(run.observer.level) == level
    assert int(run.observer.seen) == 2, "counters and flags belong to the program"
    run.observer.level = torch.full((4,), 3.0)
    run.driver.expect_change()
    run.step(2, factor=NAN)
    assert run.observer.level.tolist() == [3.0] * 4


def test_a_replaced_buffer_may_be_the_batch():
    class Keeps(nn.Module):
        last: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(8, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = x
            return x

    torch.manual_seed(0)
    model = nn.Sequential(Keeps(), nn.Linear(3, 1))
    optimizer = AdamW(model.parameters(), lr=0.01)
    driver = TorchDriver({"model": model, "optimizer": optimizer}, ROLLS_BACK)
    batch = torch.full((8, 3), NAN)
    model(batch).sum().backward()
    optimizer.step()
    assert bool(batch.isnan().all()), "the program's own tensor is not written"
    assert not model[0].last.any()  # type: ignore[union-attr]
    driver.close()


def test_the_observers_of_quantization_forget_a_skipped_batch():
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    def fake() -> Any:
        return FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)

    torch.manual_seed(0)
    model = nn.Sequential(fake(), nn.Linear(3, 4), fake(), nn.Linear(4, 1))
    optimizer = AdamW(model.parameters(), lr=0.01)
    driver = TorchDriver({"model": model, "optimizer": optimizer}, ROLLS_BACK)
    losses = []
    for i in range(8):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(i))
        loss = model(x * (NAN if i in (0, 4) else 1.0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        driver.take_dispatch()
        losses.append(float(loss))
    assert [math.isnan(loss) for loss in losses] == [i in (0, 4) for i in range(8)]
    driver.close()
