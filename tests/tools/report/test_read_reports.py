"""The report of a real run and of damaged files; its page is complete, self-contained and safe."""

import contextlib
import itertools
import json
import random
import re
import shutil
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markupsafe import escape
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from typer.testing import CliRunner

from healcore.events import Log
from healcore.events.models import Ending, EventRecord, EvidenceRecord
from healcore.history import Counts, Curves, Incident, Mode
from healcore.history.run_history import RunAttempt
from healcore.policy import load
from healcore.runtime.run.dispatch_queue import LAG
from healcore.tools.cli import app
from healcore.tools.report.figure import WIDTHS, draw, plot
from healcore.tools.report.page import render
from healcore.tools.report.page_report import PageReport, response_text
from healcore.tools.report.run_report import ReportError, read_reports
from tests.healer import training_loops
from tests.healer.run_directory import events_of, new_process, postmortems
from tests.healer.training_loops import Faults, broken_at, loop_of
from tests.packaging.page_text import blocks

RUNS = pytest.mark.parametrize("run", ["healed", "stopped", "resumed"])


def train(
    folder: Path, bad: Iterable[int], policy: Any = "pretraining", batches: int = 600, **more: Any
) -> Path:
    """Events file of a torch run with NaN batches; a store in `more` continues the run before."""
    events = folder / "run.events.jsonl"
    data = range(batches)
    options = {"events": events, "metrics": folder / "run.metrics.jsonl", "save_every": None}
    with contextlib.suppress(SystemExit):
        training_loops.train(loop_of("torch", Faults(always=bad)), policy, data, **options, **more)
    return events


