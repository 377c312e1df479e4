"""The choice of the checkpoint to return to: pure functions, cases made by hand."""

from __future__ import annotations

import pytest

from healcore.runtime.incidents.ledger import Ledger
from healcore.runtime.recovery.orders import CheckpointChoice, choose
from healcore.runtime.store import NoGoodCheckpoint, Saved, Status


def saved(step: int, status: Status = "good", finite: bool = True) -> Saved:
    return Saved(step, status, finite, 1, 0.0, 1, None)


GOOD = [saved(0, "candidate"), saved(100), saved(200), saved(300), saved(400, "candidate")]


@pytest.mark.parametrize(
    ("onset", "depth", "order"),
    [
        (350, 1, (300, 200, 100)),
        (300, 1, (300, 200, 100)),  # saved before the step of the onset was taken
        (299, 1, (200, 100)),
        (1000, 1, (300, 200, 100)),  # a candidate is not known-good
        (350, 2, (200, 100)),
        (350, 3, (100,)),
        (350, 9, (100,)),  # as deep as it goes
        (350, 0, (300, 200, 100)),
    ],
)
def test_depth(onset, depth, order):
    assert choose(GOOD, onset=onset, depth=depth) == CheckpointChoice(order, False, False)


def test_the_second_rollback_for_the_same_trouble_restores_an_older_checkpoint():
    assert choose(GOOD, onset=360, tried=[300]).order == (200, 100)
    # What became good on the way back into the same trouble is not gone back to.
    later = [*GOOD, saved(340)]
    assert choose(later, onset=345, tried=[300], depth=1).order == (200, 100)
    assert choose(later, onset=345, tried=[300], depth=3).order == (200, 100)
    assert choose(later, onset=345, tried=[300], depth=4).order == (100,)


def test_a_missing_deeper_checkpoint_is_reported():
    found = choose(GOOD, onset=160, tried=[100])
    assert found == CheckpointChoice((100,), initial=False, repeated=True)
    found = choose(GOOD, onset=160, tried=[100], initial=[0])
    assert found == CheckpointChoice((0,), initial=True, repeated=False)
    found = choose(GOOD, onset=160, tried=[100, 0], initial=[0])
    assert found == CheckpointChoice((0,), initial=True, repeated=True)


def test_the_initial_snapshot_is_the_last_resort():
    assert choose(GOOD, onset=350, initial=[0]).order == (300, 200, 100, 0)
    assert choose(GOOD[:1], onset=5, initial=[0]) == CheckpointChoice((0,), True, False)
    with pytest.raises(NoGoodCheckpoint, match=r"onset at step 5.*there: 0 \(candidate\)"):
        choose(GOOD[:1], onset=5)
    with pytest.raises(NoGoodCheckpoint):
        choose([saved(0, "abandoned")], onset=5, initial=[0])
    with pytest.raises(NoGoodCheckpoint, match="not finite"):
        choose([saved(0, "candidate", finite=False)], onset=5, initial=[0])
    with pytest.raises(NoGoodCheckpoint, match="there: none"):
        choose([], onset=5, initial=[0])


def test_never_one_that_is_not_finite_or_abandoned():
    bad = [saved(0), saved(100, "abandoned"), saved(200, "good", finite=False)]
    assert choose(bad, onset=300, initial=[100]).order == (0,)


def test_healthy_steps_need_not_follow_without_a_gap():
    for unhealthy, step, now, expected in (
        ([], 10, 25, 15),
        ([9], 10, 30, 20),
        ([20], 20, 30, 9),  # the step right after the save of step 20
        ([*range(10, 21)], 10, 30, 9),
        ([30, 31], 20, 30, 10),  # not yet judged
    ):
        assert Ledger(unhealthy=unhealthy).healthy_steps(step, now) == expected
