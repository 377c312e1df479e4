"""The cursor against the plainest model of it, under random walks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healcore.runtime.data import BatchId, Cursor
from tests.runtime.data.loaders import BATCHES, REWINDING, Kind, over, take

EPOCHS = 3
STEPS = st.one_of(
    st.tuples(st.just("next"), st.integers(1, 5)),
    st.tuples(st.just("mark"), st.none()),
    st.tuples(st.just("rewind"), st.integers(0, 9)),
    st.tuples(
        st.just("leave out"),
        st.lists(st.tuples(st.integers(0, EPOCHS), st.integers(0, BATCHES + 2)), max_size=3),
    ),
    st.tuples(st.just("skipped"), st.none()),
)


class Model:
    """The list of all batches and the index of the next one."""

    def __init__(self, row: list[Any]) -> None:
        self.row = row
        self.at = 0
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
            position, at = marks[value % len(marks)]
            assert cursor.rewind(position)
            model.at = at
        elif step == "leave out":
            cursor.leave_out(BatchId(*pair) for pair in value)
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
    random_walks(kind, 20 if kind.needs == "grain" else 100, 40)  # Grain starts threads