@pytest.fixture(scope="module")
def healed(tmp_path_factory) -> Path:
    """Two rollbacks, some skips, completed."""
    return train(tmp_path_factory.mktemp("healed"), [*range(250, 262), 400, *range(500, 512)])


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run whose data is NaN from batch 300 on, so that the policy stops it."""
    return train(tmp_path_factory.mktemp("stopped"), range(300, 600))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> Path:
    """A process that dies of an exception at batch 330, and one that resumes its checkpoint."""
    folder = tmp_path_factory.mktemp("resumed")
    with contextlib.suppress(RuntimeError):
        train(folder, range(150, 162), before=broken_at(330), store=folder / "checkpoints")
    return train(folder, range(450, 462), store=folder / "checkpoints")


def of_kind(events, kind):
    return [event for event in events_of(events) if event["kind"] == kind]


@pytest.mark.slow
@RUNS
def test_every_incident_and_rollback_is_reported(run, request):
    events = request.getfixturevalue(run)
    (report,) = read_reports(events)
    alarms = [event for event in of_kind(events, "alarm") if event["incident"]]
    begun = list({event["incident"]: event for event in reversed(alarms)}.values())[::-1]
    assert len(begun) > 2
    for case, event in zip(report.incidents, begun, strict=True):
        assert (case.number, case.onset_step) == (event["incident"], event["step"])
        assert {*event["cause"]} <= {*case.cause}, "the report names causes that only alert, too"
    back = [case for case in report.incidents if "ROLLBACK" in case.action]
    for case, event in zip(back, of_kind(events, "rollback"), strict=True):
        assert case.lr_path[-1] == event["lr_scale"]
        assert [list(batch) for batch in case.skipped_batches] == event["batches"]
    skips = sum(event["skip"] for event in of_kind(events, "alarm") if event["incident"])
    assert sum(case.skipped for case in report.incidents) == skips > 10
    assert report.notes == ()


@pytest.mark.slow
@RUNS
def test_curves_are_the_metrics_row_by_row(run, request):
    events = request.getfixturevalue(run)
    (report,) = read_reports(events)
    rows = events_of(events.with_name("run.metrics.jsonl"))
    series, step = report.curves, report.curves.step
    assert series.rows == len(rows)
    assert step.tolist() == [row["step"] for row in rows]
    for curve, name in ((series.loss, "loss"), (series.grad_norm, "grad_norm")):
        wanted = np.array([float(row[name]) for row in rows], np.float32)
        np.testing.assert_array_equal(curve, wanted)
    np.testing.assert_array_equal(series.nonfinite, [row["loss"] == "nan" for row in rows])
    # By definition: a row is undone if a later one has its step or an earlier one.
    expected = [bool(np.any(step[row + 1 :] <= step[row])) for row in range(len(step))]
    assert series.undone().tolist() == expected
    assert any(expected)
    begins = [step[0], *step[1:][np.diff(step) <= 0]]
    # A restart may continue where the process before has ended.
    rewound = [part for part in report.attempts if part.left != part.first_step]
    for part, begun in zip(rewound, begins, strict=True):
        # A restart first judges the step that the earlier process has left unread.
        unread = LAG if part.origin == "resume" else 0
        assert part.first_step - unread <= begun <= part.first_step
    left = [part.left for part in report.attempts if part.origin == "rollback"]
    assert left == [event["step"] for event in of_kind(events, "rollback")]


def test_a_stopped_run_is_reported_as_stopped(stopped):
    """The policy stops the run while its last step is not read yet."""
    (report,) = read_reports(stopped)
    assert report.facts["Ending"] == "stopped by the policy"
    assert report.facts["Framework"].startswith("torch ")
    assert "STOP" in report.incidents[-1].action
    for text in (report.diagnosis, response_text(report.incidents[-1])):
        assert "budget of recoveries is exhausted" in text
    (written,) = postmortems(stopped.parent)
    rows = events_of(stopped.with_name("run.metrics.jsonl"))
    assert written["skips"] == written["metrics"]["heal/skips"] == report.counts.skips > 10
    assert report.facts["Step at the end"] == str(written["step"]) == str(rows[-1]["step"] + 1)


def test_a_resumed_run_is_one_report(resumed):
    (report,) = read_reports(resumed)
    assert len(report.facts["Run"].split(", ")) == 2
    assert "unknown (error): the program raised RuntimeError: power" in report.facts["Faults"]
    assert [each.origin for each in report.attempts] == ["start", "rollback", "resume", "rollback"]


@pytest.mark.slow
def test_an_observed_run_is_reported_as_what_would_have_been(tmp_path):
    """NaN from batch 300 on, and a policy that observes: 600 alarms, 100 of them with an event."""
    policy = load("pretraining", mode="observe")
    events = train(tmp_path, range(300, 900), policy=policy, batches=900)

    # The postmortem.
    (written,) = postmortems(events.parent)
    assert (written["skips"], written["observed_skips"]) == (0, 600)
    assert "Tried: nothing: the policy only observes\n" in written["diagnosis"]
    assert written["metrics"]["heal/observed_skips"] == 600

    # The report.
    (report,) = read_reports(events)
    (incident,) = report.incidents
    counts = report.counts
    assert (counts.skips, counts.rollbacks) == (600, 1)
    assert incident.lr_path[:4] == (1.0, 0.25, 0.0625, 0.015625)
    assert not report.curves.undone().any()

    # Its page.
    page = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", render([report])))
    expected = r"would have skipped 1\d\d steps or more, rolled back, stopped the run"
    assert re.search(expected, page), "alarms with an order have an event too"
    assert "600 steps would be skipped" in page
    assert "1 → 0.25 → 0.0625" in page
    assert "nothing was changed" in page


def healcore(*arguments: object):
    return CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)


@pytest.fixture
def copy(healed, tmp_path):
    """A copy of a run's files, for a test to damage."""
    for name in ("run.events.jsonl", "run.metrics.jsonl"):
        (tmp_path / name).write_bytes(healed.with_name(name).read_bytes())
    return tmp_path / "run.events.jsonl"


