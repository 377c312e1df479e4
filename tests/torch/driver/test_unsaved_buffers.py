"""Buffers that are not in `state_dict()`: what a training writes into them is restored."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from healcore import Healer
from healcore.runtime.store.checkpoints import BUFFERS_ITEM, Keep
from healcore.runtime.store.values import arrays_of
from healcore.torch.driver import TorchDriver
from healcore.torch.store import DCPStore, MemoryStore
from tests.healer.run_directory import events, new_process
from tests.torch.driver.small_run import ROLLS_BACK

DATA = torch.randn(400, 8, 4, generator=torch.Generator().manual_seed(0))


class Centered(nn.Module):
    """Subtracts the mean of what it has seen, which a checkpoint of torch does not hold."""

    center: Tensor
    table: Tensor
    cache: Tensor | None

    def __init__(self, *, by: str = "write") -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 1)
        self.by = by
        self.register_buffer("center", torch.full((8,), 0.5), persistent=False)
        self.register_buffer("table", torch.arange(8.0), persistent=False)
        self.register_buffer("cache", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.training:
            mean = hidden.detach().mean(0)
            if self.by == "write":
                self.center.mul_(0.9).add_(mean, alpha=0.1)
            elif self.by == "data":
                self.center.data.mul_(0.9).add_(mean, alpha=0.1)
            else:
                self.center = 0.9 * self.center + 0.1 * mean
        return self.last(hidden - self.center + self.table / 8)


class Interrupted(Exception):
    """Raised by the program itself."""


def train(store: Any, by: str = "write", *, until: int = -1, overwrite: int = -1) -> Centered:
    """Trains on `DATA`; ends before step `until`, and damages a layer after step `overwrite`."""
    torch.manual_seed(1)
    model = Centered(by=by)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer}
    damaged = False

    def loss_fn(batch: Tensor) -> Tensor:
        return mse_loss(model(batch), batch.sum(1, keepdim=True).sin())

    with Healer("default", state=state, store=store, loss_fn=loss_fn) as healer:
        for batch in healer.batches(list(DATA)):
            if healer.step == until:
                raise Interrupted
            healer.loss(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if healer.step == overwrite and not damaged:
                damaged = True
                with torch.no_grad():
                    model.last.weight.fill_(torch.nan)
    return model


def contents(model: Centered) -> list[Tensor]:
    return [*model.parameters(), model.center]


@pytest.mark.parametrize("by", ["write", "data", "replace"])
def test_a_restart_continues_with_the_buffers_of_the_killed_run(by: str, tmp_path: Path):
    undisturbed = train(tmp_path / "whole", by)
    with pytest.raises(Interrupted):
        train(tmp_path / "killed", by, until=250)
    new_process()
    resumed = train(tmp_path / "killed", by)
    assert all(map(torch.equal, contents(resumed), contents(undisturbed)))


def test_a_rollback_restores_the_buffers(tmp_path: Path):
    """The repeat has the bits of the run without the damage."""
    healthy = train(tmp_path / "healthy")
    healed = train(tmp_path / "healed", overwrite=230)
    assert events(tmp_path / "healed", "rollback")
    assert all(map(torch.equal, contents(healed), contents(healthy)))


def driven(model: nn.Module) -> TorchDriver:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TorchDriver({"model": model, "optimizer": optimizer}, ROLLS_BACK)


def load(driver: TorchDriver, store: Any, step: int) -> None:
    driver.load(store.restore(step, driver.state()).state)


def saved_names(driver: TorchDriver, store: Any) -> list[str]:
    """The names of the buffers in a checkpoint of now."""
    entries = store.format.flatten(driver.state()).entries
    return [node["name"] for node in arrays_of(entries[BUFFERS_ITEM])]


@pytest.mark.parametrize(
    "make", [lambda _: MemoryStore(Keep(candidates=8)), DCPStore], ids=["memory", "disk"]
)
def test_each_checkpoint_has_the_values_of_its_time(make: Any, tmp_path: Path):
    model = Centered()
    driver = driven(model)
    store = make(tmp_path)
    own = model.center
    store.save(0, driver.state())  # before the first write
    model.center.fill_(1)
    store.save(1, driver.state())
    model.center = torch.ones(2, 3)
    model.cache = torch.tensor([4, 5])
    store.save(2, driver.state())
    model.center = torch.zeros(0)
    store.save(3, driver.state())
    load(driver, store, 2)
    assert model.center.tolist() == torch.ones(2, 3).tolist()
    assert model.cache is not None
    assert model.cache.tolist() == [4, 5]
    load(driver, store, 3)
    assert model.center.shape == (0,)
    load(driver, store, 1)
    assert model.center.tolist() == [1] * 8
    model.center = own
    load(driver, store, 0)
    assert model.center is own, "overwritten in place"
    assert own.tolist() == [0.5] * 8
    assert model.table.tolist() == [*range(8)]


def test_only_written_buffers_are_saved_and_not_with_the_weights(tmp_path: Path):
    model = Centered()
    driver = driven(model)
    store = DCPStore(tmp_path)
    assert saved_names(driver, store) == []
    model.center.add_(1)
    assert saved_names(driver, store) == [f"{BUFFERS_ITEM}.model.center"]
    store.save(1, driver.state())
    weights = store.restore(1, {"model": model}).state["model"]
    assert weights.keys() == model.state_dict().keys()
    Centered().load_state_dict(weights)


def test_a_loaded_buffer_is_saved_again():
    """Also if nothing writes it after the restart."""
    model = Centered()
    first = driven(model)
    store = MemoryStore()
    model.center.add_(1)
    store.save(1, first.state())
    first.close()
    again = Centered()
    second = driven(again)
    load(second, store, 1)
    assert again.center.tolist() == [1.5] * 8
    assert saved_names(second, store) == [f"{BUFFERS_ITEM}.model.center"]


def test_a_checkpoint_without_the_item_is_loaded():
    """As checkpoints of earlier versions."""
    model = Centered()
    driver = driven(model)
    store = MemoryStore()
    state = driver.state()
    del state[BUFFERS_ITEM]
    store.save(1, state)
    model.center.add_(1)
    load(driver, store, 1)
    assert model.center.tolist() == [1.5] * 8


def test_a_buffer_that_the_forward_pass_registers_is_there_after_a_restart():
    model = nn.Linear(2, 1)
    driver = driven(model)
    model.register_buffer("seen", torch.tensor(3.0), persistent=False)
    store = MemoryStore()
    store.save(1, driver.state())
    driver.close()
    again = nn.Linear(2, 1)
    load(driven(again), store, 1)
    assert dict(again.named_buffers()) == {"seen": torch.tensor(3.0)}
    assert "seen" not in again.state_dict()


def test_nan_in_such_a_buffer_makes_no_checkpoint_unusable():
    """It may be memory that nothing has filled yet."""
    model = Centered()
    driver = driven(model)
    store = MemoryStore()
    model.center.fill_(float("nan"))
    store.save(1, driver.state())
    store.wait()
    (saved,) = store.checkpoints()
    assert saved.finite
    assert store.take_nonfinite() == []


def test_a_buffer_larger_than_the_weights_is_not_saved():
    model = Centered()
    bank = torch.zeros(1 << 17)
    model.register_buffer("bank", bank, persistent=False)
    driver = driven(model)
    store = MemoryStore()
    bank.add_(1)
    assert saved_names(driver, store) == []


class Odd(nn.Module):
    """Writes a buffer of a rare kind in each forward pass."""

    odd: Tensor

    def __init__(self, buffer: Tensor, *, persistent: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("odd", buffer, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.odd.copy_(self.odd.clone())
        return self.layer(x)


@pytest.mark.parametrize("persistent", [True, False], ids=["persistent", "not persistent"])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.arange(8)[::2], id="strided int"),
        pytest.param(lambda: torch.arange(8.0)[::2], id="strided float"),
        pytest.param(
            lambda: torch.empty_strided((1,), (2,)).fill_(1.0), id="one element, stride 2"
        ),
        pytest.param(lambda: torch.eye(3)[:, 0], id="a column"),
        pytest.param(lambda: torch.tensor([1 + 2j, 3 - 1j]), id="complex"),
        pytest.param(lambda: torch.ones(4).to(torch.float8_e4m3fn), id="float8"),
    ],
)
def test_a_buffer_of_a_rare_kind_raises_nothing(
    make: Callable[[], Tensor], persistent: bool, tmp_path: Path
):
    model = Odd(make(), persistent=persistent)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    with Healer("default", state=state, store=tmp_path) as healer:
        for batch in healer.batches(list(torch.randn(6, 2, 4))):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert healer.step == 6


def test_a_replaced_buffer_is_not_kept_alive(tmp_path: Path):
    """It may be a data set on the device."""
    model = Centered(by="replace")
    first = weakref.ref(model.center)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Healer(state={"model": model, "optimizer": optimizer}, store=tmp_path) as healer:
        for batch in healer.batches(list(DATA[:6])):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert first() is None
