"""The position of each named source, and the passes of several loaders under one name."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from healcore import Checkpoints, DataError, Healer
from tests.healer.run_directory import events, new_process
from tests.healer.training_loops import Faults, loop_of, same, with_answers

POLICY = with_answers()


class Broken(Exception):
    """Ends a process in the middle of its loop."""


def shuffled(*numbers: int, seed: int | None = None) -> Any:
    """A new order in each pass, drawn from the global generator or from one of its own."""
    generator = None
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
    data: Any = list(numbers)
    return DataLoader(data, batch_size=None, shuffle=True, generator=generator)


Program = Callable[[Healer[Any]], Iterator[int]]
"""Yields the numbers of the batches that it trains on."""


def start(program: Program, store: Path, *, stop: int = -1) -> tuple[Any, list[int]]:
    """Trains until step `stop`, where the process ends. Returns the loop and its batches.

    Batch 99 is bad.
    """
    new_process()
    torch.manual_seed(0)
    loop = loop_of("torch", Faults(once=[99]), POLICY)
    read: list[int] = []
    options: Any = {"store": store, "checkpoints": Checkpoints(every=4)}
    with suppress(Broken), Healer(POLICY, state=loop.state, **options) as healer:
        for number in program(healer):
            if len(read) == stop:
                raise Broken
            read.append(int(number))
            loop.step(healer, number)
    return loop, read


def two_phases(healer: Healer[Any]) -> Iterator[int]:
    """Each phase has a loader and an evaluation of its own."""
    for first in (0, 10):
        for _ in range(2):
            yield from healer.batches(shuffled(*range(first, first + 5)))
            assert list(healer.batches([7, 8, 9])) == [7, 8, 9]


def epochs_and_a_phase(healer: Healer[Any]) -> Iterator[int]:
    """A loop over epochs, and then a phase without it."""
    assert list(healer.batches([1, 2])) == [1, 2]
    loader = shuffled(*range(5))
    for epoch in healer.epochs(3):
        yield from healer.batches(loader, epoch=epoch)
        assert list(healer.batches([7, 8, 9])) == [7, 8, 9]
    yield from healer.batches(shuffled(*range(10, 15)))


def named_turns(healer: Healer[Any]) -> Iterator[int]:
    """Two loaders with generators of their own take turns under their names."""
    first, second = shuffled(*range(4), seed=1), shuffled(*range(10, 14), seed=2)
    for epoch in healer.epochs(3):
        yield from healer.batches(first, epoch=epoch, name="first")
        yield from healer.batches(second, epoch=epoch, name="second")


def pairs(healer: Healer[Any]) -> Iterator[int]:
    """Each step reads two loaders."""
    first, second = shuffled(*range(9), seed=1), shuffled(*range(10, 19), seed=2)
    read = healer.batches(first, epochs=2), healer.batches(second, epochs=2, name="second")
    for left, right in zip(*read, strict=True):
        assert right >= 10
        yield left


def own_numbers(healer: Healer[Any]) -> Iterator[int]:
    """The program numbers its epochs, and reads two loaders in each."""
    for epoch in range(3):
        yield from healer.batches(shuffled(*range(5)), epoch=epoch)
        yield from healer.batches(shuffled(*range(10, 13)), epoch=epoch)


PROGRAMS = [two_phases, epochs_and_a_phase, named_turns, pairs, own_numbers]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("stop", [3, 10, pytest.param(5, marks=pytest.mark.slow), 13])
def test_a_run_that_is_started_again_is_the_one_without_an_end(program, stop, tmp_path):
    whole, read = start(program, tmp_path / "whole")
    _, before = start(program, tmp_path / "run", stop=stop)
    again, rest = start(program, tmp_path / "run")
    assert before == read[:stop]
    assert rest == read[stop:]
    assert same(again.weights(), whole.weights())


def test_a_rollback_moves_named_loaders_that_take_turns(tmp_path):
    """It leads from the last pass of the second loader into an earlier pass of the first one."""
    _, read = start(named_turns, tmp_path / "whole")
    bad = len(read) - 3

    def program(healer: Healer[Any]) -> Iterator[int]:
        for at, number in enumerate(named_turns(healer)):
            yield 99 if at == bad else number

    _, order = start(program, tmp_path / "run")
    (rollback,) = events(tmp_path / "run", "rollback")
    assert "steps_lost" not in rollback
    again = [each for at, each in enumerate(read) if rollback["checkpoint"] <= at != bad]
    assert order[-len(again) :] == again


def test_a_second_loader_at_the_same_time_needs_a_name(tmp_path):
    def zipped(healer: Healer[Any]) -> Iterator[int]:
        for number, _ in zip(healer.batches([1, 2, 3]), healer.batches([4, 5, 6]), strict=True):
            yield number

    with pytest.raises(DataError, match=r"a loop over list has not ended.*batches\(loader, name="):
        start(zipped, tmp_path / "zip")

    def evaluates(healer: Healer[Any]) -> Iterator[int]:
        for number in healer.batches([1, 2, 3]):
            yield number
            list(healer.batches([4, 5, 6]))

    with pytest.raises(DataError, match="and another loop begins"):
        start(evaluates, tmp_path / "evaluation")
