"""The diagnosis for every cause and ending: findings, attempted actions, and where to look."""

from __future__ import annotations

import math
from typing import Any

import pytest

from healcore.core.evidence import Evidence
from healcore.core.step_record import Readings
from healcore.core.verdict import Cause
from healcore.events.models import Ending
from healcore.runtime.incidents.rollback import Rollback
from healcore.runtime.postmortem.diagnosis import RunEnd, advice, explain


def applied(step: int, onset: int, target: int, **fields: Any) -> Rollback:
    return Rollback(index=step, step=step, onset=onset, target=target, **fields)


STOPPED = RunEnd(
    ending="stopped",
    step=4121,
    why="the budget of 2 recoveries is spent",
    cause=Cause.NONFINITE_GRAD | Cause.LOSS_SPIKE,
    onset=4093,
    open=True,
    incidents=4,
    readings=Readings(2.31, 14.2, 1.27, 55.0, 3.0),
    evidence=(Evidence("layers.3.weight", math.nan), Evidence("layers.1.weight", 12.5)),
    batches=((0, 412), (0, 413)),
    skips=1,
    rollbacks=(
        applied(4011, 4000, 3900, lr=1e-3, lr_limit=5e-4, lr_scale=0.5, skipped=12),
        applied(4021, 4010, 3800, skipped=1),
    ),
    lr_scale=0.25,
    damaged=(3950,),
    last_good=3800,
    last_good_path="checkpoints/step-0000003800.0a1b2c3d",
)

WHOLE = """\
healcore stopped the run at step 4121: the budget of 2 recoveries is spent.
Seen: nonfinite_grad, loss_spike from step 4093 on. At the first alarm: loss 2.31, last finite
  gradient norm 14.2 (limit 1.27). Gradients that stood out: layers.3.weight (nan),
  layers.1.weight (12.5). Its data: epoch 0 batch 412, epoch 0 batch 413. The run had 4
  incidents.
Tried: skipped 1 step; rolled back from step 4011 to 3900 with the learning rate at most 0.0005
  (the schedule had come to 0.001) and skipped 12 batches; rolled back from step 4021 to 3800
  and skipped 1 batch; the learning rate is at 0.25 of its schedule.
Storage: checkpoints found damaged: 3950. Check the disk.
Look at:
"""


def test_the_whole_of_it():
    text = explain(STOPPED)
    assert text.startswith(WHOLE)
    hints = text.removeprefix(WHOLE)
    assert hints.count("  - ") == len(advice(STOPPED.cause, rollbacks=2)) == 3
    assert hints.endswith(
        "\nLast known-good: the checkpoint of step 3800, in checkpoints/step-0000003800.0a1b2c3d."
    )
    assert max(map(len, text.splitlines())) <= 96


@pytest.mark.parametrize("ending", Ending)
def test_the_least_that_can_be_known(ending):
    text = explain(RunEnd(ending, 7))
    assert "step 7" in text.splitlines()[0]
    assert "Last known-good: none" in text
    assert "Seen" not in text
    assert "Tried" not in text


def test_an_ending_that_is_none():
    with pytest.raises(ValueError, match="one of completed, stopped"):
        explain(RunEnd("finished", 1))


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_has_its_advice(cause):
    (hint,) = advice(cause)
    text = explain(RunEnd("stopped", 7, cause=cause, onset=3))
    assert f"Seen: {cause.name.lower()} from step 3 on." in text
    assert " ".join(hint.split()[:5]) in text
    others = [advice(other)[0] for other in Cause if other != cause]
    assert hint not in others


def test_a_completed_run_gets_no_lecture():
    text = explain(STOPPED._replace(ending="completed", open=False, why=""))
    assert text.startswith("The run is complete at step 4121.\n")
    assert ", resolved by the end" in text
    assert "Look at" not in text
    none = explain(RunEnd("completed", 40, probation=100))
    assert "resume" not in none
    assert "after 100 healthy steps (rollback.probation), and the run has had 40" in " ".join(
        none.split()
    )
    assert 'rollback={"probation": 20}' in none
    stopped = explain(RunEnd("stopped", 400, incidents=1, probation=100))
    assert "resume from the start" in stopped
    assert "the run has had" not in stopped


@pytest.mark.parametrize("ending", ["exception", "killed", "stopped", "signal"])
def test_the_newest_checkpoint_is_not_doubted_without_an_incident(ending):
    """A start takes it anyway."""
    text = " ".join(explain(RunEnd(ending, 400, probation=100)).split())
    assert "no incident: the next start resumes from the newest checkpoint on disk, if any." in text
    assert "resume from the start" not in text
    assert "from the newest" not in explain(RunEnd(ending, 9, not_finite=((5, ("model.w",)),)))


def test_what_a_rollback_has_undone_is_said():
    text = explain(STOPPED._replace(skips=5, undone_skips=3, undone_incidents=2))
    assert "skipped 5 steps (3 undone by a rollback)" in text
    assert "The run had 4 incidents (2 undone by a rollback)" in " ".join(text.split())


def test_observing_tries_nothing():
    text = explain(STOPPED._replace(observes=True))
    assert "Tried: nothing: the policy only observes." in text
    assert "rolled back" not in text


def test_long_lists_are_cut():
    many = STOPPED._replace(
        evidence=tuple(Evidence(f"w{i}", 1.0) for i in range(40)),
        batches=tuple((0, i) for i in range(40)),
        rollbacks=tuple(applied(i, i, i) for i in range(40)),
    )
    text = explain(many)
    assert "and 35 more" in text
    assert "35 earlier rollbacks" in text
    assert text.count("rolled back") == 5


def test_an_exception_is_quoted():
    text = explain(RunEnd("exception", 7, exception="ValueError: shapes differ", last_good=5))
    assert text.startswith("The training loop raised an exception at step 7: ValueError: shapes")


LIMITED = "learning rate at most 0.001 (the schedule had come to 0.004)"


@pytest.mark.parametrize(
    ("lr", "limit", "scale", "text"),
    [
        (0.004, None, 1.0, ""),  # no cut
        (0.004, 0.005, 1.0, ""),  # the limit of an earlier one, which the schedule is below
        (0.004, 0.001, 1.0, LIMITED),  # does not bind at the checkpoint
        (0.004, 0.001, 0.25, LIMITED),
        (None, None, 0.25, "learning rate × 0.25"),  # the schedule is not known
    ],
)
def test_only_rates_that_a_step_can_have_are_named(lr, limit, scale, text):
    rollback = applied(340, 338, 200, lr=lr, lr_limit=limit, lr_scale=scale)
    assert rollback.lr_text == text
    text_of_end = explain(RunEnd("stopped", 340, rollbacks=(rollback,)))
    assert "rolled back from step 340 to 200" in text_of_end
    assert ("learning rate" in text_of_end) is bool(text)
    assert text in " ".join(text_of_end.split())


def test_an_exception_adds_what_it_means():
    end = RunEnd("exception", 7, exception="OSError: [Errno 5] input/output error")
    assert "Look at" not in explain(end)
    assert "The data could not be read" in explain(end._replace(fault=Cause.DATA))
