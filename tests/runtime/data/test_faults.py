"""Loaders that raise, report wrong positions, or break."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from healcore.runtime.data import BatchId, Cursor
from tests.runtime.data.loaders import SIZE, Squares, take


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_comes_through_with_the_name_of_its_batch(workers):
    loader = DataLoader(Squares(bad=4), batch_size=SIZE, num_workers=workers)
    cursor = Cursor(loader)
    take(cursor, 1)
    with pytest.raises(OSError, match="example 4 is not there") as caught:
        cursor.next()
    assert "batch 1 of epoch 0 (rows 3, 4, 5)" in caught.value.__notes__[0]
    # Torch's loaders go on behind it: the names still fit.
    assert take(cursor, 1) == [(BatchId(0, 2), [36, 49, 64])]
    cursor = Cursor(loader)
    cursor.leave_out([BatchId(0, 1)])
    assert [which.index for which, _ in take(cursor)] == [0, 2, 3]
    assert cursor.skipped() == [BatchId(0, 1)]


def dying():
    """Two batches, then an exception, which is the end of a generator."""
    yield from (1, 2)
    raise OSError("gone")


def test_the_end_of_a_generator_by_an_exception_is_not_that_of_the_data():
    cursor = Cursor(dying())
    take(cursor, 2)
    with pytest.raises(OSError, match="gone") as first:
        cursor.next()
    assert cursor.unreadable == BatchId(0, 2)
    with pytest.raises(OSError, match="gone") as again:
        cursor.next()
    assert again.value is first.value
    left_out = Cursor(dying())
    left_out.leave_out([BatchId(0, 2)])
    take(left_out, 2)
    with pytest.raises(OSError, match="gone"):
        left_out.next()


def test_fast_forward_over_a_batch_that_cannot_be_read():
    first = Cursor(DataLoader(Squares(bad=4), batch_size=SIZE))
    take(first, 1)
    with pytest.raises(OSError, match="example 4"):
        first.next()
    again = Cursor(DataLoader(Squares(bad=4), batch_size=SIZE))
    again.fast_forward(first.position())
    assert take(again, 1) == [(BatchId(0, 2), [36, 49, 64])]


class Numbers:
    """A stateful loader that fails on demand."""

    def __init__(self, count: int = 6) -> None:
        self.count, self.at = count, 0
        self.fails_at: int | None = None
        self.state_fails = False

    def __iter__(self):
        while self.at < self.count:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        if self.state_fails:
            raise NotImplementedError("no state in this mode")
        return {"at": self.at, "count": self.count}

    def load_state_dict(self, state):
        self.at = state["at"]
        if self.fails_at in (self.at, -1):
            raise KeyError("shard_7")


def test_a_state_that_cannot_be_taken():
    loader = Numbers()
    loader.state_fails = True
    cursor = Cursor(loader)
    take(cursor, 2)
    position = cursor.position()
    assert not cursor.can_rewind
    assert "NotImplementedError: no state in this mode" in (cursor.why_not or "")
    assert [batch for _, batch in take(cursor)] == [2, 3, 4, 5]
    later = Cursor(Numbers())
    assert not later.rewind(position)
    assert "read 2 batches" in later.fast_forward(position)
    assert [batch for _, batch in take(later)] == [2, 3, 4, 5]


def test_a_position_that_the_loader_does_not_take():
    loader = Numbers()
    cursor = Cursor(loader, epochs=2)
    take(cursor, 1)
    position = cursor.position()
    take(cursor, 3)
    loader.fails_at = 1
    assert not cursor.rewind(position)
    assert "does not accept the position: KeyError: 'shard_7'" in (cursor.why_not or "")
    assert take(cursor, 3) == [((0, 4), 4), ((0, 5), 5), ((1, 0), 0)]


@pytest.mark.parametrize(
    "position",
    [
        None,
        {"version": 99},
        Cursor([1]).position() | {"epoch": -1},
        Cursor([1]).position() | {"index": "2"},
        Cursor([1]).position() | {"state": b"garbage"},
        Cursor([1]).position() | {"behind": None},
    ],
)
def test_a_value_that_is_no_position(position):
    cursor = Cursor([1, 2, 3])
    take(cursor, 1)
    assert not cursor.rewind(position)
    assert "position" in (cursor.why_not or "") or "batch id" in (cursor.why_not or "")
    assert [batch for _, batch in take(cursor)] == [2, 3]
