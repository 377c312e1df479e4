"""`EpochLoop` and `LoaderNumbers`: when a loop returns, and which number a new loader gets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from healcore.runtime.data.earlier_loaders import EarlierLoaders
from healcore.runtime.data.epoch_loop import MODEL_CHANGED, EpochLoop
from healcore.runtime.data.loader_numbers import LoaderNumbers
from healcore.runtime.data.run_loader import RunLoader


def loader_of(batches: Iterable[int]) -> RunLoader:
    """A loader with the number 0."""
    return RunLoader(0, batches, None, set(), None, retries=None, inform=None, first_epoch=0)


def loop_in(epoch: int) -> EpochLoop:
    """A loop over `Healer.epochs` in the body of an epoch."""
    loop = EpochLoop()
    loop.total_epochs = 4
    loop.begin(epoch)
    return loop


def saved(loader: RunLoader, epoch: int) -> dict[str, Any]:
    """The positions of a checkpoint that has this loader at its start."""
    return {"0": loader.start, "count": 1, "epoch": epoch}


@pytest.mark.parametrize(
    ("epoch", "batches", "returns"),
    [
        (1, iter(range(3)), True),  # an earlier epoch, also of a stream without a length
        (2, [0, 1, 2], True),  # an earlier batch of the pass, of a loader with a length
        (2, iter(range(3)), False),  # a stream without a length just continues
    ],
)
def test_a_loop_returns_where_its_program_would_count_too_many_batches(epoch, batches, returns):
    trained = loader_of(batches)
    assert loop_in(2).returns_with(saved(trained, epoch), trained) is returns


def test_a_loop_that_names_its_epochs_returns_to_an_earlier_pass_of_the_epoch():
    loop, trained = loop_in(2), loader_of(iter(range(3)))
    loop.names_epochs = True
    assert loop.returns_with({"count": 0, "epoch": 2}, trained)  # before this loader


def test_only_a_loop_over_healer_epochs_returns():
    trained = loader_of([0, 1, 2])
    assert not EpochLoop().returns_with(saved(trained, 0), trained)


def test_a_return_ends_after_the_body_and_its_positions_after_the_epoch():
    loop = loop_in(2)
    position = saved(loader_of([0, 1, 2]), 1)
    loop.begin_return(position)
    assert loop.returns_to == 1
    assert loop.end_return() == 1
    loop.begin(1)
    assert (loop.returns_to, loop.returned) == (None, position)
    loop.begin(2)
    assert loop.returned == {}


def test_a_loop_does_not_return_to_before_a_change_of_the_model():
    loop = loop_in(2)
    loop.changed_in = 1
    assert loop.return_obstacle({"epoch": 1}) == MODEL_CHANGED
    assert loop.return_obstacle({"epoch": 2}) is None


def test_the_loaders_of_a_repeated_epoch_get_their_numbers_again_in_order():
    loop = loop_in(0)
    numbers = LoaderNumbers(EarlierLoaders(), loop)
    numbers.begin_epoch(0)
    for number in (0, 1):
        assert numbers.of_new(None) == number
        numbers.use(number, None)
    assert numbers.begun_in(0) == [0, 1]
    numbers.begin_epoch(0)  # the loop has returned to its epoch
    for number in (0, 1):
        assert numbers.of_new(None) == number
        numbers.use(number, None)
    assert numbers.of_new(None) == 2  # a third loader is new
