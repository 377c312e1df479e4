"""Events files that are crafted. The Healer reads them when it starts."""

from __future__ import annotations

import json

import pytest

from tests.hostile import reader

EVENT = json.dumps({"schema": 1, "seq": 0, "run": "r", "kind": "start", "step": 0}).encode() + b"\n"


def test_the_events_before_and_behind_a_long_line_are_read(tmp_path):
    path = tmp_path / "run.events.jsonl"
    with path.open("wb") as file:  # a line of many bytes, most of them a hole that takes no disk
        file.write(EVENT)
        file.seek(20 << 20)
        file.write(b"x\n" + EVENT.replace(b'"seq": 0', b'"seq": 1'))
    outcome = reader.run("events", "show", path)
    assert outcome.status == 1
    assert outcome.text.count("start") == 2
    assert "longer than" in outcome.text


DIGITS = EVENT.replace(b'"seq": 0', b'"seq": ' + b"9" * 100_000)


@pytest.mark.parametrize("line", [b"[" * 500_000, DIGITS], ids=["nested", "digits"])
def test_a_line_that_is_none(tmp_path, line):
    path = tmp_path / "run.events.jsonl"
    path.write_bytes(EVENT + line + b"\n")
    outcome = reader.run("events", "show", path)
    assert (outcome.status, outcome.out.count("start")) == (1, 1)
