"""Counts are the same everywhere, also those of a policy that only observes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from healcore.history import Curves, Incident, Mode
from healcore.history.incident import count_incidents
from healcore.policy import load
from healcore.tools.report.page import outcome, render
from healcore.tools.report.run_report import RunReport, read_reports
from tests.tools.report.small_runs import lines_of, train


def text_of(page: str) -> str:
    """The text of a page, without its markup and its script."""
    body = page[page.index("<body>") :]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))


def case(number: int, at: float, *action: str, skipped: int = 0) -> Incident:
    return Incident(number, 0, at, at, ("LOSS_SPIKE",), action, Mode.REPLAY, skipped=skipped)


MIXED = (
    case(1, 10, "ROLLBACK", "CUT_LR"),
    case(2, 30, "ROLLBACK", "STOP"),
    case(3, 60, "STOP"),
    case(4, 80, skipped=3),
)


def test_an_incident_with_a_rollback_and_a_stop_counts_as_both():
    step = np.arange(100.0)
    report = RunReport(
        title="runs/a.csv", mode=Mode.REPLAY, policy_name="pretraining", policy_toml="",
        fingerprint="", curves=Curves(step, np.exp(-step / 50)), incidents=MIXED,
        counts=count_incidents(MIXED), facts={}, stop=40.0,
    )  # fmt: skip
    assert report.counts.rollbacks == 2
    assert [each.outcome for each in MIXED] == ["rollback", "rollback", "stop", "skip"]
    page = text_of(render([report]))
    assert "would have rolled back, then would have stopped" in page
    assert "would stop at step 40" in page


def postmortem_of(events: Path) -> dict[str, Any]:
    """The content of the only postmortem next to an events file."""
    (path,) = events.parent.glob("run.postmortem.*.json")
    return json.loads(path.read_text())


def test_a_stopped_run_has_the_same_skips_and_steps_everywhere(stopped):
    """The policy stops the run while its last step is not read yet."""
    written, rows = postmortem_of(stopped), lines_of(stopped.with_name("run.metrics.jsonl"))
    (report,) = read_reports(stopped)
    assert written["skips"] == written["metrics"]["heal/skips"] == report.counts.skips > 10
    assert report.facts["Step at the end"] == str(written["step"]) == str(rows[-1]["step"] + 1)


def test_an_observed_run_is_reported_as_what_would_have_been(tmp_path):
    """NaN from batch 300 on, and a policy that observes: 600 alarms, 100 of them with an event."""
    policy = load("pretraining", mode="observe")
    events = train(tmp_path, range(300, 900), policy=policy, batches=900)
    written = postmortem_of(events)
    assert (written["skips"], written["observed_skips"]) == (0, 600)
    assert written["metrics"]["heal/skips"] == 0
    assert written["metrics"]["heal/observed_skips"] == 600
    (report,) = read_reports(events)
    (incident,) = report.incidents
    assert report.counts.skips == 600
    assert report.counts.alarms == 600
    assert incident.onset_step == 300.0
    assert incident.lr_path[:4] == (1.0, 0.25, 0.0625, 0.015625)
    assert report.counts.rollbacks == 1
    assert "only observed" in outcome(incident)
    assert not report.curves.undone().any()
    page = text_of(render([report]))
    assert "would have skipped 100 steps or more, rolled back, stopped the run" in page
    assert "600 steps would be skipped" in page
    assert "last finite loss" in page
    assert "1 → 0.25 → 0.0625" in page
