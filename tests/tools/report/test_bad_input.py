"""Files as a crash, a full disk or a mistake leaves them: a message, never a traceback."""

from __future__ import annotations

import json
import random

import pytest
from typer.testing import CliRunner

from healcore.tools.cli import app
from healcore.tools.report.page import render
from healcore.tools.report.run_report import ReportError, read_reports
from tests.tools.report.small_runs import lines_of


def healcore(*arguments: object):
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    assert not isinstance(done.exception, Exception) or isinstance(done.exception, SystemExit)
    return done


@pytest.fixture
def copy(healed, tmp_path):
    """A copy of a run's files, for a test to damage."""
    for name in ("run.events.jsonl", "run.metrics.jsonl"):
        (tmp_path / name).write_bytes(healed.with_name(name).read_bytes())
    return tmp_path / "run.events.jsonl"


def test_a_report_is_written_next_to_its_run(copy):
    done = healcore("report", copy)
    assert (done.exit_code, done.stderr) == (0, "")
    page = copy.with_name("run.report.html")
    assert done.stdout.splitlines() == [f"page: {page}"]
    assert page.read_text().startswith("<!DOCTYPE html>")
    # The directory stands for the run in it.
    assert healcore("report", copy.parent, "--out", copy.with_name("a.html")).exit_code == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n\n", "is empty"),
        (b"step,loss\n1,2.0\n", "healcore probe loss"),
        (b"[" * 100_000, "no event"),
        (b'{"a": 1}\n', "schema is not a whole number"),
    ],
)
def test_nothing_to_report(content, message, tmp_path):
    events = tmp_path / "run.events.jsonl"
    events.write_bytes(content)
    done = healcore("report", events)
    assert done.exit_code == 2
    assert all(text in done.stderr for text in (message, str(events)))
    assert not (tmp_path / "run.report.html").exists()


def test_damaged_lines_are_reported_by_number_and_the_rest_is_used(copy):
    lines = copy.read_bytes().splitlines(keepends=True)
    at = [event["kind"] for event in lines_of(copy)].index("incident")
    lines[at] = lines[at][:40] + b"\n"
    copy.write_bytes(b"".join(lines) + b'{"schema":1,"se')
    metrics = copy.with_name("run.metrics.jsonl")
    rows = metrics.read_bytes().splitlines(keepends=True)
    rows[7] = b"\xff\xfe nonsense\n"
    metrics.write_bytes(b"".join(rows))
    done = healcore("report", copy)
    assert done.exit_code == 0
    assert f"run.events.jsonl: damaged: line {at + 1}: not JSON" in done.stderr
    assert f"run.events.jsonl: damaged: line {len(lines) + 1}: torn" in done.stderr
    assert "run.metrics.jsonl: damaged: line 8: not JSON" in done.stderr
    (report,) = read_reports(copy)
    assert report.curves.rows == len(rows) - 1
    # Its alarms still show the incident.
    assert [case.number for case in report.incidents] == list(range(1, len(report.incidents) + 1))
    assert "damaged: line 8" in copy.with_name("run.report.html").read_text()


def test_a_run_that_was_killed(copy):
    lines = copy.read_text().splitlines(keepends=True)
    copy.write_text("".join(line for line in lines if '"kind":"end"' not in line))
    (report,) = read_reports(copy)
    # The process that wrote it is this one, and it is still there.
    assert report.facts["Ending"] == "still running"
    gone = [json.loads(line) for line in lines]
    gone = [{**event, "boot": "another"} for event in gone if event["kind"] != "end"]
    copy.write_text("".join(json.dumps(event) + "\n" for event in gone))
    (report,) = read_reports(copy)
    assert report.facts["Ending"].startswith("killed")


ODD = [None, True, -1, 1 << 60, 1.5, "nan", "x", [], {}, [[1]], [None], {"a": 1}, "</script>"]


def test_any_value_in_any_field_is_a_page_or_a_message(copy):
    """Events of a file that somebody has edited, or another program has written."""
    events = lines_of(copy)
    metrics = lines_of(copy.with_name("run.metrics.jsonl"))[:200]
    source = random.Random(0)
    for _ in range(40):
        spoilt = [dict(event) for event in events]
        for event in spoilt:
            for name in [*event, "outcome", "batches", "evidence", "cause", "lr_scale"]:
                if source.random() < 0.1:
                    event[name] = source.choice(ODD)
        rows = [{name: source.choice([v, v, *ODD]) for name, v in row.items()} for row in metrics]
        for path, written in ((copy, spoilt), (copy.with_name("run.metrics.jsonl"), rows)):
            path.write_text("".join(json.dumps(each) + "\n" for each in written))
        try:
            reports = read_reports(copy)
        except ReportError:
            continue
        page = render(reports)
        assert 'class="incident"' in page or "No incident." in page