@pytest.mark.slow
def test_a_report_is_written_next_to_its_run(copy):
    done = healcore("report", copy)
    assert (done.exit_code, done.stderr) == (0, "")
    page = copy.with_name("run.report.html")
    assert done.stdout.splitlines() == [f"page: {page}"]
    assert page.read_text().startswith("<!DOCTYPE html>")
    # The directory stands for the run in it.
    assert healcore("report", copy.parent, "--out", copy.with_name("a.html")).exit_code == 0


def heading_of(page: str) -> str:
    """The title of a page, which is its heading too."""
    (title,), (heading,) = (
        re.findall("<title>(.*?)</title>", page),
        re.findall("<h1>(.*?)</h1>", page),
    )
    assert title == heading
    return heading


def test_the_heading_has_the_name_of_the_run_its_policy_and_its_result(tmp_path):
    for name, heading in (("healcore", "run-7"), ("events", "run-7"), ("big", "run-7/big")):
        events = tmp_path / "run-7" / f"{name}.events.jsonl".replace("events.events", "events")
        events.parent.mkdir(exist_ok=True)
        log = Log(events)
        log.write("start", step=None, policy="default", mode="heal")
        log.write("end", step=20, ending="completed")
        (report,) = read_reports(events)
        assert heading_of(render([report])) == f"{heading}: policy default, completed"


def test_a_diagnosis_is_paragraphs_without_the_line_breaks_of_a_console():
    text = "The run is\n  complete.\nFault: step 3: a long\n  text.\nTried: nothing."
    page = render([hostile()._replace(diagnosis=text)])
    found = re.findall(r"<p[^>]*>([^<]*)</p>", page.partition("Diagnosis</h3>")[2])
    expected = ["The run is complete.", "Fault: step 3: a long text.", "Tried: nothing."]
    assert found[: len(expected)] == expected


def test_a_page_of_several_runs_replaces_the_page_of_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        Path(name).mkdir()
        Log(Path(name, "run.events.jsonl")).write("start", step=None, policy="default")
    assert healcore("report", "first").stdout.strip() == f"page: {Path('first/run.report.html')}"
    page = Path("first/run.report.html").read_text()
    done = healcore("report", "first", "second")
    assert (done.exit_code, done.stdout.strip()) == (0, "page: healcore.reports.html")
    assert heading_of(Path("healcore.reports.html").read_text()) == "2 runs"
    assert Path("first/run.report.html").read_text() == page
    assert healcore("report", "first", "second", "-o", "a.html").stdout.strip() == "page: a.html"


def killed(folder: Path, rows: range) -> Path:
    """Events file of a run that had a healed spike, and then was killed."""
    events = folder / "run.events.jsonl"
    log = Log(events)
    log.write("start", step=None, policy="default", mode="heal", store="there")
    log.write("save", step=0, why="first")
    text = "The loss rose far above its level."
    alert = {"alert": ["LOSS_SPIKE"], "severity": "warning", "diagnosis": text}
    log.write("alarm", step=12, cause=["LOSS_SPIKE"], **alert)
    log.write(
        "rollback", step=15, checkpoint=10, onset=12, by="earlier_weights", outcome="done",
        why="the weights of step 10 are better", lr_at_fault=0.15, lr_limit=0.003, steps_repeated=5,
    )  # fmt: skip
    log.write("save", step=30, why="regular")
    lines = events.read_text().splitlines()
    lines[0] = json.dumps({**json.loads(lines[0]), "born": 1})  # another process had this number
    events.write_text("".join(f"{line}\n" for line in lines))
    write_rows(events, log.process_id, rows)
    return events


def write_rows(events: Path, process: str, steps: range) -> None:
    with events.with_name("run.metrics.jsonl").open("a") as file:
        for step in steps:
            row = {"schema": 1, "kind": "step", "run": process, "step": step, "time": 4e9}
            file.write(json.dumps({**row, "loss": 2.0}) + "\n")


