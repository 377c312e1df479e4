"""SIGKILL at random moments of saves and rollbacks: the run ends as if never killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def root() -> Iterator[Path]:
    """In memory if possible: a kill has the same effect on all file systems, and syncs are slow."""
    memory = Path("/dev/shm")
    at = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="healcore-killed-", dir=at) as folder:
        yield Path(folder)


@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=pytest.mark.stress)])
@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("aim", [[], ["stepped"]], ids=["any time", "after a step"])
def test_killed_again_and_again(aim, framework, kills, root):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.healer.repeated_kills", framework, root, str(kills), *aim],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600 * kills,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["kills"] == kills
    if aim:
        assert counts["after a step"] == kills
    assert counts["in a rollback"] >= max(1, kills // 10)
    assert counts["in a save"] >= max(1, kills // 10)
