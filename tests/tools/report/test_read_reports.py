"""The report of a real run follows from its events and metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from healcore.history import Curves, Incident, Mode
from healcore.history.incident import count_incidents
from healcore.policy import load
from healcore.tools.report.page import outcome, render
from healcore.tools.report.run_report import RunReport, read_reports
from tests.tools.report.small_runs import lines_of, train

RUNS = pytest.mark.parametrize("run", ["healed", "stopped", "resumed"])


def of_kind(events, kind):
    return [event for event in lines_of(events) if event["kind"] == kind]


def postmortems(events: Path) -> list[dict[str, Any]]:
    """The content of each postmortem next to an events file."""
    return [json.loads(p.read_text()) for p in events.parent.glob("run.postmortem.*.json")]


@RUNS
def test_every_incident_and_rollback_is_reported(run, request):
    events = request.getfixturevalue(run)
    (report,) = read_reports(events)
    begun = of_kind(events, "incident")
    assert len(report.incidents) == len(begun) > 2
    assert [case.number for case in report.incidents] == [event["incident"] for event in begun]
    assert [case.onset_step for case in report.incidents] == [event["onset"] for event in begun]
    # The report also names the causes that only alert.
    assert all(
        {*e["cause"]} <= {*case.cause} for case, e in zip(report.incidents, begun, strict=True)
    )
    back = [case for case in report.incidents if "ROLLBACK" in case.action]
    rollbacks = of_kind(events, "rollback")
    assert [case.checkpoint for case in back] == [event["checkpoint"] for event in rollbacks]
    assert [case.lr_path[-1] for case in back] == [event["lr_scale"] for event in rollbacks]
    assert [[list(b) for b in case.skipped_batches] for case in back] == [
        e["batches"] for e in rollbacks
    ]
    skips = sum(event["skip"] for event in of_kind(events, "alarm") if event["incident"])
    assert sum(case.skipped for case in report.incidents) == skips > 10
    # With the skips that were undone before they were read, which have no event.
    written = [each["undone_skips"] for each in postmortems(events)]
    assert report.counts.undone_skips == max(undone(events, "alarm"), *written)
    assert report.counts.undone_incidents == undone(events, "incident") >= len(back)
    assert report.notes == ()


def undone(path, kind):
    """Skipped steps, or incidents, before a later event that goes on from an earlier step."""
    events = lines_of(path)
    return sum(
        any(
            later["kind"] in ("rollback", "resume") and later["checkpoint"] <= event["step"]
            for later in events[place:]
        )
        for place, event in enumerate(events)
        if event["kind"] == kind and event.get("skip", True)
    )


@RUNS
def test_curves_are_the_metrics_row_by_row(run, request):
    events = request.getfixturevalue(run)
    (report,) = read_reports(events)
    rows = lines_of(events.with_name("run.metrics.jsonl"))
    series = report.curves
    assert series.rows == len(rows) == len(series.step)
    np.testing.assert_array_equal(series.step, [row["step"] for row in rows])
    for curve, name in ((series.loss, "loss"), (series.grad_norm, "grad_norm")):
        logged = np.array([float(row[name]) for row in rows], np.float32)
        np.testing.assert_array_equal(curve, logged)
    np.testing.assert_array_equal(series.nonfinite, [row["loss"] == "nan" for row in rows])
    for case in report.incidents:
        assert any(row["step"] == case.onset_step and row["cause"] for row in rows)


@RUNS
def test_undone_steps_are_marked(run, request):
    events = request.getfixturevalue(run)
    (report,) = read_reports(events)
    step = report.curves.step
    # By definition: a row is undone if a later one has its step or an earlier one.
    expected = [bool(np.any(step[row + 1 :] <= step[row])) for row in range(len(step))]
    assert report.curves.undone().tolist() == expected
    assert any(expected)
    attempt = report.curves.attempt
    assert attempt is not None
    assert len(report.attempts) == len(np.unique(attempt))
    for part in report.attempts:
        assert step[attempt == part.number][0] == part.first_step
    left = [part.left for part in report.attempts if part.origin == "rollback"]
    assert left == [event["step"] for event in of_kind(events, "rollback")]


def test_a_stopped_run_is_reported_as_stopped(stopped):
    (report,) = read_reports(stopped)
    assert report.facts["Ending"] == "stopped by the policy"
    assert "budget of recoveries is exhausted" in report.diagnosis
    assert "STOP" in report.incidents[-1].action
    assert "budget of recoveries is exhausted" in outcome(report.incidents[-1])
    assert report.facts["Framework"].startswith("torch ")


def test_a_resumed_run_is_one_report(resumed):
    (report,) = read_reports(resumed)
    assert len(report.facts["Run"].split(", ")) == 2
    assert "unknown (error): the loop raised RuntimeError: power" in report.facts["Faults"]
    assert [each.origin for each in report.attempts] == ["start", "rollback", "resume", "rollback"]


# -- counts are the same everywhere ---------------------------------------------------------------


def text_of(page: str) -> str:
    """The text of a page, without its markup and its script."""
    body = page[page.index("<body>") :]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))


def case(number: int, at: float, *action: str, skipped: int = 0) -> Incident:
    return Incident(number, 0, at, at, ("LOSS_SPIKE",), action, Mode.REPLAY, skipped=skipped)


MIXED = (
    *(case(1, 10, "ROLLBACK", "CUT_LR"), case(2, 30, "ROLLBACK", "STOP")),
    *(case(3, 60, "STOP"), case(4, 80, skipped=3)),
)


def test_an_incident_with_a_rollback_and_a_stop_counts_as_both():
    step, counts = np.arange(100.0), count_incidents(MIXED)
    curves = Curves(step, np.exp(-step / 50))
    report = RunReport("a.csv", Mode.REPLAY, "pretraining", "", "", curves, MIXED, counts, {})
    report = report._replace(stop=40.0)
    assert report.counts.rollbacks == 2
    assert [each.outcome for each in MIXED] == ["rollback", "rollback", "stop", "skip"]
    page = text_of(render([report]))
    assert "would have rolled back, then would have stopped" in page
    assert "would stop at step 40" in page


def test_a_stopped_run_has_the_same_skips_and_steps_everywhere(stopped):
    """The policy stops the run while its last step is not read yet."""
    (written,), rows = postmortems(stopped), lines_of(stopped.with_name("run.metrics.jsonl"))
    (report,) = read_reports(stopped)
    assert written["skips"] == written["metrics"]["heal/skips"] == report.counts.skips > 10
    assert report.facts["Step at the end"] == str(written["step"]) == str(rows[-1]["step"] + 1)


def test_an_observed_run_is_reported_as_what_would_have_been(tmp_path):
    """NaN from batch 300 on, and a policy that observes: 600 alarms, 100 of them with an event."""
    policy = load("pretraining", mode="observe")
    events = train(tmp_path, range(300, 900), policy=policy, batches=900)
    (written,) = postmortems(events)
    for numbers, name in ((written, ""), (written["metrics"], "heal/")):
        assert (numbers[f"{name}skips"], numbers[f"{name}observed_skips"]) == (0, 600)
    assert "Tried: nothing: the policy only observes." in written["diagnosis"]
    (report,) = read_reports(events)
    (incident,) = report.incidents
    assert (report.counts.skips, report.counts.alarms, report.counts.rollbacks) == (600, 600, 1)
    path = (1.0, 0.25, 0.0625, 0.015625)
    assert (incident.onset_step, incident.lr_path[:4]) == (300.0, path)
    assert "only observed" in outcome(incident)
    assert not report.curves.undone().any()
    page = text_of(render([report]))
    assert "would have skipped 100 steps or more, rolled back, stopped the run" in page
    for text in ("600 steps would be skipped", "last finite loss", "1 → 0.25 → 0.0625"):
        assert text in page
