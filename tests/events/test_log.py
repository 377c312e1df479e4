"""The content of a line, damaged lines and lost events: training continues, readers go on."""

import json
import math
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from healcore.core.decision import Cause
from healcore.core.step_record import SuspectGradient
from healcore.events import Log, log, read
from tests.forked_programs import ForkedProgram
from tests.healer.run_directory import events_of
from tests.runtime.store.disk_faults import small_disk


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "run.events.jsonl"


def test_each_event_is_one_line(path):
    path = path.with_name("a new folder") / path.name
    events = Log(path)
    assert events.write("alarm", step=3, cause=["LOSS_SPIKE"], engine=None)
    assert events.write("end", step=None, ending="completed")
    first, second = events_of(path)
    assert list(first) == ["schema", "seq", "run", "time", "mono", "kind", "step", "cause"]
    assert (first["schema"], first["seq"], first["step"]) == (3, 0, 3)
    assert first["run"] == events.process_id
    assert (second["seq"], second["kind"], second["step"]) == (1, "end", None)
    assert second["mono"] >= first["mono"]
    assert second["time"] >= first["time"]


def test_write_returns_the_event_as_a_reader_reads_it(path):
    events = Log(path)
    fields = {
        "cause": Cause.LOSS_SPIKE | Cause.NONFINITE_GRAD,
        "evidence": [SuspectGradient("layer.weight", math.nan)],
        "loss": np.float32(1.5),
        "names": {"b", "a"},
        "settings": {1: (True, None), "text \ud800": -0.0},
        "problem": RuntimeError("x" * 20_000),
        "raises": Spiteful(),
        "too_long_for_python": 10**5000,
    }
    returned = [events.write("start", step=None), events.write("alarm", step=3, **fields)]
    assert returned == events_of(path)
    assert "could not be written" in returned[1]["raises"]
    assert [type(item) for item in returned[1]["evidence"]] == [dict]


@pytest.mark.parametrize(
    "tail", [b'{"schema": 1, "seq": 7, "ru', b"\x00" * 5000, b'{"schema":1}', b"\xff\xfe"]
)
def test_a_torn_tail_gets_its_line_feed_first(path, tail):
    events = Log(path)
    events.write("save", step=1)
    with path.open("ab") as file:
        file.write(tail)
    assert Log(path).write("save", step=2)
    history = read(path)
    assert [(e["seq"], e["step"]) for e in history.events] == [(0, 1), (0, 2)]
    assert [problem.line for problem in history.problems] == [2]


