"""Following a run while its file grows, is torn, is emptied, or does not exist yet."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from healcore.events import Log
from healcore.events.models import EventRecord
from healcore.tools.cli import app
from healcore.tools.report.page import render
from healcore.tools.report.runs import read_reports
from healcore.tools.watch.follow import Tail
from healcore.tools.watch.live_run import LiveRun, event_line, one_line
from tests.tools.report.small_runs import Loop, lines_of, train

ROOT = Path(__file__).parents[3]
CODE = "from healcore.tools.cli import main; main()"


def watch(*arguments: object, **options) -> subprocess.Popen[str]:
    """The command, running."""
    command = [sys.executable, "-c", CODE, "watch", *map(str, arguments)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TERM": "xterm"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **{**pipes, **options})


def once(path: Path, *arguments: str):
    return CliRunner().invoke(app, ["watch", str(path), "--once", *arguments])


# -- the file ----------------------------------------------------------------------------------


def test_a_file_that_is_not_there_yet(tmp_path):
    tail = Tail(tmp_path / "a")
    assert tail.poll() == ([], False, False)
    assert not tail.exists
    tail.path.write_bytes(b"one\ntw")
    assert tail.poll() == ([b"one"], False, False)
    assert tail.exists
    assert tail.poll().lines == []
    with tail.path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert tail.poll().lines == [b"two", b"three"]


def test_a_file_that_is_emptied(tmp_path):
    tail = Tail(tmp_path / "a")
    tail.path.write_bytes(b"one\ntwo\nthr")
    tail.poll()
    tail.path.write_bytes(b"four\n")
    assert tail.poll() == ([b"four"], True, False)


def test_a_file_that_is_rotated_away(tmp_path):
    tail = Tail(tmp_path / "a")
    tail.path.write_bytes(b"one\n")
    tail.poll()
    tail.path.rename(tmp_path / "a.1")
    assert tail.poll() == ([], False, False)
    tail.path.write_bytes(b"two, and longer than the file before\n")
    assert tail.poll() == ([b"two, and longer than the file before"], True, False)


def test_only_the_end_of_a_large_file(tmp_path):
    tail = Tail(tmp_path / "a", last_bytes=1000)
    tail.path.write_bytes(b"".join(b"%06d\n" % i for i in range(100_000)))
    lines = tail.poll().lines
    assert lines == [b"%06d" % i for i in range(100_000 - len(lines), 100_000)]
    assert 900 < 7 * len(lines) <= 1000


def test_all_of_a_large_file_a_piece_at_a_time(tmp_path):
    tail = Tail(tmp_path / "a")
    tail.path.write_bytes(b"".join(b"%07d\n" % i for i in range(400_000)))
    lines, more = [], True
    while more:
        news = tail.poll()
        lines, more = [*lines, *news.lines], news.more
    assert lines == [b"%07d" % i for i in range(400_000)]


def test_a_file_that_cannot_be_read(tmp_path):
    tail = Tail(tmp_path)
    assert tail.poll().lines == []
    assert "directory" in tail.error_text


# -- the run -----------------------------------------------------------------------------------


def test_how_a_real_run_stood(healed):
    live = LiveRun()
    for each in healed.read_bytes().splitlines():
        live.add_event(each)
    end = lines_of(healed)[-1]
    assert live.ending == "completed"
    assert live.run.incident_count == end["incidents"]
    assert live.run.rollback_count == end["rollbacks"] == 2
    assert live.run.last_good == end["last_good"]
    assert live.policy is not None
    assert live.policy.budget.recoveries == 3
    rows = healed.with_name("run.metrics.jsonl").read_bytes().splitlines()
    for each in rows:
        live.add_metrics(each)
    assert live.metrics["loss"] == json.loads(rows[-1])["loss"]
    assert live.speed is not None
    assert live.speed > 0


def test_once(healed, stopped, tmp_path):
    done = once(healed)
    assert done.exit_code == 0
    assert "completed · step" in done.output
    assert "2 rollbacks (budget 3)" in done.output
    assert "loss 0." in done.output
    done = once(stopped)
    assert done.exit_code == 1
    assert "stopped: the budget of recoveries is exhausted" in done.output
    assert once(tmp_path / "no.jsonl").exit_code == 2
    (tmp_path / "empty").touch()
    assert once(tmp_path / "empty").exit_code == 2
    (tmp_path / "log.csv").write_text("step,loss\n" + "1,2\n" * 100)
    done = once(tmp_path / "log.csv")
    assert done.exit_code == 2
    assert "is not an events file" in done.stderr
    assert "logging=Logging(events=...)" in done.stderr
    assert once(healed, "--policy", "nonsense").exit_code == 2


def test_counts_of_the_end(tmp_path):
    """Skips that a rollback has undone before they were read are in the postmortem only."""
    path = tmp_path / "run.events.jsonl"
    log = Log(path, run="a")
    log.write("start", step=None, policy="default", mode="heal", framework="torch")
    log.write("alarm", step=3, cause=["NONFINITE_LOSS"], skip=True)
    assert "· 1 step skipped ·" in once(path).output
    order = {"onset": 2, "cause": ["NONFINITE_LOSS"]}
    log.write("order", step=3, action=["ROLLBACK"], **order)
    log.write("assessment", step=4, verdict="unknown", by="nothing", **order)
    log.write("rollback", step=5, onset=2, checkpoint=1, outcome="done", lr_at_fault=0.1)
    log.write("end", step=9, ending="completed", incidents=0, rollbacks=1)
    (tmp_path / "run.postmortem.a.json").write_text('{"skips": 3, "undone_skips": 3}')
    shown = once(path).output
    assert "declined: no evidence that the current weights are worse\n" in shown
    assert "no incident · 3 steps skipped (3 undone) · 1 rollback · 1 LR cut" in shown
    (report,) = read_reports(path)
    assert (report.counts.skips, report.counts.undone_skips) == (3, 3)
    assert (report.counts.incidents, report.counts.rollbacks) == (0, 1)
    assert "no incident</button>" in render([report])


def test_a_torn_line_and_another_rank_are_ignored(healed, tmp_path):
    events = lines_of(healed)
    other = [{**event, "run": "other", "rank": 1, "step": 7777777} for event in events]
    lines = [json.dumps(each) for pair in zip(events, other, strict=True) for each in pair]
    lines.insert(5, '{"schema":1,"se')
    copy = tmp_path / "run.events.jsonl"
    copy.write_text("\n".join(lines) + '\n{"torn')
    done = once(copy)
    assert done.exit_code == 0
    assert "7777777" not in done.output
    assert "2 rollbacks (budget 3)" in done.output


def test_a_run_whose_process_is_gone(healed, tmp_path):
    copy = tmp_path / "run.events.jsonl"
    events = [{**event, "boot": "another"} for event in lines_of(healed) if event["kind"] != "end"]
    copy.write_text("".join(json.dumps(event) + "\n" for event in events))
    done = once(copy)
    assert done.exit_code == 1
    assert "ended: killed" in done.output


def test_a_log_gives_the_terminal_no_commands():
    problem = "a\x1b[2Jb\nc\x07 [red]d[/red]"
    shown = event_line(EventRecord(kind="problem", step=3, problem=problem))
    assert shown is not None
    assert shown.endswith(r"problem: a\x1b[2Jb c\x07 [red]d[/red]")
    assert one_line("\u202eabc") == r"\u202eabc"


# -- live --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loop", "status", "text"),
    [
        (Loop(nan=range(120, 132)), 0, "end: completed"),
        (Loop(nan=range(120, 400)), 1, "end: stopped"),
    ],
    ids=["completed", "stopped"],
)
def test_a_live_run_to_its_end(loop, status, text, tmp_path):
    process = watch(tmp_path / "run.events.jsonl")
    assert process.stdout is not None
    assert "does not exist yet: waiting" in process.stdout.readline()
    train(tmp_path, loop, batches=300)
    out, errors = process.communicate(timeout=600)
    assert (process.returncode, errors) == (status, "")
    assert "incident 1: nonfinite loss and nonfinite grad" in out
    assert "back to the checkpoint of step" in out
    assert text in out
    assert "\x1b" not in out


def test_ctrl_c_ends_it_silently(tmp_path):
    log = Log(tmp_path / "run.events.jsonl")
    log.write("start", step=None, policy="default", mode="heal", framework="torch")
    process = watch(log.path)
    assert process.stdout is not None
    assert "begins" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    assert (process.returncode, errors) == (130, "")


def test_in_a_terminal_there_is_a_panel(tmp_path):
    log = Log(tmp_path / "run.events.jsonl")
    log.write("start", step=None, policy="default", mode="heal", framework="torch")
    log.write("good", step=40)
    ours, theirs = pty.openpty()
    process = watch(log.path, stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    seen = read_until(ours, "last known-good: step 40")
    log.write("incident", step=52, incident=1, onset=50, cause=["LOSS_SPIKE"])
    seen += read_until(ours, "1 incident, the last at step 50")
    log.write("end", step=60, ending="completed", incidents=1, rollbacks=0)
    seen += read_until(ours, "completed · step 60")
    assert process.wait(60) == 0
    os.close(ours)
    assert "incident 1: loss spike" in seen
    assert "╭" in seen


def read_until(terminal: int, text: str) -> str:
    """What a terminal shows, up to and including `text`."""
    seen, end = "", time.monotonic() + 60
    while text not in seen and time.monotonic() < end:
        if select.select([terminal], [], [], 1)[0]:
            seen += os.read(terminal, 4096).decode(errors="replace")
    assert text in seen, seen
    return seen
