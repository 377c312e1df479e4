"""The report of a real run follows from its events and metrics."""

from __future__ import annotations

import json

import numpy as np
import pytest

from healcore.tools.report.page import outcome
from healcore.tools.report.run_report import read_reports
from tests.tools.report.small_runs import lines_of


def of_kind(events, kind):
    return [event for event in lines_of(events) if event["kind"] == kind]


@pytest.mark.parametrize("run", ["healed", "stopped", "resumed"])
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
    written = [
        json.loads(path.read_text())["undone_skips"]
        for path in events.parent.glob("run.postmortem.*.json")
    ]  # with the skips that were undone before they were read, which have no event
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


@pytest.mark.parametrize("run", ["healed", "stopped", "resumed"])
def test_curves_are_the_metrics_row_by_row(run, request):
    events = request.getfixturevalue(run)
    (report,) = read_reports(events)
    rows = lines_of(events.with_name("run.metrics.jsonl"))
    series = report.curves
    assert series.rows == len(rows) == len(series.step)
    np.testing.assert_array_equal(series.step, [row["step"] for row in rows])
    for curve, name in ((series.loss, "loss"), (series.grad_norm, "grad_norm")):
        np.testing.assert_array_equal(
            curve, np.array([float(row[name]) for row in rows], np.float32)
        )
    np.testing.assert_array_equal(series.nonfinite, [row["loss"] == "nan" for row in rows])
    for case in report.incidents:
        assert any(row["step"] == case.onset_step and row["cause"] for row in rows)


@pytest.mark.parametrize("run", ["healed", "stopped", "resumed"])
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
