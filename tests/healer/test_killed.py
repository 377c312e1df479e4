"""SIGKILL at random moments of saves and rollbacks: the run ends as if never killed."""

from __future__ import annotations

import json

import pytest

from tests.events.processes import run


@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=pytest.mark.stress)])
@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("aim", [[], ["stepped"]], ids=["any time", "after a step"])
def test_killed_again_and_again(aim, framework, kills, in_memory):
    program = "-m", "tests.healer.repeated_kills", framework, in_memory, kills, *aim
    done = run(*program, seconds=600 * kills)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["kills"] == kills
    if aim:
        assert counts["after a step"] == kills
    assert counts["in a rollback"] >= max(1, kills // 10)
    assert counts["in a save"] >= max(1, kills // 10)
