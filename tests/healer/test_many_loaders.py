"""Programs that make a new loader in each epoch, or read several, for more epochs than a few.

A rollback over some epochs, and a restart in a late one, repeat the data of each epoch exactly.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from healcore import Checkpoints, Healer
from tests.healer.killed_runs import die, forked
from tests.healer.training_loops import BOTH_FRAMEWORKS, Faults, loop_of, rules, same

EPOCHS, BATCHES = 12, 7
"""More epochs than loaders that the registry keeps."""
EVERY_30 = Checkpoints(every=30)
"""Step 30 is in epoch 4, step 60 in epoch 8: a rollback from epoch 10 leads over two epochs."""
POLICY = rules(cut=False)


def numbers(epoch: int) -> list[int]:
    """The batches of an epoch, which no other epoch has."""
    return [epoch * BATCHES + index for index in range(BATCHES)]


def shuffled(values: list[int]) -> Any:
    data: Any = values
    return DataLoader(data, batch_size=None, shuffle=True)


def drawn(epoch: int) -> Iterator[int]:
    """An order from torch's global generator."""
    order = torch.randperm(BATCHES).tolist()
    return iter([numbers(epoch)[index] for index in order])


class Stream(IterableDataset):
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(numbers(self.epoch))


class LateBound:
    """One function for all epochs, which reads the program's own variable `epoch`."""

    def __init__(self) -> None:
        self.epoch = 0

    def __call__(self, epoch: int) -> list[Any]:
        self.epoch = epoch
        return [self.make]

    def make(self) -> Iterator[int]:
        """Epochs with an odd number are shorter."""
        length = BATCHES - 2 * (self.epoch % 2)
        order = np.random.default_rng(self.epoch).permutation(length)
        return (numbers(self.epoch)[int(index)] for index in order)


class OneIsKept:
    """The program keeps a loader for all epochs, and makes another one in each epoch."""

    def __init__(self) -> None:
        self.kept = shuffled([1000, 1001, 1002])

    def __call__(self, epoch: int) -> list[Any]:
        return [self.kept, lambda: iter(numbers(epoch)[3:])]


class TenAreKept:
    """The program reads ten loaders in each epoch."""

    def __init__(self) -> None:
        self.kept = [shuffled([1000 + 2 * number, 1001 + 2 * number]) for number in range(10)]

    def __call__(self, epoch: int) -> list[Any]:
        return self.kept


KINDS: dict[str, Callable[[], Callable[[int], list[Any]]]] = {
    "list": lambda: lambda epoch: [numbers(epoch)],
    "function": lambda: lambda epoch: [lambda: iter(numbers(epoch))],
    "drawn": lambda: lambda epoch: [lambda: drawn(epoch)],
    "stream": lambda: lambda epoch: [lambda: DataLoader(Stream(epoch), batch_size=None)],
    "DataLoader": lambda: lambda epoch: [shuffled(numbers(epoch))],
    "two": lambda: (
        lambda epoch: [
            shuffled(numbers(epoch)[:3]),
            lambda: iter(numbers(epoch)[3:]),
        ]
    ),
    "one kept": OneIsKept,
    "late bound": LateBound,
}
"""Name -> makes a program's data: epoch -> the loaders that it reads one after another."""


class Broken(Exception):
    """Ends a process in the middle of an epoch."""


Place = tuple[int, int]
"""Epoch, and number of the batch in all loaders of the epoch."""


def plain_run(framework: str, kind: Any, bad: Iterable[Place]) -> Any:
    """The run without healcore in which the bad batches are left out."""
    torch.manual_seed(0)
    loop, data = loop_of(framework), kind()
    for epoch in range(EPOCHS):
        index = 0
        for loader in data(epoch):
            batches: Any = loader() if callable(loader) else loader
            for number in batches:
                if (epoch, index) not in bad:
                    loop.step(None, number)
                index += 1
    return loop


