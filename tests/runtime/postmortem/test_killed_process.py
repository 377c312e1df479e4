"""The facts about a killed run that its events give."""

from __future__ import annotations

from typing import Any

from healcore.core.verdict import Cause
from healcore.events.log import Event
from healcore.runtime.postmortem.diagnosis import RunEnd
from healcore.runtime.postmortem.postmortem import end_of_killed, last_process

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


def killed(events: list[Event], before: list[Event] = []) -> RunEnd:  # noqa: B006 -- not changed
    run = last_process(events)
    assert run is not None
    return end_of_killed(run, [*before, *events])


def ours(events: list[Event]) -> tuple[str, int | None, int | None] | None:
    """Id, first event and last step of the process that began last."""
    run = last_process(events)
    if run is None:
        return None
    process = run.processes[0]
    assert process.start is not None
    return process.id, process.start.seq, run.last_step


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
    other = ("start", None, {"mode": "heal", "store": "elsewhere"})
    first = history(START, ("good", 300, {}), ("good", 400, {}))
    same = history(START, ("damaged", 400, {"problem": "a bit"}), run="b")
    assert killed(same, first).last_good == 300
    assert killed(same, first).damaged == (400,)
    assert killed(history(other, run="b"), first).last_good is None
    assert killed(history(other, ("good", 20, {}), run="b"), first).last_good == 20


def test_only_the_process_that_began_last_is_read():
    one = history(START, ("save", 5, {}))
    two = history(START, ("save", 9, {}), run="b")
    assert ours(one + two) == ("b", 0, 9)
    assert ours(two + one) == ("a", 0, 5)
    assert ours([one[0], two[0], one[1], two[1]]) == ("b", 0, 9), "two at once"
    assert ours(one[1:]) is None


def test_a_run_id_that_is_used_again_begins_at_its_last_start():
    again = history(START, ("save", 5, {}), START, ("save", 7, {}))
    assert ours(again) == ("a", 2, 7)
    rollback = ("rollback", 4, {"checkpoint": 2, "outcome": "done"})
    assert killed(history(START, rollback, START)).rollbacks == ()
