"""Events files and policies that are crafted. The Healer reads both when it starts."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from healcore import Healer, Logging
from healcore.runtime.store.errors import StoreError
from healcore.tools.cli import app

READING = "healcore.events.log"
EVENT = json.dumps({"schema": 1, "seq": 0, "run": "r", "kind": "start", "step": 0}).encode() + b"\n"


def filled(path, size):
    """A file whose only line is of many bytes, most of them a hole that takes no disk."""
    with path.open("wb") as file:
        file.write(EVENT)
        file.seek(size)
        file.write(b"x\n")
    return path


@pytest.mark.parametrize("function", ["read", "last"])
def test_a_line_of_two_gigabytes(reader, tmp_path, function):
    path = filled(tmp_path / "run.events.jsonl", 2 << 30)
    outcome = reader.call(f"{READING}:{function}", path)
    # `last` reads the end of the file only.
    assert outcome.answer["returned"] == ("History" if function == "read" else "NoneType")


def test_the_events_before_and_behind_a_long_line_are_read(reader, tmp_path):
    path = filled(tmp_path / "run.events.jsonl", 20 << 20)
    with path.open("ab") as file:
        file.write(EVENT.replace(b'"seq": 0', b'"seq": 1'))
    outcome = reader.run("events", "show", path)
    assert outcome.status == 1
    assert outcome.text.count("start") == 2
    assert "longer than" in outcome.text


@pytest.mark.parametrize("step", [{}, {"a": [1]}, [1], 10**400, "x" * 1000, float("nan")])
@pytest.mark.parametrize("kind", ["start", "rollback", "unknown"])
def test_a_step_that_is_no_number(reader, tmp_path, step, kind):
    path = tmp_path / "run.events.jsonl"
    event = {"schema": 1, "seq": 0, "run": "r", "kind": kind, "step": step, "lr_scale": step}
    path.write_text(json.dumps(event) + "\n")
    assert reader.run("events", "show", path).status == 0


def test_a_long_line_of_metrics(reader, tmp_path):
    path = tmp_path / "run.events.jsonl"
    path.write_bytes(EVENT)
    filled(tmp_path / "run.metrics.jsonl", 1 << 30)
    assert reader.run("report", path, "--out", tmp_path / "out.html").status in (0, 1)


def test_half_a_character_in_a_name(reader, tmp_path):
    """UTF-8 has no bytes for it, and the page is UTF-8."""
    path = tmp_path / "run.events.jsonl"
    path.write_bytes(EVENT.replace(b'"r"', b'"\\ud800"'))
    assert reader.run("report", path, "--out", tmp_path / "out.html").status == 0
    assert "\\ud800" in (tmp_path / "out.html").read_text()


@pytest.mark.parametrize("kind", ["open", "case", "begins", "_class__", "is_of_last", "x" * 10**6])
def test_a_kind_that_is_the_name_of_a_method(reader, tmp_path, kind):
    path = tmp_path / "run.events.jsonl"
    event = {"schema": 1, "seq": 1, "run": "r", "kind": kind, "step": 3}
    path.write_bytes(EVENT + json.dumps(event).encode() + b"\n")
    outcome = reader.run("report", path, "--out", tmp_path / "out.html")
    assert outcome.status == 0


LINES = {
    "nested": b"[" * 500_000,
    "nested objects": b'{"a":' * 500_000,
    "digits": EVENT.replace(b'"seq": 0', b'"seq": ' + b"9" * 100_000),
    "lists": b'{"schema":1,"seq":1,"run":"r","kind":"x","y":[' + b"[]," * 1_300_000 + b"[]]}",
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_that_is_none(reader, tmp_path, name):
    path = tmp_path / "run.events.jsonl"
    path.write_bytes(EVENT + LINES[name] + b"\n")
    for function in ("read", "last"):
        assert "returned" in reader.call(f"{READING}:{function}", path).answer


POLICIES = {
    "a dotted key": "a" + ".a" * 19_000 + " = 1\n",
    "quoted parts": '"\\""' + '."\\""' * 9_000 + " = 1\n",
    "spaces": "a" + " . a" * 9_000 + " = 1\n",
    "a table": "[a" + ".a" * 19_000 + "]\n",
    "an inline table": "x = {a" + ".a" * 19_000 + " = 1}\n",
    "brackets": "x = " + "[" * 100_000 + "\n",
    "braces": "x = " + "{a=" * 100_000 + "\n",
    "unknown keys": "".join(f"k{at} = 1\n" for at in range(50_000)),
    "a long key": "k" * 900_000 + " = 1\n",
    "digits": "schema = " + "9" * 900_000 + "\n",
    "quotes": '"' * 900_000,
    "tokens": "a " * 450_000,
    "dots": "." * 900_000,
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_is_none(reader, tmp_path, name):
    path = tmp_path / "p.toml"
    path.write_text(POLICIES[name])
    outcome = reader.call("healcore.policy:load", path)
    assert outcome.answer["raised"] == "PolicyError"


def _enter(**options):
    model = torch.nn.Linear(1, 1)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    Healer("default", state=state, **options).__enter__()


@pytest.mark.parametrize(
    ("call", "option"), [(_enter, "store"), (Logging, "events"), (Logging, "metrics")]
)
def test_a_nul_in_a_path_is_named(tmp_path, call, option):
    with pytest.raises((StoreError, ValueError), match=f"{option} is a path without the NUL"):
        call(**{option: f"{tmp_path}/run\0.jsonl"})


def test_a_nul_in_the_path_of_a_command(tmp_path):
    done = CliRunner().invoke(app, ["events", "show", f"{tmp_path}/run\0.jsonl"])
    assert (done.exit_code, "cannot be read" in done.output) == (2, True), done
