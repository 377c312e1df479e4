"""The facts about a killed run that its events give."""

from __future__ import annotations

from typing import Any

from healcore.core.verdict import Cause
from healcore.events.log import Event, History
from healcore.history import runs_of
from healcore.runtime.postmortem.diagnosis import RunEnd
from healcore.runtime.postmortem.postmortem import end_of_killed

ALARM: dict[str, Any] = {
    "incident": 1,
    "cause": ["LOSS_SPIKE"],
    "readings": {"loss": 2.0, "grad_norm": "inf", "threshold": 1.0, "z": 3.0, "z_loss": 4.0},
    "skip": True,
}


def history(*happened: tuple[str, int | None, dict[str, Any]], run: str = "a") -> list[Event]:
    return [
        {"schema": 1, "seq": seq, "run": run, "kind": kind, "step": step, **fields}
        for seq, (kind, step, fields) in enumerate(happened)
    ]


def killed(*processes: list[Event]) -> RunEnd:
    """The facts about the last of the processes."""
    history = History([event for events in processes for event in events], [])
    return end_of_killed(runs_of(history.runs())[-1])


START = ("start", None, {"mode": "heal", "store": "there"})


def test_a_run_in_which_nothing_happened():
    end = killed(history(START))
    assert (end.ending, end.step, end.cause, end.incidents) == ("killed", 0, Cause(0), 0)
    assert (end.last_good, end.readings, end.rollbacks, end.lr_scale) == (None, None, (), 1.0)


def test_an_older_incident_is_not_reported_for_a_newer_one():
    evidence = [{"name": "old", "grad_norm": 1.0}]
    end = killed(
        history(
            START,
            ("incident", 5, {"incident": 1, "onset": 4, "cause": ["OVERFIT"]}),
            ("alarm", 5, {**ALARM, "evidence": evidence, "batches": [[0, 5]]}),
            ("incident", 90, {"incident": 2, "onset": 89, "cause": ["LOSS_SPIKE"]}),
            ("alarm", 90, {**ALARM, "incident": 2}),
            ("rollback", 91, {"checkpoint": 80, "outcome": "done", "batches": [[1, 1]]}),
        )
    )
    assert (end.cause, end.onset, end.incidents) == (Cause.LOSS_SPIKE, 89, 2)
    assert (end.evidence, end.batches) == ((), ())
    assert end.readings is not None
    assert end.readings.grad_norm == float("inf")
    assert end.skips == 2


def test_a_trial_is_no_attempt():
    back = {"checkpoint": 80, "lr_scale": 0.5}
    end = killed(
        history(
            START,
            ("rollback", 91, {**back, "outcome": "trial"}),
            ("verdict", 92, {"outcome": "reproducible"}),
            ("rollback", 95, {**back, "outcome": "done"}),
        )
    )
    assert [each.step for each in end.rollbacks] == [95]
    assert (end.verdict, end.lr_scale) == ("reproducible", 0.5)


def test_the_last_good_checkpoint_is_of_the_last_store():
    resumed = ("start", None, {"mode": "heal", "store": "there", "resumes": True})
    other = ("start", None, {"mode": "heal", "store": "elsewhere", "resumes": True})
    first = history(START, ("good", 300, {}), ("good", 400, {}))
    same = history(resumed, ("damaged", 400, {"problem": "a bit"}), run="b")
    assert killed(first, same).last_good == 300
    assert killed(first, same).damaged == (400,)
    assert killed(first, history(other, run="b")).last_good is None
    assert killed(first, history(other, ("good", 20, {}), run="b")).last_good == 20


def test_counts_are_of_the_whole_run_and_the_step_is_of_the_last_process():
    resumed = ("start", None, {"mode": "heal", "store": "there", "resumes": True})
    one = history(START, ("alarm", 5, ALARM), ("save", 6, {}))
    two = history(resumed, ("alarm", 8, ALARM), ("save", 9, {}), run="b")
    assert (killed(one, two).skips, killed(one, two).step) == (2, 9)
    new = history(START, ("save", 4, {}), run="b")
    assert (killed(one, new).skips, killed(one, new).step) == (0, 4)
