"""`healcore events ...`, through the real command line."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from healcore.events import Log, schema
from healcore.tools.cli import app
from tests.events.sample_events import SAMPLES


def healcore_cli(*arguments: str):
    return CliRunner().invoke(app, ["events", *arguments])


def test_schema():
    done = healcore_cli("schema")
    assert done.exit_code == 0
    assert json.loads(done.stdout) == schema.json_schema()


def test_show(tmp_path):
    path = tmp_path / "run.events.jsonl"
    log = Log(path)
    for step, kind in enumerate(SAMPLES):
        log.write(kind, step=step, **SAMPLES[kind])
    done = healcore_cli("show", str(path))
    assert done.exit_code == 0
    first, *lines = done.stdout.splitlines()
    assert first == f"run {log.run}"
    assert [line.split()[2] for line in lines] == list(SAMPLES)
    assert max(map(len, lines)) < 1000
    only = healcore_cli("show", str(path), "--kind", "rollback", "--kind", "stop").stdout
    assert [line.split()[2] for line in only.splitlines()[1:]] == ["rollback", "stop"]
    assert "checkpoint=300" in only


def test_show_a_damaged_file(tmp_path):
    path = tmp_path / "run.events.jsonl"
    Log(path).write("good", step=None)
    with path.open("ab") as file:
        file.write(b'{"torn')
    done = healcore_cli("show", str(path))
    assert done.exit_code == 1
    assert "good" in done.stdout
    assert done.stderr.startswith("line 2: torn")


def test_show_no_file(tmp_path):
    done = healcore_cli("show", str(tmp_path / "none"))
    assert done.exit_code == 2
    assert "No such file" in done.stderr
