"""A run is read from its events: incidents, attempts, counts, how it ended; thinned curves."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healcore.events.log import Event
from healcore.events.models import Ending
from healcore.history import Mode, RunHistory, runs_of
from healcore.history.curves import read_metrics, thin
from healcore.runtime.reporting.diagnosis import STATES, faults_found
from healcore.tools.report.page_report import response_text

START = ("start", 0, {"mode": "heal", "store": "there", "host": "h", "pid": 1})
NAN = {"cause": ["NONFINITE_LOSS"], "skip": True, "incident": 1}
BACK = {"onset": 4, "checkpoint": 2, "outcome": "rewound", "lr_scale_before": 1.0, "lr_scale": 0.5}


def events(*happened: tuple[str, int | None, dict[str, Any]], run: str = "a") -> list[Event]:
    return [
        {"schema": 1, "seq": seq, "run": run, "kind": kind, "step": step, **fields}
        for seq, (kind, step, fields) in enumerate(happened)
    ]


def run_of(*happened: tuple[str, int | None, dict[str, Any]]) -> RunHistory:
    (run,) = runs_of({"a": events(START, *happened)})
    return run


def test_an_incident_has_its_rollback():
    alarm = {**NAN, "evidence": [{"name": "w", "grad_norm": "nan"}]}
    left_out = {**BACK, "batches": [[0, 4], [0, 5]]}
    rollback, saved = ("rollback", 6, left_out), ("save", 3, {})
    run = run_of(("alarm", 4, alarm), ("alarm", 5, alarm), rollback, saved)
    (case,) = run.incidents
    assert (case.number, case.onset_step, case.step, case.skipped) == (1, 4.0, 5.0, 2)
    assert (case.rolled_back, case.mode) == (True, Mode.HEAL)
    assert case.skipped_batches == ((0, 4), (0, 5))
    assert case.lr_path == (1.0, 0.5)
    assert [each.name for each in case.first.evidence or ()] == ["w"]
    assert [each.kind for each in case.responses] == ["rollback"]
    assert run.attempts == [(0, "start", None, 0, False), (2, "rollback", 6, 2, False)]
    assert (run.step, len(run.of("rollback")), run.counts().skips) == (3, 1, 2)


def test_known_good_checkpoints_that_a_rollback_has_abandoned_are_forgotten():
    good = [("good", step, {}) for step in (2, 4)]
    assert run_of(*good).good == [2, 4]
    assert run_of(*good, ("rollback", 6, BACK)).good == [2]
    other_store = {**START[2], "store": "elsewhere"}
    assert run_of(*good, ("start", 0, other_store)).good == []


def test_a_declined_order_is_shown_as_declined():
    alarm = {**NAN, "action": ["ROLLBACK", "STOP"]}
    declined = {"onset": 4, "cause": ["NONFINITE_LOSS"], "verdict": "unknown", "by": "nothing"}
    run = run_of(("alarm", 4, alarm), *[("assessment", 7, declined)] * 2)
    (case,) = run.incidents
    assert not case.rolled_back
    assert (case.action, run.counts().rollbacks, run.of("rollback")) == (
        ("ROLLBACK", "STOP"),
        0,
        [],
    )
    assert [each.kind for each in case.responses] == ["assessment"]
    assert response_text(case) == (
        "skipped 1 step; declined: no evidence that the current weights are worse; "
        "training continued"
    )


def test_a_rollback_without_an_incident_has_no_number():
    """The Healer rolls back to better weights without an incident, or a hook orders it."""
    back = ("rollback", 7, {**BACK, "onset": 3})
    run = run_of(("alarm", 4, NAN), back, ("alarm", 9, {**NAN, "incident": 2}))
    assert [case.number for case in run.incidents] == [1, 0, 2]
    assert [case.rolled_back for case in run.incidents] == [False, True, False]
    counts = run.counts()
    assert (counts.incidents, counts.rollbacks) == (2, 1)


@pytest.mark.parametrize(
    ("first", "together"),
    [
        pytest.param(("resume", 3, {"checkpoint": 3}), True, id="resumed"),
        pytest.param(("start", 3, {"resumes": True}), True, id="start that resumes"),
        pytest.param(("start", 0, {"resumes": False}), False, id="new start"),
        pytest.param(("save", 3, {}), False, id="killed before it resumed"),
    ],
)
def test_which_processes_are_one_run(first, together):
    """Also a process that was killed before it could log that it resumed."""
    two = {"a": events(START, ("save", 3, {})), "b": events(first, ("save", 4, {}), run="b")}
    runs = runs_of(two)
    assert len(runs) == (1 if together else 2)
    assert [each.id for each in runs[-1].processes] == (["a", "b"] if together else ["b"])


COMPLETED = ("end", 9, {"ending": "completed"})
RESUMED = ("resume", 9, {"checkpoint": 9})


def run_of_processes(*happened: list[Any]) -> RunHistory:
    ids = "abcdefgh"[: len(happened)]
    of = [events(START, *each, run=run) for run, each in zip(ids, happened, strict=True)]
    (run,) = runs_of(dict(zip(ids, of, strict=True)))
    return run


def test_what_a_kill_has_lost_counts_once():
    """The run counts what its checkpoint knows: a restart repeats the steps after the save."""
    skipped = ("alarm", 7, {**NAN, "incident": 2})
    first = [("alarm", 4, NAN), ("save", 6, {}), skipped]
    resume = ("resume", 6, {"checkpoint": 6})
    run = run_of_processes(first, [resume, skipped])
    assert [each.number for each in run.incidents] == [1, 2]
    assert run.attempts[1] == (6, "resume", 8, 0, True)
    assert run.counts().skips == 2
    assert run.counts().incidents == 2
    assert [event.step for event in faults_found(run)] == [4, 7]
    # A rollback has saved its counts with the restored checkpoint, so a restart keeps them.
    back = ("rollback", 8, {**BACK, "checkpoint": 6, "onset": 7})
    run = run_of_processes([*first, back], [resume, skipped])
    assert [each.number for each in run.incidents] == [1, 2, 2]
    assert run.counts().skips == 3


def test_how_a_run_ended():
    for ending, state in (("completed", "completed"), ("requested", "requested"), ("?", "ended")):
        assert run_of(("end", 9, {"ending": ending})).state is Ending(state)
    assert run_of(("save", 9, {})).state is Ending.UNKNOWN
    assert set(STATES) == set(Ending), "each has a text"


def test_fields_that_are_not_in_their_shape_are_left_out_and_named():
    wrong = {"checkpoint": "two", "lr_scale": None, "cause": ["OF_A_NEWER_ONE"], "colour": 1}
    run = run_of(("rollback", 6, {**BACK, **wrong}), ("alarm", -1, {"cause": 3}))
    assert [(event.kind, fields) for event, fields in run.malformed] == [
        ("rollback", ["checkpoint", "lr_scale"]),
        ("alarm", ["step", "cause"]),
    ]
    assert run.of("rollback") == []


@settings(max_examples=60)
@given(
    length=st.integers(1, 40_000),
    limit=st.integers(20, 400),
    places=st.lists(st.tuples(st.integers(0, 39_999), st.sampled_from("^v?!")), max_size=3),
)
def test_a_thinned_curve_keeps_its_outliers(length, limit, places):
    generator = np.random.default_rng(length)
    loss = generator.normal(size=length).astype(np.float32)
    norm = np.abs(generator.normal(size=length)).astype(np.float32)
    special = {"^": 1e6, "v": -1e6, "?": np.nan, "!": np.inf}
    for at, kind in places:
        loss[at % length] = special[kind]
    at = kept = thin({"loss": loss, "norm": norm}, limit)
    assert len(kept) <= limit
    assert len(kept) >= (length if length <= limit else limit // 8)
    assert (np.diff(kept) > 0).all()
    assert (kept[0], kept[-1]) == (0, length - 1)
    for curve in (loss, norm):
        finite = np.isfinite(curve)
        if finite.any():
            whole, few = curve[finite], curve[at][np.isfinite(curve[at])]
            assert (few.min(), few.max()) == (whole.min(), whole.max())
    bad = np.flatnonzero(~np.isfinite(loss))
    if len(bad):
        assert bad[0] in at


def test_a_limit_of_0_is_none_in_force(tmp_path):
    """A page would draw a line at 0 for a policy that has no limit."""
    path = tmp_path / "run.metrics.jsonl"
    path.write_text('{"run": "a", "step": 0, "loss": 2.0, "threshold": 0.0}\n')
    curves, _ = read_metrics(path, ["a"])
    assert curves.threshold is not None
    assert np.isnan(curves.threshold).tolist() == [True]


def test_the_faults_of_a_run_are_told_in_their_order_in_each_pass():
    nan = {"cause": ["NONFINITE_GRAD"], "skip": True}
    back = {"checkpoint": 100, "onset": 152, "by": "earlier_weights"}
    run = run_of(
        ("alarm", 157, {**nan, "incident": 1}), ("alarm", 158, {**nan, "incident": 1}),
        ("rollback", 178, back),
        ("alarm", 150, {"cause": ["LOSS_SPIKE"]}),
        ("alarm", 161, {**nan, "incident": 2}),
        ("alarm", 190, {"cause": ["LOSS_SPIKE"], "alert": ["LOSS_SPIKE"]}),
    )  # fmt: skip
    assert [event.step for event in faults_found(run)] == [157, 178, 161, 190]


# -- damage that was not repaired -----------------------------------------------------------------

TRIED = {"onset": 30, "checkpoint": 20, "outcome": "rewound", "by": "earlier_weights"}
ACCEPTED = {"onset": 30, "cause": [], "verdict": "accepted", "by": "earlier_weights", "why": "so"}


def test_damage_that_is_accepted_is_not_repaired():
    run = run_of(("rollback", 50, TRIED), ("assessment", 45, ACCEPTED))
    assert run.unrepaired == (30,)
    later = ("rollback", 90, {**TRIED, "onset": 80, "checkpoint": 60})
    assert run_of(("assessment", 45, ACCEPTED), later).unrepaired == (30,)
    older = run_of(("rollback", 50, TRIED), ("assessment", 45, {**ACCEPTED, "verdict": "damage"}))
    assert older.unrepaired == (), "a file of an earlier version does not say so"


@pytest.mark.parametrize(
    ("happened", "resumed", "unrepaired"),
    [
        pytest.param([], 40, (), id="saved before it was accepted"),
        pytest.param([], 46, (30,), id="saved after it was accepted"),
        pytest.param([("rollback", 46, TRIED)], 20, (30,), id="the restored checkpoint knows"),
    ],
)
def test_a_restart_knows_of_accepted_damage_what_its_checkpoint_knows(
    happened, resumed, unrepaired
):
    first = events(START, ("assessment", 45, ACCEPTED), *happened)
    second = events(("resume", resumed, {"checkpoint": resumed}), run="b")
    (run,) = runs_of({"a": first, "b": second})
    assert run.unrepaired == unrepaired
