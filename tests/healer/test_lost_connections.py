"""A lost connection while data are read: the batch is read again, none is lost and none twice."""

import itertools
import os
import random
import signal
import threading
import urllib.error
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import healcore
from healcore.runtime.data import Cursor
from healcore.runtime.faults.retry import Retries
from healcore.runtime.run.ending.exits import Terminated
from healcore.runtime.run_options import HostPolicy
from tests.healer.run_directory import events

ROWS, SIZE, EPOCHS = 18, 3, 2
QUICK: dict[str, Any] = {"retry": {"base_delay_s": 1e-3, "max_delay_s": 2e-3}}


class Network:
    """A file whose length counts the requests, in all processes; some of them fail."""

    def __init__(self, folder: Path, *failing: int, error: Callable[[], Exception]) -> None:
        folder.mkdir(exist_ok=True)
        self.count = folder / "requests"
        self.failing = failing
        self.error = error

    def request(self) -> None:
        with self.count.open("ab") as file:
            file.write(b".")
            number = file.tell()
        if number in self.failing:
            raise self.error()


def lost() -> Exception:
    return ConnectionResetError(104, "Connection reset by peer")


class Rows(Dataset):
    """Map-style rows, with noise from every global generator if it `draws`."""

    def __init__(self, network: Network, draws: bool = False) -> None:
        self.network, self.draws = network, draws

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Tensor:
        noise = self.draws and random.random() + np.random.rand() + float(torch.rand(()))  # noqa: NPY002
        self.network.request()
        return torch.tensor([float(index), float(noise)])


class Reconnects(IterableDataset):
    """A stream that stays where it is if the connection is lost."""

    def __init__(self, network: Network) -> None:
        self.network, self.at = network, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.at = 0
        return self

    def __next__(self) -> Tensor:
        if self.at == ROWS:
            raise StopIteration
        self.network.request()
        self.at += 1
        return torch.tensor([float(self.at - 1), 0.0])


class Batches:
    """A sequence of batches, each of which is a request."""

    def __init__(self, network: Network) -> None:
        self.network = network

    def __len__(self) -> int:
        return ROWS // SIZE

    def __getitem__(self, index: int) -> Tensor:
        self.network.request()
        return torch.full((SIZE, 2), float(index))


