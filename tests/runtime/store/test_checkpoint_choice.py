"""To which checkpoints a rollback may go, in the order in which they are tried."""

from typing import Any

import pytest

from healcore.runtime.store.checkpoints import CheckpointInfo, NoGoodCheckpoint, choose_checkpoints


def saved(step: int, status: Any = "good", *, finite: bool = True) -> CheckpointInfo:
    """A checkpoint in memory. If it is not finite, its array `w` has NaN or Inf."""
    return CheckpointInfo(
        step=step,
        status=status,
        bytes=1,
        created=0.0,
        attempt=1,
        path=None,
        nonfinite=() if finite else ("w",),
    )


SNAPSHOT = saved(0, "candidate")
GOOD = [SNAPSHOT, saved(100), saved(200), saved(300), saved(400, "candidate")]
# The run went back to 300 for the same trouble, and 340 became good on the way back into it.
GOOD_AGAIN = [*GOOD, saved(340)]


@pytest.mark.parametrize(
    ("saves", "facts", "chosen"),
    [
        pytest.param(GOOD, {"onset": 350}, (300, 200, 100), id="good, not a candidate"),
        pytest.param(GOOD, {"onset": 300}, (300, 200, 100), id="saved before the step of onset"),
        pytest.param(GOOD, {"onset": 299, "depth": 0}, (200, 100), id="depth 0 is depth 1"),
        pytest.param(GOOD, {"onset": 350, "depth": 2}, (200, 100), id="one deeper"),
        pytest.param(GOOD, {"onset": 350, "depth": 9}, (100,), id="as deep as possible"),
        pytest.param(GOOD, {"onset": 360, "tried": [300]}, (200, 100), id="older than a tried one"),
        pytest.param(
            GOOD_AGAIN, {"onset": 345, "tried": [300]}, (200, 100), id="good again, not restored"
        ),
        pytest.param(
            GOOD_AGAIN, {"onset": 345, "tried": [300], "depth": 4}, (100,), id="good again, deeper"
        ),
        pytest.param(GOOD, {"onset": 160, "tried": [100]}, (100,), id="none older: the same again"),
        pytest.param(
            GOOD, {"onset": 160, "tried": [100], "initial": [0]}, (0,), id="the first snapshot"
        ),
        pytest.param(
            GOOD, {"onset": 160, "tried": [100, 0], "initial": [0]}, (0,), id="the snapshot again"
        ),
        pytest.param(
            GOOD, {"onset": 350, "initial": [0]}, (300, 200, 100, 0), id="the snapshot comes last"
        ),
        pytest.param([SNAPSHOT], {"onset": 5, "initial": [0]}, (0,), id="only the snapshot"),
        pytest.param(
            [saved(0), saved(100, "abandoned"), saved(200, finite=False)],
            {"onset": 300, "initial": [100]},
            (0,),
            id="neither abandoned nor NaN",
        ),
    ],
)
def test_good_checkpoints_before_the_onset_are_tried_from_the_newest_on(saves, facts, chosen):
    assert choose_checkpoints(saves, **facts) == chosen


@pytest.mark.parametrize(
    ("saves", "initial"),
    [
        pytest.param([SNAPSHOT], [], id="candidate"),
        pytest.param([saved(0, "abandoned")], [0], id="abandoned"),
        pytest.param([saved(0, "candidate", finite=False)], [0], id="not finite"),
        pytest.param([], [0], id="no checkpoint"),
    ],
)
def test_without_a_checkpoint_that_can_be_restored_there_is_no_rollback(saves, initial):
    with pytest.raises(NoGoodCheckpoint, match="onset at step 5"):
        choose_checkpoints(saves, onset=5, initial=initial)
