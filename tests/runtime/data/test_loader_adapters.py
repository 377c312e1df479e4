"""Rewinding from any place to any other gives the same batches under the same names."""

from __future__ import annotations

import pickle

import pytest

from healcore.runtime.data import BatchId, Cursor
from healcore.runtime.data.loader_adapters import adapter_for
from healcore.runtime.store import structure
from tests.runtime.data.loaders import REWINDING, Kind, over, take


def gone_through(kind: Kind) -> tuple[Cursor, list, list]:
    """A cursor at the end, the batches, and the position in front of each and behind the last."""
    cursor = Cursor(kind.make(), epochs=kind.epochs)
    positions, handed = [cursor.position()], []
    while batch := take(cursor, 1):
        handed += batch
        positions.append(cursor.position())
    return cursor, handed, positions


@over(REWINDING)
def test_from_the_end_to_every_position(kind):
    cursor, handed, positions = gone_through(kind)
    assert cursor.can_rewind
    assert cursor.why_not is None
    last = len(positions) - 1
    # With a worker a rewind starts a process: then only the ends and the middle of an epoch.
    places = range(last, -1, -1) if kind.name != "stateful worker" else (last, 6, 4, 0)
    for place in places:
        assert cursor.rewind(positions[place])
        assert take(cursor) == handed[place:]


@over(REWINDING)
def test_names_count_batches_by_epoch(kind):
    _, handed, positions = gone_through(kind)
    per_epoch = len(handed) // kind.epochs
    assert [which for which, _ in handed] == [
        BatchId(epoch, index) for epoch in range(kind.epochs) for index in range(per_epoch)
    ]
    assert len(positions) == len(handed) + 1


@over(REWINDING)
def test_a_later_process_goes_on(kind):
    _, handed, positions = gone_through(kind)
    places = (0, 2, len(handed) // 2, len(handed) - 1)
    for place in places if kind.name != "stateful worker" else places[2:3]:
        resumed = Cursor(kind.make(), epochs=kind.epochs)
        assert resumed.rewind(pickle.loads(pickle.dumps(positions[place])))
        rest = handed[place:]
        if kind.name == "user's iterator":  # its loader counts the passes of this process
            rest = [batch for batch in rest if batch[0].epoch == rest[0][0].epoch]
        assert take(resumed, len(rest)) == rest


@over([kind for kind in REWINDING if kind.name != "stateful worker"])
def test_a_position_is_a_copy_and_can_be_used_again(kind):
    cursor = Cursor(kind.make(), epochs=kind.epochs)
    take(cursor, 1)
    position = cursor.position()
    before = pickle.dumps(position)
    rest = take(cursor, 3)
    for _ in range(2):
        assert cursor.rewind(position)
        assert take(cursor, 3) == rest
    assert pickle.dumps(position) == before


@over(REWINDING)
def test_every_checkpoint_can_hold_a_position(kind):
    cursor = Cursor(kind.make(), epochs=kind.epochs)
    take(cursor, 2)
    cursor.leave_out([BatchId(0, 3)])
    position = cursor.position()
    # Without what only torch's or only JAX's store knows.
    node = structure.encode(position, (), lambda path, value: None)
    assert structure.decode(node, lambda tag, content: pytest.fail(tag)) == position


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


@over([kind for kind in REWINDING if kind.name in ("list", "stateful shuffled")])
def test_batches_left_out_stay_left_out(kind):
    cursor = Cursor(kind.make(), epochs=2)
    start = cursor.position()
    take(cursor, 2)
    cursor.leave_out([BatchId(0, 1), BatchId(0, 3), BatchId(1, 0)])
    position, rest = cursor.position(), take(cursor)
    assert [which for which, _ in rest] == [(0, 2), (1, 1), (1, 2), (1, 3)]
    assert cursor.skipped() == [(0, 3), (1, 0)]
    # Back in front of all of them: the earlier position knew of none.
    assert cursor.rewind(start)
    assert take(cursor)[1:] == rest
    assert cursor.skipped() == [(0, 1), (0, 3), (1, 0)]
    resumed = Cursor(kind.make(), epochs=2)
    assert resumed.rewind(position)
    assert take(resumed) == rest


@over([kind for kind in REWINDING if kind.name == "stateful shuffled"])
def test_epochs_differ_where_the_loader_shuffles(kind):
    """Otherwise the tests above would not test the order."""
    _, handed, _ = gone_through(kind)
    orders = {str([batch for which, batch in handed if which.epoch == epoch]) for epoch in range(3)}
    assert len(orders) == 3


def test_an_item_whose_reading_is_interrupted_comes_again():
    """Ctrl-C while a batch is read: nobody has received it."""

    class Interrupted(list):
        at = 3

        def __getitem__(self, index):
            if index == self.at:
                self.at = -1
                raise KeyboardInterrupt
            return super().__getitem__(index)

    adapter = adapter_for(Interrupted(range(6)))
    batches = adapter.start()
    assert [next(batches) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert adapter.state() == 3
    assert list(batches) == [3, 4, 5]