class Spiteful:
    """Raises wherever it is looked at."""

    ndim = 0

    def item(self):
        raise RuntimeError("deleted array")

    __repr__ = item


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ([math.nan, math.inf, np.float32(-math.inf)], ["nan", "inf", "-inf"]),
        (np.float32(0.5), 0.5),
        (Cause.LOSS_SPIKE | Cause.OOM, ["LOSS_SPIKE", "OOM"]),
        ([SuspectGradient("w", math.nan)], [{"name": "w", "grad_norm": "nan"}]),
        ((1, {1: {2, 1}}), [1, {"1": [1, 2]}]),
        (Path("a/b"), "a/b"),
        (ValueError("why"), "ValueError: why"),
        ("two\nlines \ud800 ü", "two\nlines \ud800 ü"),
        (b"\x00", "b'\\x00'"),
        (Spiteful(), "(could not be written: RuntimeError)"),
        (10**5000, "(could not be written: ValueError)"),
        (np.zeros(10**6), None),
        ("x" * 10**6, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_value_is_written_somehow(path, value, written):
    """An event with a value of any type would otherwise raise within the training loop."""
    assert Log(path).write("problem", step=1, value=value, other=1)
    (line,) = path.read_bytes().splitlines()
    event = json.loads(line, parse_constant=pytest.fail)
    assert event["other"] == 1
    assert len(line) < 12_000
    if written is not None:
        assert event["value"] == written


def test_a_log_is_rotated_and_clocks_jump(path, monkeypatch):
    """Fault 38: order by number, durations by the monotonic clock. A lost file is made again."""
    times = iter(["2026-03-28T02:00:00Z", "2026-03-29T02:00:00Z", "1970-01-01T00:00:00Z"])
    monkeypatch.setattr(log, "now", lambda: next(times))
    events = Log(path)
    events.write("save", step=1)
    path.rename(path.with_suffix(".1"))
    events.write("save", step=2)
    events.write("save", step=3)
    # As a collector may have left them: the other way round.
    path.write_text("".join(f"{line}\n" for line in reversed(path.read_text().splitlines())))
    (in_order,) = read(path).by_process().values()
    assert [(e["seq"], e["step"]) for e in in_order] == [(1, 2), (2, 3)]
    assert in_order[1]["time"] < in_order[0]["time"]
    assert in_order[1]["mono"] >= in_order[0]["mono"]
    assert events.lost == 0


def test_a_signal_handler_may_write_in_the_middle_of_a_write(path):
    events = Log(path)

    class Interrupting:
        def __repr__(self):
            signal.raise_signal(signal.SIGUSR1)
            return "interrupted"

    old = signal.signal(signal.SIGUSR1, lambda *_: events.write("problem", step=2, problem="sig"))
    try:
        assert events.write("problem", step=1, problem=Interrupting())
    finally:
        signal.signal(signal.SIGUSR1, old)
    history = read(path)
    assert history.problems == []
    (in_order,) = history.by_process().values()
    assert [(e["seq"], e["problem"]) for e in in_order] == [(0, "interrupted"), (1, "sig")]


def event(seq: int, run: Any = "a", **fields) -> bytes:
    return json.dumps({"schema": 1, "seq": seq, "run": run, "kind": "save", **fields}).encode()


@pytest.mark.parametrize(
    ("junk", "reason"),
    [
        (b'{"schema": 1, "seq"', "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b"[" * 100_000, "not JSON (RecursionError)"),
        (b"1" * 5000, "not JSON"),
        (b"null", "not a JSON object but NoneType"),
        (event(True), "seq is not a whole number"),
        (event(1 << 60), "seq is not a whole number"),
        (event(1, run=3), "run is not a string"),
    ],
    ids=range(8),
)
def test_a_damaged_line_is_listed_and_left_out(path, junk, reason):
    path.write_bytes(b"\n".join([event(0), junk, event(1), b""]))
    history = read(path)
    assert [e["seq"] for e in history.events] == [0, 1]
    (problem,) = history.problems
    assert problem.line == 2
    assert reason in problem.problem
    path.write_bytes(b"\n".join([event(0, schema=4), junk]))
    newer, torn = read(path).problems
    assert "newer healcore" in newer.problem
    assert ("torn" in torn.problem) == reason.startswith("not ")


def test_a_file_that_is_cut_anywhere_gives_its_whole_lines(path):
    """Also within a character of several bytes, or before the line feed."""
    log = Log(path)
    for step in range(3):
        log.write("alarm", step=step, why="ü\n" * step)
    data = path.read_bytes()
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        whole = data[:cut].count(b"\n")
        ended = cut > 0 and data[cut : cut + 1] == b"\n"  # all but its line feed
        history = read(path)
        assert [e["step"] for e in history.events] == list(range(whole + ended))
        assert len(history.problems) == (not ended and data[:cut][-1:] not in (b"", b"\n"))


def test_events_that_a_full_disk_loses_are_counted(tmp_path, caplog):
    """Fault 40."""
    with small_disk(tmp_path / "disk", megabytes=1) as root:
        path = root / "run.events.jsonl"
        events = Log(path)
        filler = root / "filler"
        filler.write_bytes(b"x" * ((1 << 20) - 20_000))
        written = 0
        while events.write("alarm", step=written, why="y" * 500) and not events.lost:
            written += 1
        assert 5 < written < 50
        for step in range(9):
            events.write("alarm", step=step, why="y" * 500)
        assert events.lost == 10
        assert [problem.line for problem in read(path).problems] == [written + 1], "a torn line"
        filler.unlink()
        events.write("good", step=99)
        events.write("good", step=100)
        assert events.lost == 0
        *_, reporting, after = read(path).events
        assert (reporting["lost"], reporting["seq"]) == (10, written + 10)
        assert "lost" not in after
        assert len(read(path).events) == written + 2
    assert [record.name for record in caplog.records] == ["healcore"], "the warning comes once"
    assert "training continues" in caplog.text


WRITES = """
import sys
from healcore.events import Log
log = Log(sys.argv[1])
log.write("start", step=0, policy="default", mode="heal")
for step in range(1500):
    log.write("alarm", step=step, index=step, padding="x" * int(sys.argv[2]))
log.write("end", step=1500, ending="completed")
print(log.process_id, log.lost)
"""


def test_writers_at_once_lose_nothing(path):
    options: Any = {"imports": ("healcore.events",), "stdout": subprocess.PIPE}
    sizes = (50, 500, 9000)
    processes = [ForkedProgram("-c", WRITES, path, size, **options) for size in sizes]
    written = dict(each.communicate(timeout=600)[0].split() for each in processes)
    assert [*written.values()] == ["0"] * 3
    history = read(path)
    assert (history.by_process().keys(), history.problems) == (written.keys(), [])
    for events in history.by_process().values():
        assert [event["seq"] for event in events] == list(range(1502))
        assert [event["index"] for event in events[1:-1]] == list(range(1500))