class Connecting:
    """A stream that connects at its begin, and again after an exception."""

    def __init__(self, network: Network) -> None:
        self.network = network

    def __iter__(self) -> Iterator[Tensor]:
        self.network.request()
        return iter([torch.full((SIZE, 2), float(i)) for i in range(ROWS // SIZE)])


def generated(network: Network) -> Iterator[Tensor]:
    for index in range(ROWS // SIZE):
        network.request()
        yield torch.full((SIZE, 2), float(index))


def shuffled(network: Network) -> Iterator[Tensor]:
    """Draws its order from a global generator when it begins."""
    for index in torch.randperm(ROWS // SIZE):
        network.request()
        yield torch.full((SIZE, 2), float(index))


LOADERS: dict[str, Callable[[Network], Any]] = {
    "map-style": lambda net: DataLoader(Rows(net, draws=True), SIZE, shuffle=True),
    "in order": lambda net: DataLoader(Rows(net), SIZE),
    "workers": lambda net: DataLoader(Rows(net), SIZE, shuffle=True, num_workers=2),
    "persistent": lambda net: DataLoader(
        Rows(net), SIZE, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "StatefulDataLoader": lambda net: StatefulDataLoader(Rows(net), SIZE, shuffle=True),
    "its own generator": lambda net: DataLoader(
        Rows(net), SIZE, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "StatefulDataLoader, its own generator": lambda net: StatefulDataLoader(
        Rows(net), SIZE, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "accelerate": lambda net: Accelerator(cpu=True).prepare_data_loader(
        DataLoader(Rows(net), SIZE, shuffle=True)
    ),
    "fabric": lambda net: Fabric(accelerator="cpu", devices=1).setup_dataloaders(
        DataLoader(Rows(net, draws=True), SIZE, shuffle=True)
    ),
    "sequence": Batches,
    "connecting": Connecting,
    "function": lambda net: lambda: generated(net),
    "function, shuffled": lambda net: lambda: shuffled(net),
    "function of a DataLoader": lambda net: (
        lambda: DataLoader(Rows(net, draws=True), SIZE, shuffle=True)
    ),
    "function of a stream": lambda net: lambda: DataLoader(Reconnects(net), SIZE),
}
FORKS = ("workers", "persistent")


def train(
    make: Callable[[Network], Any],
    network: Network,
    store: Path | None = None,
    *,
    epochs: int = EPOCHS,
    policy: Any = None,
    each_step: Callable[[healcore.Healer[Any]], object] = lambda healer: None,
) -> list[Tensor]:
    """The batches of the steps, in their order, and the next random number."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    state = {"model": model, "optimizer": optimizer}
    loader = make(network)
    found = []
    policy = healcore.policy.load("default", **QUICK) if policy is None else policy
    with healcore.Healer(policy, state=state, store=store) as healer:
        for epoch in healer.epochs(epochs):
            for batch in healer.batches(loader, epoch=epoch):
                found.append(batch.clone())
                loss = model(batch).square().mean()
                healer.observe(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                each_step(healer)
    return [*found, torch.rand(3)]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    "failing",
    [
        (8, 9, 10),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ((20,), (1,), (8,), (38, 41))),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", [name for name in LOADERS if name not in FORKS])
def test_the_batches_are_those_of_a_run_that_lost_no_connection(name, failing, tmp_path):
    make = LOADERS[name]
    whole = Network(tmp_path / "whole", error=lost)
    expected = train(make, whole)
    requests = whole.count.stat().st_size
    network = Network(tmp_path / "lost", *failing, error=lost)
    assert same(train(make, network, tmp_path), expected)
    happened = [number for number in failing if number <= requests]
    faults = len(events(tmp_path, "fault"))
    if name == "accelerate":  # drops a batch that it has read ahead, with its failure
        assert 0 < faults <= len(happened) or not happened
    else:
        assert faults == len(happened)


@pytest.mark.parametrize(
    ("name", "failing"),
    [
        ("workers", (8, 9)),
        *(
            pytest.param(name, failing, marks=pytest.mark.slow)
            for name, failing in itertools.product(FORKS, [(1,), (8, 9), (20,)])
        ),
    ],
)
def test_the_batches_of_workers_are_the_same_after_lost_connections(name, failing, tmp_path):
    """Which row a request is for differs, because two workers read at the same time."""
    make = LOADERS[name]
    expected = train(make, Network(tmp_path / "whole", error=lost))
    network = Network(tmp_path / "lost", *failing, error=lost)
    assert same(train(make, network, tmp_path), expected)
    assert events(tmp_path, "fault")


@pytest.mark.slow
def test_a_server_that_is_busy_in_a_worker(tmp_path):
    """The exception of urllib cannot be made again in this process: torch raises a RuntimeError."""

    def busy() -> urllib.error.HTTPError:
        return urllib.error.HTTPError("http://x", 503, "busy", Message(), None)

    make = LOADERS["workers"]
    expected = train(make, Network(tmp_path / "whole", error=lost), epochs=1)
    found = train(make, Network(tmp_path / "lost", 8, error=busy), tmp_path, epochs=1)
    assert same(found, expected)
    assert [each["sign"] for each in events(tmp_path, "fault")] == ["HTTP 503"]


def dying_stream(network: Network) -> Any:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Tensor]:
            return generated(network)

    return DataLoader(Stream(), batch_size=None)


class Prefetching:
    """Reads another iterator, which may have passed the batch that has raised."""

    def __init__(self, network: Network) -> None:
        self.batches = iter(DataLoader(Rows(network), SIZE))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.batches)


CANNOT: dict[str, Callable[[Network], Any]] = {
    "generator": generated,
    "stream of a generator": dying_stream,
    "stream": lambda net: DataLoader(Reconnects(net), SIZE),
    "own iterator": Reconnects,
    "stream in workers": lambda net: DataLoader(Reconnects(net), SIZE, num_workers=1),
    "two streams": lambda net: map(torch.add, iter([torch.ones(2)] * ROWS), Reconnects(net)),
    "map": lambda net: map(Batches(net).__getitem__, range(6)),
    "around another iterator": Prefetching,
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_go_back_raises_the_error_as_before(name, tmp_path):
    """To read on would lose a batch, or take the end of a dead generator for that of the data."""
    network = Network(tmp_path, 5, error=lost)
    with pytest.raises(ConnectionResetError) as raised:
        train(CANNOT[name], network, tmp_path, epochs=1)
    assert "Pass a function that makes it" in "".join(raised.value.__notes__)
    (fault,) = events(tmp_path, "fault")
    assert (fault["cause"], fault["answer"]) == (["NETWORK"], "save")


@pytest.mark.parametrize("name", ["map-style", "function", "sequence"])
def test_after_all_attempts_the_error_is_raised_and_the_restart_loses_no_batch(name, tmp_path):
    make = LOADERS[name]
    expected = train(make, Network(tmp_path / "whole", error=lost))
    network = Network(tmp_path / "lost", *range(11, 300), error=lost)
    policy = healcore.policy.load("default", retry=QUICK["retry"] | {"attempts": 3})
    before: list[Tensor] = []

    def keep(healer: Any) -> None:
        before.append(torch.empty(0))

    with pytest.raises(ConnectionResetError):
        train(make, network, tmp_path, policy=policy, each_step=keep)
    faults = events(tmp_path, "fault")
    assert [each.get("answer") for each in faults] == ["retry", "retry", None, "save"]
    after = train(make, Network(tmp_path / "again", error=lost), tmp_path, policy=policy)
    assert 0 < len(before) < len(expected)
    assert same(after, expected[len(before) :])


def test_a_wait_is_reported(tmp_path):
    train(LOADERS["in order"], Network(tmp_path / "lost", 8, 10, error=lost), tmp_path)
    faults = events(tmp_path, "fault")
    assert [(e["step"], e["attempt"], e["answer"]) for e in faults] == [
        (2, 1, "retry"),
        (2, 2, "retry"),
    ]


def test_a_batch_that_cannot_be_read_after_a_lost_connection_is_skipped(tmp_path):
    """`[skip_batch]` is for all errors that are not of the network."""
    errors = iter([lost(), KeyError("row")])
    network = Network(tmp_path / "n", 5, 7, error=lambda: next(errors))
    found = train(LOADERS["in order"], network, tmp_path, epochs=1)
    rows = [int(row) for batch in found[:-1] for row in batch[:, 0]]
    assert rows == [row for row in range(ROWS) if row not in (3, 4, 5)]
    found = [(each["cause"], each["answer"]) for each in events(tmp_path, "fault")]
    assert found == [(["NETWORK"], "retry"), (["DATA"], "skip_batch")]


def test_a_policy_without_a_rule_for_the_network_raises_at_once(tmp_path):
    network = Network(tmp_path, 5, error=lost)
    with pytest.raises(ConnectionResetError):
        train(LOADERS["in order"], network, policy="zclip")
    assert network.count.stat().st_size == 5


def test_a_signal_ends_the_wait_and_the_restart_loses_no_batch(tmp_path):
    make = LOADERS["map-style"]
    expected = train(make, Network(tmp_path / "whole", error=lost))

    def interrupted() -> Exception:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return lost()

    slow = healcore.policy.load("default", retry={"base_delay_s": 3600.0, "max_delay_s": 3600.0})
    with pytest.raises(Terminated):
        train(make, Network(tmp_path / "lost", 11, error=interrupted), tmp_path, policy=slow)
    assert events(tmp_path, "save")[-1]["step"] == 3
    assert same(train(make, Network(tmp_path / "again", error=lost), tmp_path), expected[3:])


def test_a_function_that_cannot_connect_at_first_is_called_again(tmp_path):
    network = Network(tmp_path, 1, 2, error=lost)

    def make() -> Iterator[Tensor]:
        network.request()
        return iter([torch.ones(SIZE, 2)] * 4)

    assert len(train(lambda _: make, network, tmp_path, epochs=1)) == 4 + 1


def test_a_function_that_never_connects_raises_its_own_error(tmp_path):
    def make() -> Iterator[Tensor]:
        raise ValueError("no such bucket")

    with pytest.raises(ValueError, match="no such bucket"):
        train(lambda _: make, Network(tmp_path, error=lost), tmp_path)


def cursor_over(loader: Any) -> Cursor:
    policy = HostPolicy.of(healcore.policy.load("default", **QUICK))
    retries = Retries("reading a batch", policy)
    return Cursor(loader, epochs=1, retries=retries)


def number_of(read: tuple[Tensor, Any]) -> int:
    return int(read[0][0, 0])


def test_batches_that_are_dropped_to_go_back_are_read_again_too(tmp_path):
    """Requests 6 and 9 are of a batch that is dropped, and 12 of the batch that was read next."""
    network = Network(tmp_path, 6, 9, 12, error=lost)
    cursor = cursor_over(lambda: generated(network))
    assert [number_of(cursor.next()) for _ in range(2)] == [0, 1]
    position = cursor.position()
    assert [number_of(cursor.next()) for _ in range(2)] == [2, 3]
    assert not cursor.seek(position)
    assert [number_of(cursor.next()) for _ in range(4)] == [2, 3, 4, 5]
    assert network.count.stat().st_size > 12


def test_a_stream_that_dies_while_it_is_moved_forward_does_not_count_as_read(tmp_path):
    """A restart would have trained on from the next epoch, without the rest of this one."""
    longer = Cursor(range(6), epochs=1)
    for _ in range(4):
        longer.next()
    cursor = cursor_over(generated(Network(tmp_path, 3, error=lost)))
    with pytest.raises(ConnectionResetError):
        cursor.seek(longer.position(), reads_forward=True)
