"""The diagnosis for every cause and ending: findings, attempted actions, and where to look."""

from __future__ import annotations

from typing import Any

import pytest

from healcore.core.verdict import Cause
from healcore.events.models import Ending
from healcore.runtime.postmortem.diagnosis import RunEnd, advice, explain
from tests.history.test_run import run_of

ALARM = {
    "incident": 4,
    "skip": True,
    "cause": ["NONFINITE_GRAD", "LOSS_SPIKE"],
    "readings": {"loss": 2.31, "grad_norm": 14.2, "threshold": 1.27, "z": 55.0, "z_loss": 3.0},
    "evidence": [{"name": "layers.3.weight", "grad_norm": "nan"}],
    "batches": [[0, 412], [0, 413]],
}


def end_of(ending: str, step: int, *happened: Any, **fields: Any) -> RunEnd:
    run = run_of(*happened)
    return RunEnd(run, ending, step, run.counts(), **fields)


WITH_A_CAUSE = ("incident", 3, {"incident": 1, "onset": 3, "cause": ["LOSS_SPIKE"]})
STOPPED = end_of(
    "stopped",
    4121,
    ("rollback", 4011, {"onset": 4000, "checkpoint": 3900, "lr": 1e-3, "lr_limit": 5e-4}),
    ("rollback", 4021, {"onset": 4010, "checkpoint": 3800, "batches": [[0, 1]]}),
    ("damaged", 3950, {"problem": "a flipped bit"}),
    ("incident", 4093, {"incident": 4, "onset": 4093, "cause": ["LOSS_SPIKE"]}),
    ("alarm", 4093, ALARM),
    why="the budget of 2 recoveries is spent",
    open=True,
    lr_scale=0.25,
    last_good=3800,
    last_good_path="checkpoints/step-0000003800.0a1b2c3d",
)


def test_the_whole_of_it():
    text = explain(STOPPED)
    assert text.startswith("healcore stopped the run at step 4121: the budget")
    flat = " ".join(text.split())
    for part in (
        "from step 4093 on", "loss 2.31", "layers.3.weight (nan)", "epoch 0 batch 412",
        "skipped 1 step", "a flipped bit", "3950", "learning rate at most 0.0005",
        "step 4011 back to the checkpoint of step 3900",
    ):  # fmt: skip
        assert part in flat
    assert text.count("  - ") == len(advice(STOPPED.cause, rollbacks=2)) == 3
    assert text.endswith("checkpoints/step-0000003800.0a1b2c3d.")
    assert max(map(len, text.splitlines())) <= 96


@pytest.mark.parametrize("ending", Ending)
def test_the_least_that_can_be_known(ending):
    text = explain(end_of(ending, 7))
    assert "step 7" in text.splitlines()[0]
    assert "Last known-good: none" in text
    assert "Seen" not in text
    assert "Tried" not in text


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_has_its_advice(cause):
    (hint,) = advice(cause)
    began = ("incident", 3, {"incident": 1, "onset": 3, "cause": [cause.name]})
    text = explain(end_of("stopped", 7, began))
    assert f"Seen: {cause.name.lower()} from step 3 on." in text
    assert " ".join(hint.split()[:5]) in text
    others = [advice(other)[0] for other in Cause if other != cause]
    assert hint not in others


def test_a_completed_run_gets_no_lecture():
    text = explain(STOPPED._replace(ending="completed", open=False, why=""))
    assert text.startswith("The run is complete at step 4121.\n")
    assert ", resolved by the end" in text
    assert "Look at" not in text
    none = explain(end_of("completed", 40, probation=100))
    assert "resume" not in none
    assert "after 100 healthy steps (rollback.probation), and the run has had 40" in " ".join(
        none.split()
    )
    assert 'rollback={"probation": 20}' in none
    stopped = explain(end_of("stopped", 400, WITH_A_CAUSE, probation=100))
    assert "resume from the start" in stopped
    assert "the run has had" not in stopped


def test_an_exception_adds_what_it_means():
    end = end_of("exception", 7, exception="OSError: [Errno 5] input/output error")
    assert "Look at" not in explain(end)
    assert "The data could not be read" in explain(end._replace(fault=Cause.DATA))


def test_a_loss_that_never_moved_may_have_other_reasons_than_its_end():
    (hint,) = advice(Cause.PLATEAU)
    assert all(word in hint for word in ("initialisation", "data", "learning rate", "beta"))
