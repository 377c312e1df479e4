"""Streams without a position, which a function makes again after a rollback and a restart."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, IterableDataset

from healcore import Checkpoints, Healer
from tests.healer.run_directory import events
from tests.healer.training_loops import (
    BOTH_FRAMEWORKS,
    Faults,
    breaks_off,
    loop_of,
    rules,
    same,
    train,
)

COUNT, BAD = 30, 18
POLICY = rules(cut=False)


def endless(seed: int = 0) -> Iterator[int]:
    """An infinite stream with a seed of its own."""
    random = np.random.default_rng(seed)
    while True:
        yield int(random.integers(1000))


def doubled(numbers: list[int]) -> Iterator[int]:
    return (2 * number for number in numbers)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(COUNT))


MAKERS: dict[str, Any] = {
    "generator": lambda: (number for number in range(COUNT)),
    "zip": lambda: (a for a, _ in zip(range(COUNT), range(COUNT), strict=True)),
    "stream": lambda: DataLoader(Stream(), batch_size=None),
    "infinite": lambda: (n for n, _ in zip(endless(), range(COUNT), strict=False)),
}


@pytest.mark.slow
@BOTH_FRAMEWORKS
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_rollback_and_a_kill_lose_no_step(make, framework, tmp_path):
    numbers = [int(n) for n in make()]
    bad = numbers[BAD]
    plain = loop_of(framework)
    for number in map(int, make()):  # to begin a DataLoader draws a number
        if number != bad:
            plain.step(None, number)
    loop = loop_of(framework, Faults(always=[bad]), POLICY)
    result = train(loop, POLICY, make)
    assert result.rollbacks == 1
    assert result.step == COUNT - 1
    assert same(loop.weights(), plain.weights())
    killed = loop_of(framework, Faults(always=[bad]), POLICY)
    breaks_off(killed, POLICY, make, at=numbers[25], store=tmp_path)
    resumed = loop_of(framework, Faults(always=[bad]), POLICY)
    train(resumed, POLICY, make, store=tmp_path)
    assert same(resumed.weights(), plain.weights())


def test_the_function_can_ask_for_the_epoch(tmp_path):
    """Its order differs from epoch to epoch, also where a rollback leads into an earlier epoch."""
    loop = loop_of("torch", Faults(always=[102]))
    used = []
    with Healer(POLICY, state=loop.state, checkpoints=Checkpoints(every=5)) as healer:

        def make() -> Iterator[int]:
            order = np.random.default_rng(healer.epoch).permutation(8)
            return (100 * healer.epoch + int(number) for number in order)

        for number in healer.batches(make, epochs=3):
            used.append(number)
            loop.step(healer, number)
        assert healer.rollbacks == 1
    whole = [100 * e + int(n) for e in range(3) for n in np.random.default_rng(e).permutation(8)]
    after = used[used.index(102) + 1 :]
    again = next(i for i, each in enumerate(after) if each < 100)
    first = whole.index(after[again])
    assert after[again:] == [each for each in whole[first:] if each != 102]


def test_a_function_that_returns_the_same_iterator_goes_on_forward(tmp_path):
    stream = iter(range(COUNT))
    loop = loop_of("torch", Faults(always=[BAD]))
    result = train(loop, POLICY, lambda: stream, store=tmp_path)
    assert result.rollbacks == 1
    (rollback,) = events(tmp_path, "rollback")
    assert "has to make a new one at each call" in rollback["outcome"]
    assert loop.faults.order == list(range(COUNT))


def test_a_function_with_arguments_is_refused():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'numbers'"):
        train(loop_of("torch"), POLICY, doubled)  # type: ignore[arg-type]
