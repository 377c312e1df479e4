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


def test_the_whole_of_it():
    text = explain(STOPPED)
    assert text.startswith("healcore stopped the run at step 4121: the budget")
    flat = " ".join(text.split())
    for part in ("from step 4093 on", "loss 2.31", "layers.3.weight (nan)", "epoch 0 batch 412"):
        assert part in flat
    for part in ("skipped 1 step", "step 4011 to 3900", "learning rate at most 0.0005", "3950"):
        assert part in flat
    assert text.count("  - ") == len(advice(STOPPED.cause, rollbacks=2)) == 3
    assert text.endswith("checkpoints/step-0000003800.0a1b2c3d.")
    assert max(map(len, text.splitlines())) <= 96


@pytest.mark.parametrize("ending", Ending)
def test_the_least_that_can_be_known(ending):
    text = explain(RunEnd(ending, 7))
    assert "step 7" in text.splitlines()[0]
    assert "Last known-good: none" in text
    assert "Seen" not in text
    assert "Tried" not in text


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


def test_observing_tries_nothing():
    text = explain(STOPPED._replace(observes=True))
    assert "Tried: nothing: the policy only observes." in text
    assert "rolled back" not in text


def test_an_exception_adds_what_it_means():
    end = RunEnd("exception", 7, exception="OSError: [Errno 5] input/output error")
    assert "Look at" not in explain(end)
    assert "The data could not be read" in explain(end._replace(fault=Cause.DATA))
