"""Runs that hang for ever are ended, with their stacks; runs that only take long are not."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from healcore.runtime.events import read
from healcore.runtime.hang_guard.process_signals import END
from tests.healer.run_directory import events, postmortems
from tests.runtime.events.checked_events import problems
from tests.runtime.hang_guard.processes import started

BOUND_S = 300
"""After which a test fails. How long it takes depends on what else runs, and is not asserted."""
ALONE = ("python", "gil", "stopped")
RANKS = {"stopped": 3, "sleeps": 2}
RUNS = [(how, 1) for how in (*ALONE, "slow", "healthy", "killed")] + [*RANKS.items()]


class Runs:
    """One process for each way to hang, all at once, and some of several ranks."""

    def __init__(self, root: Path) -> None:
        self.root = root
        program = started("all", root, json.dumps(RUNS))
        try:
            assert program.stdout is not None
            self.pids: dict[str, int] = json.loads(program.stdout.readline())
            self.ended_with_guard = kill_with_guard(self.pids["killed1.0"])
            out, _ = program.communicate(timeout=BOUND_S)
        finally:
            program.kill()
            for pid in getattr(self, "pids", {}).values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._statuses: dict[str, int] = dict(map(json.loads, out.splitlines()))

    def folder(self, how: str, world: int = 1) -> Path:
        return self.root / f"{how}{world}"

    def ended(self, how: str, world: int = 1) -> list[int]:
        """The exit status of each rank."""
        return [self._statuses[f"{how}{world}.{rank}"] for rank in range(world)]


def kill_with_guard(pid: int) -> bool:
    """Kills a process, once it has a guard; whether the guard ends too."""
    until, guards = time.monotonic() + BOUND_S, []
    while not guards and time.monotonic() < until:
        guards = guards_of(pid)
        time.sleep(0.05)
    (guard,) = guards
    os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + BOUND_S
    while Path(f"/proc/{guard}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    return not Path(f"/proc/{guard}").exists()


def guards_of(pid: int) -> list[int]:
    """The guards of a process, whose handle they hold; they are not among its children."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if b"hang_guard.guard" not in (process / "cmdline").read_bytes():
                continue
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            files = [each.read_text() for each in (process / "fdinfo").iterdir()]
            if parent != pid and any(f"Pid:\t{pid}\n" in each for each in files):
                found.append(int(process.name))
        except OSError:  # it has ended
            continue
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("hangs"))


def stacks_of(folder: Path) -> dict[int, str]:
    """Rank -> its stacks, in the postmortem; those in the event are the same."""
    (found,) = postmortems(folder)
    *_, fault = (each for each in events(folder) if each["kind"] == "fault")
    assert found["cause"] == fault["cause"] == ["HANG"]
    assert fault["answer"] == "stop"
    assert fault["stacks"] == found["stacks"]
    assert found["ending"] == "stopped"
    return {rank: each["stacks"] for each in found["stacks"] for rank in each["ranks"]}


@pytest.mark.parametrize("how", ALONE)
def test_one_process_is_ended_with_its_stack(how, runs):
    assert runs.ended(how) == [END]
    (stacks,) = stacks_of(runs.folder(how)).values()
    assert "in hang" in stacks


@pytest.mark.parametrize(("how", "world"), RANKS.items())
def test_all_ranks_are_ended_with_the_stacks_of_each(how, world, runs):
    assert runs.ended(how, world) == [END] * world
    stacks = stacks_of(runs.folder(how, world))
    assert sorted(stacks) == [*range(world)]
    assert "in hang" in stacks[1]
    for rank in {*range(world)} - {1}:
        assert "in all_reduce" in stacks[rank]
        assert "in hang" not in stacks[rank]


def test_the_health_probe_names_a_stopped_rank(runs):
    found = events(runs.folder("stopped", 3))
    late = [each for each in found if "health probe" in each.get("problem", "")]
    assert any(re.match(r"rank [\d, ]*\b1\b.* has sent no heartbeat", e["problem"]) for e in late)


def test_every_event_of_a_hang_is_valid(runs):
    for how in ("gil", "slow"):
        history = read(runs.folder(how) / "healcore.events.jsonl")
        assert history.problems == []
        assert [each for event in history.events for each in problems(event)] == []


def test_a_policy_that_observes_ends_nothing(runs):
    assert runs.ended("slow") == [0]
    (fault,) = (each for each in events(runs.folder("slow")) if each["kind"] == "fault")
    assert fault["observed"]
    assert "answer" not in fault
    assert "in hang" in fault["stacks"][0]["stacks"]
    assert [each["ending"] for each in postmortems(runs.folder("slow"))] == ["completed"]


def test_a_long_first_step_and_a_long_evaluation_are_no_hang(runs):
    assert runs.ended("healthy") == [0]
    assert not [each for each in events(runs.folder("healthy")) if each["kind"] == "fault"]


def test_a_guard_ends_with_its_process(runs):
    assert runs.ended("killed") == [-signal.SIGKILL]
    assert runs.ended_with_guard
