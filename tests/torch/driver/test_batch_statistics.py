"""A skipped step leaves no trace in batch statistics either."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from healcore import Healer
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


def test_statistics_of_a_forward_pass_without_a_step_can_be_undone_after_a_dispatch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = AdamW(model.parameters(), lr=0.01)
    driver = TorchDriver({"model": model, "optimizer": optimizer}, ROLLS_BACK)
    model(torch.randn(8, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    driver.take_dispatch()
    before = statistics(model[1])
    model(torch.randn(8, 3))  # the loop raises here
    driver.take_dispatch()
    assert statistics(model[1]) != before
    driver.undo_window()
    assert statistics(model[1]) == before
    driver.close()


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


# -- a kept step whose forward pass has overflowed one buffer --------------------------------------


class ReplacedStatistics(nn.Module):
    """A norm layer that replaces its statistics, with one more buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(4))
        self.register_buffer("running_var", torch.ones(4))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return (x - self.running_mean) / (self.running_var + 1e-5).sqrt()
        mean, var = x.detach().mean(0), x.detach().var(0)
        self.running_mean: Any = 0.9 * self.running_mean + 0.1 * mean
        self.running_var: Any = 0.9 * self.running_var + 0.1 * var
        self.largest: Any = torch.maximum(self.largest, x.detach().abs().max())
        return (x - mean) / (var + 1e-5).sqrt()


class CenteredNorm(nn.BatchNorm1d):
    """torch's layer with one more buffer."""

    def __init__(self) -> None:
        super().__init__(4)
        self.register_buffer("center", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.center: Any
            self.center.lerp_(x.detach().mean(0).double(), 0.1)
        return super().forward(x)


class Moments(nn.Module):
    """Buffers with names of their own: Inf - Inf is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("spread", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.average: Any
            self.spread: Any
            mean = x.detach().mean(0)
            self.average.mul_(0.9).add_(mean, alpha=0.1)
            spread = x.detach().square().mean(0) - mean.square()
            self.spread.mul_(0.9).add_(spread, alpha=0.1)
        return torch.tanh(x)


class Channels(nn.Sequential):
    """A layer for images, in a model of vectors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = torch.stack([x, -x], dim=2)
        return super().forward(images)[:, :, 0]


NORMS: dict[str, Any] = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(4),
    "cumulative": lambda: nn.BatchNorm1d(4, momentum=None),
    "InstanceNorm1d": lambda: Channels(nn.InstanceNorm1d(4, track_running_stats=True)),
    "with one more buffer": CenteredNorm,
    "replaced": ReplacedStatistics,
    "other names": Moments,
}


@pytest.mark.parametrize(
    ("compares", "engine"), [(False, "device"), (True, "host")], ids=["no loss_fn", "loss_fn"]
)
@pytest.mark.parametrize("norm", NORMS)
def test_buffers_that_one_forward_pass_writes_are_restored_together(
    norm: str, compares: bool, engine: Any
):
    """The batch overflows one of them, and its loss and gradients are finite."""
    torch.manual_seed(0)
    layer = NORMS[norm]()
    model = nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = [*torch.randn(40, 8, 3)]
    data[20] = data[20] * 1e20

    def loss_fn(batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    options: Any = {"loss_fn": loss_fn} if compares else {}
    state = {"model": model, "optimizer": optimizer}
    before: Any = None
    with Healer("default", state=state, attach={"engine": engine}, **options) as healer:
        for i, batch in enumerate(healer.batches(data)):
            if i == 20:
                before = statistics(layer)
            loss = loss_fn(batch)
            assert loss.isfinite()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if i == 20:
                assert statistics(layer) == before
            if i == 21:
                assert statistics(layer) != before, "later batches count again"
    assert healer.rollbacks == 0
    model.eval()
    assert loss_fn(data[0]) < 10


@pytest.mark.parametrize(("where", "fused"), [("host", False), ("device", True)])
@pytest.mark.parametrize("norm", NORMS)
def test_an_overflow_in_one_of_several_passes_restores_what_the_step_has_written(
    norm: str, where: str, fused: bool
):
    run = NormRun(where, fused)
    run.driver.close()
    run.model[1] = layer = NORMS[norm]()
    run.optimizer = AdamW(run.model.parameters(), lr=0.01, fused=fused)
    state = {"model": run.model, "optimizer": run.optimizer}
    run.driver = TorchDriver(state, ROLLS_BACK, attach={"engine": where})
    for i in range(3):
        run.step(i)
        run.driver.take_dispatch()
    before = statistics(layer)
    for bad in (3, 5):
        run.step(3, 4, 5, factor=1e20, bad=bad)
        assert statistics(layer) == before
        run.driver.take_dispatch()
    run.model.eval()
    run.step(6, factor=1e20)
    assert statistics(layer) == before, "nothing was written"


def test_an_overflow_leaves_other_layers_alone():
    """Their statistics of this batch are sound; infinite statistics of before stop nothing."""
    torch.manual_seed(0)
    wide, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    model = nn.Sequential(wide, other, nn.Linear(3, 1))
    other.get_buffer("running_var")[0] = math.inf
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    driver = TorchDriver({"model": model, "optimizer": optimizer}, ROLLS_BACK)
    for factor in (1.0, 1e20):
        before = statistics(wide), statistics(other)
        model(torch.randn(8, 3) * factor).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert (statistics(wide) == before[0]) == (factor > 1)
        assert statistics(other) != before[1]
    driver.close()


def test_statistics_of_another_dtype_than_before_are_not_restored():
    run = NormRun()
    run.driver.close()
    run.model[1] = layer = ReplacedStatistics()
    run.optimizer = AdamW(run.model.parameters(), lr=0.01)
    run.driver = TorchDriver({"model": run.model, "optimizer": run.optimizer}, ROLLS_BACK)
    run.step(0)
    layer.double()
    run.driver.take_dispatch()
    run.step(1, factor=NAN)
    assert layer.get_buffer("running_mean").dtype == torch.float64
