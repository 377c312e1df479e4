"""Several epochs: within the cursor, in a loop outside, and samplers with `set_epoch`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from healcore.runtime.data import Cursor, EmptyLoader, UnusableLoader
from tests.runtime.data.loaders import BATCHES, EXAMPLES, SIZE, generator, take


def distributed(sampler_type: Any = DistributedSampler, loader_type: Any = DataLoader) -> Any:
    sampler = sampler_type(EXAMPLES, num_replicas=1, rank=0)
    return loader_type(EXAMPLES, batch_size=SIZE, sampler=sampler)


def by_hand(numbers):
    """The epochs as a loop without healcore has them."""
    loader, handed = distributed(), []
    for number in numbers:
        loader.sampler.set_epoch(number)
        handed.append([batch.tolist() for batch in loader])
    return handed


def by_epoch(handed):
    epochs = sorted({which.epoch for which, _ in handed})
    return [[batch for which, batch in handed if which.epoch == epoch] for epoch in epochs]


PLAIN: Any = (DistributedSampler, DataLoader)
STATEFUL: Any = (StatefulDistributedSampler, StatefulDataLoader)


@pytest.mark.parametrize(("types", "by_cursor"), [(PLAIN, True), (PLAIN, False), (STATEFUL, False)])
def test_a_rewind_into_an_earlier_epoch_sets_its_number(by_cursor, types):
    """Of the cursor's epochs, or of a loop outside that sets numbers of its own."""
    loader = distributed(*types)
    cursor = Cursor(loader, epochs=None if by_cursor else 1)
    handed, positions = [], []
    for number in (7, 3, 4):
        if not by_cursor:
            loader.sampler.set_epoch(number)
            if number != 7:
                cursor.extend()
        for _ in range(BATCHES):
            positions.append(cursor.position())
            handed += take(cursor, 1)
    assert by_epoch(handed) == by_hand([0, 1, 2] if by_cursor else [7, 3, 4])

    for place in (11, 6, 2):
        assert cursor.rewind(positions[place])
        assert take(cursor, 12 - place) == handed[place:]
    resumed = Cursor(distributed(*types), epochs=3)
    assert resumed.rewind(positions[6])
    assert take(resumed) == handed[6:]


def test_a_loop_outside_after_a_resume():
    """Its first rounds give nothing, until it has come to where the run was."""
    before = Cursor(generator(), epochs=3)
    take(before, 2 * BATCHES + 1)
    position, rest = before.position(), take(before)

    cursor, rounds = Cursor(generator()), []
    assert cursor.rewind(position)
    for round_ in range(4):
        if round_:
            cursor.extend()
        rounds.append(take(cursor))
    assert rounds[:3] == [[], [], rest]
    assert len(rounds[3]) == BATCHES


@pytest.mark.parametrize("epochs", [1, 3, None])
@pytest.mark.parametrize("empty", [[], {}, torch.empty(0, 2), DataLoader([], batch_size=2)])  # type: ignore[arg-type]
def test_an_empty_loader(empty, epochs):
    with pytest.raises(EmptyLoader, match="gave no batch in epoch 0: is the dataset empty"):
        Cursor(empty, epochs=epochs).next()


def test_an_iterator_has_one_epoch():
    for epochs in (1, None):
        assert len(take(Cursor(iter([1, 2]), epochs=epochs))) == 2
    cursor = Cursor(iter([1, 2]))
    take(cursor)
    cursor.extend()  # as a plain loop: nothing more comes
    assert take(cursor) == []
    with pytest.raises(UnusableLoader, match="is an iterator and has one epoch, not 2"):
        Cursor(iter([1, 2]), epochs=2)