def healed_run(
    framework: str,
    kind: Any,
    store: Any,
    bad: Iterable[Place],
    ends_at: Place | None = None,
    end: Callable[[], None] = die,
) -> tuple[Any, int]:
    """A healed run, which may end early. Returns the loop and the number of rollbacks."""
    torch.manual_seed(0)
    loop, data = loop_of(framework, None, POLICY), kind()
    with Healer(POLICY, state=loop.state, store=store, checkpoints=EVERY_30) as healer:
        for epoch in healer.epochs(EPOCHS):
            first = 0
            for loader in data(epoch):
                for number in healer.batches(loader, epoch=epoch):
                    assert healer.epoch == epoch
                    place = (epoch, first + healer.batch_index)
                    if place == ends_at:
                        end()
                    loop.faults = Faults(always=[int(number)] if place in bad else [])
                    loop.step(healer, number)
                first += 3 if len(data(epoch)) == 2 else 2
        loop.state = healer.state
        return loop, healer.rollbacks


def breaks() -> None:
    raise Broken


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_rollbacks_over_epochs_repeat_the_data_of_each_epoch(kind, tmp_path):
    """The second rollback leads over epochs that the first one has repeated."""
    bad = [(9, 4), (10, 1), (11, 0)]
    loop, rollbacks = healed_run("torch", kind, tmp_path, bad)
    assert rollbacks == 3
    assert same(loop.weights(), plain_run("torch", kind, bad).weights())


@BOTH_FRAMEWORKS
def test_a_rollback_in_a_late_epoch_leads_to_the_first_one(framework, tmp_path):
    """No loader of epoch 0 is known any more; the passes of the late epoch end."""
    kind, bad = KINDS["function"], [(10, 3)]
    only_first = Checkpoints(every=1000)
    loop, data = loop_of(framework, Faults(always=[73]), POLICY), kind()
    yielded = []
    with Healer(POLICY, state=loop.state, store=tmp_path, checkpoints=only_first) as healer:
        for epoch in healer.epochs(EPOCHS):
            yielded.append(epoch)
            for number in healer.batches(data(epoch)[0], epoch=epoch):
                loop.step(healer, number)
        assert healer.rollbacks == 1
        loop.state = healer.state
    assert yielded == [*range(11), *range(EPOCHS)]
    assert same(loop.weights(), plain_run(framework, kind, bad).weights())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("end", [die, breaks])
def test_a_restart_in_a_late_epoch_continues_at_its_place(kind, end, tmp_path):
    """Once at the first batch of the second loader, and once in an epoch that is repeated."""
    bad = [(9, 4), (10, 1)]
    for place in [(8, 3), (10, 0), (10, 3)]:

        def run(place: Place = place) -> None:
            healed_run("torch", kind, tmp_path, bad, place, end)

        if end is die:
            os.waitpid(forked(run), 0)
        else:
            with suppress(Broken):
                run()
    loop, _ = healed_run("torch", kind, tmp_path, bad)
    assert same(loop.weights(), plain_run("torch", kind, bad).weights())


def test_ten_loaders_in_each_epoch_are_rewound_and_resumed(tmp_path):
    bad = [(10, 3)]
    with suppress(Broken):
        healed_run("torch", TenAreKept, tmp_path, bad, (5, 3), breaks)
    loop, rollbacks = healed_run("torch", TenAreKept, tmp_path, bad)
    assert rollbacks == 1
    assert same(loop.weights(), plain_run("torch", TenAreKept, bad).weights())


def test_many_loaders_that_are_read_together_resume_at_the_same_batch(tmp_path):
    """None of them has trained before the first step, and none is forgotten."""

    def loaders() -> list[Any]:
        return [[10 * number + index for index in range(6)] for number in range(12)]

    def run(end: int | None) -> list[tuple[Any, ...]]:
        loop, used, every_2 = loop_of("torch"), [], Checkpoints(every=2)
        with Healer(POLICY, state=loop.state, store=tmp_path, checkpoints=every_2) as healer:
            read = [healer.batches(each, name=str(n)) for n, each in enumerate(loaders())]
            for batch in zip(*read, strict=True):
                used.append(batch)
                loop.step(healer, batch[0])
                if len(used) == end:
                    raise Broken
        return used

    with suppress(Broken):
        run(4)
    again = run(None)
    assert len(again) < 6
    assert again == [*zip(*loaders(), strict=True)][-len(again) :]