def test_a_killed_run_has_a_page_without_a_diagnosis(tmp_path):
    events = killed(tmp_path, range(34))
    (report,) = read_reports(events)
    assert report.state is Ending.GONE
    assert report.facts["Step at the end"] == "30 or later"
    assert report.diagnosis == ""


def test_a_start_of_a_completed_run_keeps_the_report(tmp_path):
    """It trains nothing, as for an evaluation, and has no postmortem of its own."""
    for origins in (["start"], ["start", "resume"]):
        new_process()
        events = train(tmp_path, [7], batches=20, store=tmp_path / "checkpoints")
        (report,) = read_reports(events)
        assert report.diagnosis.startswith("completed after step 20\n")
        assert report.counts.clips is not None
        assert [each.origin for each in report.attempts] == origins
    assert len(report.facts["Run"].split(", ")) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"step,loss\n1,2.0\n", "healcore probe loss"),
        (b'{"a": 1}\n', "schema is not a whole number"),
    ],
)
def test_a_file_without_events_of_a_run_is_refused(content, message, tmp_path):
    events = tmp_path / "run.events.jsonl"
    events.write_bytes(content)
    done = healcore("report", events)
    assert done.exit_code == 2
    assert message in done.stderr
    assert str(events) in done.stderr
    assert not (tmp_path / "run.report.html").exists()


def test_damaged_lines_are_reported_by_number_and_the_rest_is_used(copy):
    lines = copy.read_bytes().splitlines(keepends=True)
    kinds = [event["kind"] for event in events_of(copy)]
    at = kinds.index("alarm", kinds.index("alarm") + 1)
    lines[at] = lines[at][:40] + b"\n"
    copy.write_bytes(b"".join(lines) + b'{"schema":1,"se')
    metrics = copy.with_name("run.metrics.jsonl")
    rows = metrics.read_bytes().splitlines(keepends=True)
    rows[7] = b"\xff\xfe nonsense\n"
    metrics.write_bytes(b"".join(rows))
    done = healcore("report", copy)
    assert done.exit_code == 0
    for damage in (f"line {at + 1}: not JSON", f"line {len(lines) + 1}: torn"):
        assert f"run.events.jsonl: damaged: {damage}" in done.stderr
    assert "run.metrics.jsonl: damaged: line 8: not JSON" in done.stderr
    assert "damaged: line 8" in copy.with_name("run.report.html").read_text()
    (report,) = read_reports(copy)
    assert report.curves.rows == len(rows) - 1
    # Its alarms still show the incident.
    assert [case.number for case in report.incidents] == list(range(1, len(report.incidents) + 1))


ODD = [None, True, -1, 1 << 60, 1.5, "nan", "x", [], {}, [[1]], [None], {"a": 1}, "</script>"]


@pytest.mark.slow
def test_any_value_in_any_field_is_a_page_or_a_message(copy):
    """Events of a file that somebody has edited, or another program has written."""
    events = events_of(copy)
    metrics = events_of(copy.with_name("run.metrics.jsonl"))[:200]
    source = random.Random(0)
    for _ in range(40):
        spoilt = [{**events[0], "mono": 1 << 60}, *map(dict, events[1:])]
        for event in spoilt[1:]:
            for name in [*event, "outcome", "batches", "evidence", "cause", "lr_scale"]:
                if source.random() < 0.1:
                    event[name] = source.choice(ODD)
        copy.write_text("".join(json.dumps(event) + "\n" for event in spoilt))
        rows = [{name: source.choice([v, v, *ODD]) for name, v in row.items()} for row in metrics]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        copy.with_name("run.metrics.jsonl").write_text(lines)
        try:
            reports = read_reports(copy)
        except ReportError:
            continue
        page = render(reports)
        assert 'class="incident"' in page or "No incident." in page


EVIL = (
    "</script><script>document.body.dataset.hacked=1</script><img src=x onerror=alert(1)>&'\"$x^{"
)


