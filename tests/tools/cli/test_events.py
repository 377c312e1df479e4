"""`healcore events ...`, through the real command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
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
    assert "back to the checkpoint of step 300" in done.stdout


# -- following a run ---------------------------------------------------------------------------


def following(*arguments: object) -> subprocess.Popen[str]:
    """`healcore events show --follow`, running."""
    code = "from healcore.tools.cli import main; main()"
    command = [sys.executable, "-c", code, "events", "show", "--follow", *map(str, arguments)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize(("ending", "status"), [("completed", 0), ("stopped", 1)])
def test_a_live_run_is_followed_to_its_end(ending, status, tmp_path):
    """The file does not exist at first; it is torn, and rotated."""
    process = following(tmp_path)
    assert process.stdout is not None
    assert process.stderr is not None
    assert "does not exist yet" in process.stderr.readline()
    path = tmp_path / "healcore.events.jsonl"
    log = Log(path)
    log.write("start", step=None, policy="default", mode="heal", framework="torch")
    assert process.stdout.readline() == f"run {log.run}\n"
    assert " start " in process.stdout.readline()
    with path.open("ab") as file:
        file.write(b'{"torn\n')
    assert "damaged" in process.stderr.readline()
    path.rename(tmp_path / "old")
    log.write("good", step=40)
    assert " 40  good" in process.stdout.readline()
    log.write("end", step=60, ending=ending, incidents=0, rollbacks=0)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (status, "")
    assert " 60  end" in out


def test_a_run_that_was_killed_ends_it(tmp_path):
    path = tmp_path / "run.events.jsonl"
    log = Log(path)
    log.write("start", step=None, policy="default", mode="heal", framework="torch")
    path.write_text(re.sub(r'"boot":\s*"[^"]*"', '"boot":"another"', path.read_text()))
    out, errors = following(path).communicate(timeout=60)
    assert " start " in out
    assert "was killed" in errors
