"""Loaders that cannot be rewound: the reason, and how a later process reads up to the place."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler

from healcore.console import counted
from healcore.runtime.data import BatchId, Cursor, DataError
from tests.runtime.data.loaders import (
    BATCHES,
    FORWARD,
    REWINDING,
    Shuffled,
    Squares,
    Stream,
    accelerated,
    over,
    plain,
    stateful,
    take,
)


@over(FORWARD)
def test_a_rewind_is_refused_and_moves_nothing(kind):
    cursor = Cursor(kind.make(), epochs=kind.epochs)
    start = cursor.position()
    handed = take(cursor, 1)
    assert not cursor.can_rewind
    assert cursor.why_not
    assert not cursor.rewind(start)
    handed += take(cursor)
    assert handed == take(Cursor(kind.make(), epochs=kind.epochs))
    assert not cursor.rewind(start)
    assert take(cursor) == []


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: DataLoader(Stream()), "StatefulDataLoader"),
        (lambda: accelerated(dispatch_batches=True), "dispatch_batches=False"),
        (lambda: accelerated(Stream(), dispatch_batches=False), "map-style dataset"),
        (lambda: stateful(sampler=RandomSampler(range(11))), "does not record the order"),
        (lambda: stateful(num_workers=2, in_order=False), "no fixed order"),
    ],
)
def test_why_not_names_what_to_pass(make, reason):
    assert reason in (Cursor(make()).why_not or "")


@over([*FORWARD, *REWINDING])
def test_fast_forward(kind):
    """Also to the position of another kind of loader, and not over those left out by then."""
    everything = take(Cursor(kind.make(), epochs=kind.epochs))
    earlier = Cursor(range(len(everything) // kind.epochs), epochs=kind.epochs)
    last = everything[-1][0]
    take(earlier, len(everything) - 1)

    cursor = Cursor(kind.make(), epochs=kind.epochs)
    cursor.leave_out([last])
    done = cursor.fast_forward(earlier.position())
    assert f"read {counted(last.index, 'batch', 'batches')} and dropped them" in done
    assert take(cursor) == []
    assert cursor.skipped() == [last]


def test_fast_forward_behind_or_beyond():
    longer = Cursor(range(9), epochs=3)
    take(longer, 9 + 6)
    target, cursor = longer.position(), Cursor(plain(), epochs=3)
    assert "epoch 1 has fewer than 6 batches" in cursor.fast_forward(target)
    assert take(cursor, 1)[0][0] == BatchId(2, 0)
    assert "not ahead: nothing was dropped" in cursor.fast_forward(target)
    assert take(cursor, 1)[0][0] == BatchId(2, 1)
    with pytest.raises(DataError, match="a position is a result"):
        cursor.fast_forward({"epoch": 1})


def test_positions_of_another_kind_of_loader_are_refused():
    elsewhere = Cursor(Shuffled())
    take(elsewhere, 2)
    cursor = Cursor(stateful())
    assert not cursor.rewind(elsewhere.position())
    assert cursor.can_rewind
    assert "the run has another loader now" in (cursor.why_not or "")
    assert cursor.rewind(cursor.position())
    assert cursor.why_not is None
    assert len(take(cursor)) == BATCHES


class OwnGenerator(Sampler):
    """Draws from a generator that nobody can find."""

    drawing = (torch.Generator().manual_seed(1),)

    def __iter__(self):
        return iter(torch.randperm(11, generator=self.drawing[0]).tolist())

    def __len__(self) -> int:
        return 11


def test_an_order_that_is_not_drawn_again():
    cursor = Cursor(DataLoader(Squares(), batch_size=3, sampler=OwnGenerator()))
    take(cursor, 2)
    position = cursor.position()
    rest = take(cursor, 1)
    assert not cursor.rewind(position)
    assert "generator" in (cursor.why_not or "")
    assert rest[0][0] == BatchId(0, 2)
