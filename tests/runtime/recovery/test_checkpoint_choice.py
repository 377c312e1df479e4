"""The choice of the checkpoint to return to: pure functions, cases made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healcore.runtime.checkpoints.manager import healthy_steps
from healcore.runtime.recovery.checkpoint_choice import (
    CheckpointChoice,
    choose,
    common_to_ranks,
)
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
        assert healthy_steps(step, now, unhealthy) == expected


def test_ranks_that_disagree_take_the_newest_common_step():
    first = [saved(100), saved(200), saved(300)]
    second = [saved(100), saved(200, "candidate"), saved(400)]
    assert [(s.step, s.status) for s in common_to_ranks([first, second])] == [
        (100, "good"),
        (200, "candidate"),
    ]
    assert choose(common_to_ranks([first, second]), onset=500).order == (100,)
    third = [saved(100, finite=False), saved(200)]
    assert not common_to_ranks([first, third])[0].finite
    assert common_to_ranks([first, []]) == []
    assert common_to_ranks([]) == []
    assert common_to_ranks([first, second]) == common_to_ranks([first, second, second])


# -- several ranks ---------------------------------------------------------------------------------

one_rank = st.dictionaries(
    st.integers(0, 12).map(lambda n: 10 * n),
    st.tuples(st.sampled_from(["good", "candidate", "abandoned"]), st.booleans()),
).map(lambda found: [saved(step, *of) for step, of in sorted(found.items())])  # type: ignore[arg-type]


@given(st.lists(one_rank, min_size=1, max_size=4), st.integers(0, 130), st.randoms())
def test_ranks_choose_a_step_that_every_one_of_them_can_restore(
    ranks: list[list[Saved]], onset: int, random: Any
):
    """Whatever each has lost; the newest one, and the same whichever rank asks."""
    common = common_to_ranks(ranks)
    shuffled = random.sample(ranks, len(ranks))
    assert [s[:3] for s in common_to_ranks(shuffled)] == [s[:3] for s in common]

    def good(save: Saved) -> bool:
        return save.status == "good" and save.finite and save.step <= onset

    on_all = set.intersection(*({s.step for s in saves if good(s)} for saves in ranks))
    try:
        order = choose(common, onset=onset).order
    except NoGoodCheckpoint:
        assert not on_all
    else:
        assert order == tuple(sorted(on_all, reverse=True))
