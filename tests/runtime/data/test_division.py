"""A position of another number of ranks: the same global batch, or an error that says why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from healcore import Cursor
from healcore.runtime.data.loader_adapters import DataError, position_of_other_ranks

ROWS = 96


def loaders(kind: type, ranks: int, batch_size: int) -> list:
    """One of each rank, over the same rows, shuffled."""
    data: Any = list(range(ROWS))
    samplers = [DistributedSampler(data, ranks, rank, seed=7) for rank in range(ranks)]
    return [kind(data, batch_size=batch_size, sampler=each) for each in samplers]


def global_batches(cursors: list[Cursor]) -> list[set[int]]:
    """The rows of all ranks, batch by batch, to the end of the second epoch."""
    found = []
    while True:
        try:
            batches = [cursor.next()[0] for cursor in cursors]
        except StopIteration:
            return found
        found.append({int(row) for batch in batches for row in torch.as_tensor(batch)})


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize(("before", "now"), [((4, 2), (2, 4)), ((2, 4), (4, 2)), ((2, 4), (1, 8))])
@pytest.mark.parametrize("read", [0, 5, 12, 15])
def test_the_same_global_batches_with_another_number_of_ranks(kind, before, now, read):
    cursors = [Cursor(each, epochs=2) for each in loaders(kind, *before)]
    for _ in range(read):
        _ = [cursor.next() for cursor in cursors]
    position = position_of_other_ranks(cursors[0].position(), before[0])
    expected = global_batches(cursors)
    assert len(expected) == 24 - read
    others = [Cursor(each, epochs=2) for each in loaders(kind, *now)]
    for cursor in others:
        if not cursor.rewind(position):
            cursor.fast_forward(position)
    assert global_batches(others) == expected


@pytest.mark.parametrize(
    ("before", "now", "why"),
    [
        (range(10), range(5), r"the loader had 10 batches, and range has 5 batches"),
        (iter(range(10)), iter(range(10)), "how the loader divided the data"),
        (
            loaders(DataLoader, 2, 4)[0],
            loaders(DataLoader, 4, 4)[0],
            "the loader had 8 rows of a global batch, and .* has 16 rows of a global batch",
        ),
        (loaders(DataLoader, 2, 4)[0], iter(range(10)), "has an unknown number"),
    ],
)
def test_another_division_is_refused(before, now, why):
    cursor = Cursor(before)
    cursor.next()
    position = position_of_other_ranks(cursor.position(), 2)
    other = Cursor(now)
    assert not other.rewind(position)
    with pytest.raises(DataError, match=why) as error:
        other.fast_forward(position)
    assert "saved by 2 ranks" in str(error.value)
    assert "Start the run with 2 ranks" in str(error.value)
    assert other.next()[1] == (0, 0), "nothing was read"
