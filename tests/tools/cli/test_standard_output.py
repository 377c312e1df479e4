"""The exit status when standard output is closed, full, or takes only ASCII."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MAIN = [sys.executable, "-m", "healcore"]
FAIL = 2

full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")


@pytest.fixture
def dead(tmp_path):
    """The log of a run that ends in NaN."""
    path = tmp_path / "é.csv"
    rows = [f"{step},{2 - step / 100}" for step in range(50)] + ["50,nan"]
    path.write_text("step,loss\n" + "\n".join(rows) + "\n", encoding="utf-8")
    return path


def run(*args, stdout: Any = subprocess.PIPE, **env):
    return subprocess.run(
        [*MAIN, *map(str, args)],
        check=False,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**os.environ, **env},
        timeout=600,
    )


def unread(*args):
    """Runs a command whose standard output has no reader any more."""
    ours, theirs = os.pipe()
    os.close(ours)
    try:
        return run(*args, stdout=theirs)
    finally:
        os.close(theirs)


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_reader_that_leaves_does_not_change_the_verdict(dead, form):
    found = unread("probe", "loss", dead, *form)
    assert found.returncode == FAIL
    assert b"Traceback" not in found.stderr


def test_a_command_without_a_reader_ends_without_an_error(dead):
    for command in (["policy", "list"], ["policy", "show", "default"], ["replay", str(dead)]):
        found = unread(*command)
        assert (found.returncode, found.stderr) == (0, b""), command


@full
def test_a_full_disk_is_reported_and_is_no_verdict(dead):
    with open("/dev/full", "wb") as nowhere:
        probe = run("probe", "loss", dead, "--json", stdout=nowhere)
        listed = run("policy", "list", stdout=nowhere)
    assert (probe.returncode, listed.returncode) == (3, 2)
    for found in (probe, listed):
        assert found.stderr.startswith(b"standard output cannot be written: ")


def test_a_terminal_that_knows_only_ascii(dead):
    found = run("probe", "loss", dead, PYTHONIOENCODING="ascii", LC_ALL="C")
    assert found.returncode == FAIL
    assert b".csv" in found.stdout