def hostile() -> PageReport:
    """A report in which every text wants to be a script."""
    step = np.arange(50.0)
    case = Incident(
        number=1, onset_step=20.0, step=22.0, cause=(EVIL,), action=(EVIL, "ROLLBACK"),
        skipped=2, responses=[EventRecord(kind="stop", why=EVIL)],
        first=EventRecord(evidence=[EvidenceRecord(name=EVIL, grad_norm=1.0)]),
    )  # fmt: skip
    return PageReport(
        title=EVIL, mode=Mode.HEAL, policy_name=EVIL, policy_toml=EVIL, fingerprint=EVIL,
        curves=Curves(step, np.exp(-step / 10)),
        incidents=(case,), counts=Counts(1, 1, 2), facts={EVIL: EVIL},
        state=Ending.UNKNOWN, notes=(EVIL,),
        attempts=(RunAttempt(0.0, EVIL), RunAttempt(0.0, EVIL, 9.0)),
        alarms_outside={3.0: (EVIL,)},
        diagnosis=f"{EVIL}\n  - {EVIL}\n    {EVIL}",
    )  # fmt: skip


def elements_of(page: str) -> list[tuple[str, dict[str, str | None]]]:
    found = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: found.append((tag, dict(attrs)))
    parser.feed(page)
    return found


def test_every_incident_has_its_row(healed):
    (report,) = read_reports(healed)
    page = render([report])
    assert page.count('<tr class="incident">') == len(report.incidents)
    for case in report.incidents:
        assert f"<td>#{case.number}" in page
        assert escape(response_text(case)) in page
    # The last text is that of an attempt, undone or not.
    texts = "epoch 0: 250–260 (11 skipped)", "1 → 0.25", "[budget]", report.fingerprint, "completed"
    assert all(each in page for each in (*texts, "from step 0 (start);"))


def test_the_tiles_have_plurals_and_a_rollback_without_an_alarm_its_reason_and_limit():
    back = EventRecord(
        kind="rollback", step=134, checkpoint=110, steps_repeated=24,
        why="the weights of step 110 are better",
        lr_at_fault=0.0884, lr_limit=0.00571,
    )  # fmt: skip
    found = Incident(0, onset_step=113.0, step=134.0, responses=[back], lr_path=(1.0,))
    report = hostile()._replace(incidents=(found,), counts=Counts(0, 1, 1, 1, 2), diagnosis="")
    page = render([report])
    text = " ".join(re.sub(r"<[^>]+>", " ", page.partition("<body>")[2]).split())
    assert "1 rollback 1 step skipped 1 step clipped 2 steps with an alarm" in text
    assert "50 steps logged These numbers include steps that a rollback has undone." in text
    assert "0 incidents 1 rollback" not in text
    assert "Incidents and rollbacks Incident Steps Cause Outcome Skipped LR multiplier" in text
    row = (
        "rollback 113–134 the weights of step 110 are better the weights of step 110 are better; "
        "rolled back to checkpoint 110, learning rate at most 0.00571 (it was 0.0884), 24 steps "
        "are repeated 0 – –"
    )
    assert row in text


def test_a_quiet_run_has_0_incidents():
    quiet = hostile()._replace(incidents=(), counts=Counts(0, 0, 0))
    assert "0 incidents" in " ".join(re.sub(r"<[^>]+>", " ", render([quiet])).split())


@pytest.mark.slow
def test_nothing_is_loaded_and_texts_cannot_become_elements(healed):
    page = render([hostile(), hostile()])
    for text in (page, render(read_reports(healed))):
        assert not re.search(r"url\((?!#)|@import", text)
        elements = elements_of(text)
        for tag, attributes in elements:
            assert tag not in {"script", "img", "link", "iframe", "object", "embed", "base"}
            assert not {"srcset", "action", "ping"} & attributes.keys()
            assert not any(name.startswith("on") for name in attributes)
            assert all((attributes.get(e) or "#")[0] == "#" for e in ("href", "xlink:href", "src"))
        policy = next(a["content"] for t, a in elements if a.get("http-equiv"))
        assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert re.findall(r'<a href="(#s\d)"', page) == ["#s0", "#s1"]
    assert (page.count("<section"), page.count("<svg")) == (2, 4), "two figures in two widths"


