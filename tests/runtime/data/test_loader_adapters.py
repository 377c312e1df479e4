"""Rewinding from any place to any other gives the same batches under the same names."""

from __future__ import annotations

import pickle

from healcore.runtime.data import Cursor
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
    places = range(last, -1, -1) if "worker" not in kind.name else (last, 6, 4, 0)
    for place in places:
        assert cursor.rewind(positions[place])
        assert take(cursor) == handed[place:]


@over(REWINDING)
def test_a_later_process_goes_on(kind):
    _, handed, positions = gone_through(kind)
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
