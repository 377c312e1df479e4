"""Reading events: whole lines are read, whatever lies between them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from healcore.events import Log, read


def event(seq: int, run: Any = "a", **fields) -> bytes:
    return json.dumps({"schema": 1, "seq": seq, "run": run, "kind": "save", **fields}).encode()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.events.jsonl"


@pytest.mark.parametrize(
    ("junk", "reason"),
    [
        (b'{"schema": 1, "seq"', "not JSON"),
        (b"\x00\x00\x00", "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b"[" * 100_000, "not JSON (RecursionError)"),
        (b"1" * 5000, "not JSON"),
        (b"null", "not a JSON object but NoneType"),
        (event(-1), "seq is not a whole number"),
        (event(True), "seq is not a whole number"),
        (event(1 << 60), "seq is not a whole number"),
        (event(1, run=3), "run is not a string"),
    ],
    ids=range(10),
)
def test_a_damaged_line_is_listed_and_left_out(path, junk, reason):
    path.write_bytes(b"\n".join([event(0), junk, event(1), b""]))
    history = read(path)
    assert [e["seq"] for e in history.events] == [0, 1]
    (problem,) = history.problems
    assert problem.line == 2
    assert reason in problem.problem
    path.write_bytes(b"\n".join([event(0), junk]))
    assert read(path).events == [json.loads(event(0))]
    assert "torn" in read(path).problems[0].problem


def test_every_prefix_reads(path):
    """Fault 39: a file cut anywhere still gives all its whole lines."""
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


def test_a_newer_schema_is_read_with_a_warning(path):
    path.write_bytes(event(0, schema=3) + b"\n")
    history = read(path)
    assert len(history.events) == 1
    assert "newer healcore" in history.problems[0].problem