def empty() -> PageReport:
    """A run with no event but its start."""
    rows = Curves(np.zeros(0), np.zeros(0, np.float32))
    state = Ending.RUNNING
    return PageReport("nothing", Mode.HEAL, "default", "", "", rows, (), Counts(), {}, state)


def test_the_programs_of_the_documentation_run(healed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copy(healed, "run.events.jsonl")
    found = [each for each in blocks("reports.md") if "read_reports" in each or "runs_of" in each]
    assert len(found) == 2
    for program in found:
        exec(program, {})
    assert "</html>" in Path("run.html").read_text()
    assert "completed" in capsys.readouterr().out.lower()


@pytest.mark.parametrize("width", WIDTHS.values())
@pytest.mark.parametrize(
    "run",
    ["healed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("stopped", "resumed"))],
)
def test_the_figure_names_what_happened_and_no_texts_overlap(run, width, request):
    (report,) = read_reports(request.getfixturevalue(run))
    figure = Figure()
    plot(figure, report, width)
    FigureCanvasAgg(figure).draw()

    # What the figure says.
    texts = [*figure.legends[0].get_texts(), *figure.axes[0].get_yticklabels()]
    for axis in figure.axes:
        texts += [*axis.texts, axis.xaxis.label, axis.yaxis.label]
    shown = {text.get_text() for text in texts}
    assert {report.ending(), "optimizer step", "loss", "gradient\nnorm (L2)"} <= shown
    arcs = {text.removesuffix(" restart").removeprefix("killed after ") for text in shown}
    for attempt in report.attempts:
        if attempt.left is not None:
            assert f"{attempt.left:.0f} → {attempt.first_step:.0f}" in arcs

    # Where the texts are.
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)

    themed = re.sub(r"var\(--c\w+, #\w+\)|:root{.*?}", "", draw(report, width))
    assert not re.findall("#[0-9a-f]{6}", themed), "each colour has one for a dark page"


def test_areas_of_several_passes_do_not_add_up_and_an_arc_keeps_its_text():
    """Four incidents and two rollbacks in the same steps, at the end of a run."""
    spans = [(157, 176), (161, 170), (157, 171), (161, 170)]
    found = [Incident(number, *span) for number, span in enumerate(spans, 1)]
    found += [Incident(0, 152.0, 178.0), Incident(0, 160.0, 172.0)]
    steps = np.arange(178.0)
    attempts = (RunAttempt(0, "start"), RunAttempt(0, "rollback", 172, 0, False))
    report = hostile()._replace(
        incidents=tuple(found), attempts=attempts, curves=Curves(steps, np.ones(178))
    )
    for width in WIDTHS.values():
        figure = Figure()
        plot(figure, report, width)
        patches: list[Any] = [*figure.axes[1].patches]
        areas = [(each.get_x(), each.get_x() + each.get_width()) for each in patches]
        assert sorted(areas) == [(152, 178)]
        assert {text.get_text() for text in figure.axes[0].texts} >= {"172 → 0"}


@pytest.mark.slow
def test_odd_curves_are_drawn_without_an_error():
    step = np.arange(100.0)
    nan = np.full(100, np.nan)
    ones = np.ones(100)
    odd = [
        Curves(step, nan, nonfinite=np.ones(100, bool), grad_norm=nan),
        Curves(step, np.where(step == 5, np.inf, 1e30), grad_norm=ones, threshold=ones),
        Curves(step % 60, np.where(step == 59, 2e3, 2.0)),
    ]
    for each in (empty(), *(hostile()._replace(curves=curves) for curves in odd)):
        assert draw(each, 8.0).endswith("</svg>\n")
