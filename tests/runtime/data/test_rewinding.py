"""Rewinding from any place to any other gives the same batches under the same names."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healcore.runtime.data import BatchId, Cursor
from tests.runtime.data.loaders import BATCHES, REWINDING, Kind, Squares, fabric, over, take


def gone_through(kind: Kind) -> tuple[Cursor, list, list]:
    """A cursor at the end, the batches, and the position in front of each and behind the last."""
    cursor = Cursor(kind.make(), epochs=kind.epochs)
    positions, handed = [cursor.position()], []
    while batch := take(cursor, 1):
        handed += batch
        positions.append(cursor.position())
    return cursor, handed, positions


@over(REWINDING)
def test_from_the_end_to_every_position_and_in_a_later_process(kind):
    cursor, handed, positions = gone_through(kind)
    assert cursor.why_not is None
    last = len(positions) - 1
    # With a worker a rewind starts a process: then only the ends and the middle of an epoch.
    for place in range(last, -1, -1) if "worker" not in kind.name else (last, 6, 4, 0):
        assert cursor.rewind(positions[place])
        assert take(cursor) == handed[place:]
    places = (0, 2, len(handed) // 2, len(handed) - 1)
    for place in places if "worker" not in kind.name else places[2:3]:
        resumed = Cursor(kind.make(), epochs=kind.epochs)
        assert resumed.rewind(pickle.loads(pickle.dumps(positions[place])))
        rest = handed[place:]
        if kind.name == "user's iterator":  # its loader counts the passes of this process
            rest = [batch for batch in rest if batch[0].epoch == rest[0][0].epoch]
        assert take(resumed, len(rest)) == rest


@over([kind for kind in REWINDING if kind.epochs == 3])
def test_between_two_epochs(kind):
    """After the StopIteration of `next`, where a loop outside is."""
    cursor = Cursor(kind.make(), epochs=1)
    first = take(cursor)
    between = cursor.position()
    cursor.extend()
    second = take(cursor)
    assert [which.epoch for which, _ in first + second] == [0] * 4 + [1] * 4
    assert cursor.rewind(between)
    assert take(cursor, 2) == second[:2]
    assert cursor.rewind(between)
    assert take(cursor) == second
    if kind.name != "user's iterator":  # its loader counts the passes of this process
        resumed = Cursor(kind.make(), epochs=2)
        assert resumed.rewind(between)
        assert take(resumed) == second


def test_fabric_counts_the_epochs_and_a_bad_batch_does_not_end_the_loader():
    make = next(kind.make for kind in REWINDING if kind.name == "fabric distributed")
    alone, cursor = make(), Cursor(make())
    handed = take(cursor)
    for _ in range(EPOCHS - 1):
        cursor.extend()
        handed += take(cursor)
    assert [batch for _, batch in handed] == [b.tolist() for _ in range(EPOCHS) for b in alone]
    bad = Cursor(fabric(Squares(bad=4)))
    bad.next()
    with pytest.raises(OSError, match="example 4"):
        bad.next()
    assert bad.next()[1] == BatchId(0, 2)


# -- random walks, against the list of all batches ------------------------------------------------

EPOCHS = 3
IDS = st.tuples(st.integers(0, EPOCHS), st.integers(0, BATCHES + 2))
STEPS = st.one_of(
    st.tuples(st.just("next"), st.integers(1, 5)),
    st.tuples(st.just("mark"), st.none()),
    st.tuples(st.just("rewind"), st.integers(0, 9)),
    st.tuples(st.just("leave out"), st.lists(IDS, max_size=3)),
    st.tuples(st.just("skipped"), st.none()),
)


class Model:
    """The list of all batches and the index of the next one."""

    def __init__(self, row: list[Any]) -> None:
        self.row, self.at = row, 0
        self.left_out: set[BatchId] = set()
        self.skipped: list[BatchId] = []

    def next(self) -> list[Any]:
        while self.at < len(self.row):
            self.at += 1
            which = self.row[self.at - 1][0]
            if which not in self.left_out:
                return [self.row[self.at - 1]]
            self.skipped.append(which)
        return []


def walk(kind: Kind, row: list[Any], steps: list[tuple[str, Any]]) -> None:
    cursor, model = Cursor(kind.make(), epochs=EPOCHS), Model(row)
    marks = [(cursor.position(), model.at)]
    for step, value in steps:
        if step == "next":
            for _ in range(value):
                assert take(cursor, 1) == model.next()
        elif step == "mark":
            marks.append((cursor.position(), model.at))
        elif step == "rewind":
            position, model.at = marks[value % len(marks)]
            assert cursor.rewind(position)
        elif step == "leave out":
            cursor.leave_out(value)
            model.left_out |= {BatchId(*pair) for pair in value}
        else:
            assert cursor.skipped() == model.skipped
            model.skipped = []
    assert take(cursor) == [batch for batch in iter(model.next, []) for batch in batch]
    assert cursor.skipped() == model.skipped


def random_walks(kind: Kind, count: int, length: int) -> None:
    row = take(Cursor(kind.make(), epochs=EPOCHS))
    assert len(row) == EPOCHS * BATCHES

    @settings(max_examples=count)
    @given(st.lists(STEPS, max_size=length))
    def walks(steps):
        walk(kind, row, steps)

    walks()


@over([k for k in REWINDING if k.name in ("list", "stateful generator", "user's iterator")])
def test_random_walks(kind):
    random_walks(kind, 60, 25)


@pytest.mark.stress
@over([kind for kind in REWINDING if kind.epochs == EPOCHS])
def test_random_walks_over_every_loader(kind):
    random_walks(kind, 20 if kind.name.startswith("grain") else 100, 40)  # Grain starts threads
