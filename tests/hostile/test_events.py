"""Events files and policies that are crafted. The Healer reads both when it starts."""

from __future__ import annotations

import json

import pytest

READING = "healcore.events.log"
EVENT = json.dumps({"schema": 1, "seq": 0, "run": "r", "kind": "start", "step": 0}).encode() + b"\n"


def filled(path, size):
    """A file whose only line is of many bytes, most of them a hole that takes no disk."""
    with path.open("wb") as file:
        file.write(EVENT)
        file.seek(size)
        file.write(b"x\n")
    return path


def test_the_events_before_and_behind_a_long_line_are_read(reader, tmp_path):
    path = filled(tmp_path / "run.events.jsonl", 20 << 20)
    with path.open("ab") as file:
        file.write(EVENT.replace(b'"seq": 0', b'"seq": 1'))
    outcome = reader.run("events", "show", path)
    assert outcome.status == 1
    assert outcome.text.count("start") == 2
    assert "longer than" in outcome.text


LINES = {
    "nested": b"[" * 500_000,
    "digits": EVENT.replace(b'"seq": 0', b'"seq": ' + b"9" * 100_000),
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_that_is_none(reader, tmp_path, name):
    path = tmp_path / "run.events.jsonl"
    path.write_bytes(EVENT + LINES[name] + b"\n")
    assert "returned" in reader.call(f"{READING}:read", path).answer


POLICIES = {
    "a dotted key": "a" + ".a" * 19_000 + " = 1\n",
    "brackets": "x = " + "[" * 100_000 + "\n",
    "digits": "schema = " + "9" * 900_000 + "\n",
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_is_none(reader, tmp_path, name):
    path = tmp_path / "p.toml"
    path.write_text(POLICIES[name])
    outcome = reader.call("healcore.policy:load", path)
    assert outcome.answer["raised"] == "PolicyError"
