"""Runs that hang for ever are ended, with their stacks; runs that only take long are not."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from healcore.runtime.events import read, schema
from healcore.runtime.hang_guard.process_signals import END
from tests.healer.run_directory import events, postmortems
from tests.runtime.hang_guard.processes import started

BOUND_S = 300
"""After which a test fails. What is measured and documented is in docs/hang.md; timing depends on
what else runs."""
STANDS_IN = {"python": "in hang", "gil": "in hang", "stopped": "in hang"}
ALONE = (*STANDS_IN, "slow", "healthy")
RANKS = {"stopped": 3, "sleeps": 2}


class Runs:
    """One process for each way to hang, all at once, and some of several ranks."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._running: dict[tuple[str, int], list[subprocess.Popen[str]]] = {}
        for how, world in [*((how, 1) for how in ALONE), *RANKS.items()]:
            folder = self.folder(how, world)
            folder.mkdir()
            self._running[how, world] = [
                started(how, folder, *((rank, world) if world > 1 else ())) for rank in range(world)
            ]

    def folder(self, how: str, world: int = 1) -> Path:
        return self.root / f"{how}{world}"

    def ended(self, how: str, world: int = 1) -> list[int]:
        """The exit status of each rank."""
        until = time.monotonic() + BOUND_S
        return [each.wait(max(0.1, until - time.monotonic())) for each in self._running[how, world]]

    def kill(self) -> None:
        for processes in self._running.values():
            for each in processes:
                each.kill()
                each.wait()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    found = Runs(tmp_path_factory.mktemp("hangs"))
    yield found
    found.kill()


def stacks_of(folder: Path) -> dict[int, str]:
    """Rank -> its stacks, in the postmortem; those in the event are the same."""
    (found,) = postmortems(folder)
    (fault,) = (each for each in events(folder) if each["kind"] == "fault")
    assert found["cause"] == fault["cause"] == ["HANG"]
    assert fault["answer"] == "stop"
    assert fault["stacks"] == found["stacks"]
    assert found["ending"] == "stopped"
    return {rank: each["stacks"] for each in found["stacks"] for rank in each["ranks"]}


@pytest.mark.parametrize("how", STANDS_IN)
def test_one_process_is_ended_with_its_stack(how, runs):
    assert runs.ended(how) == [END]
    (stacks,) = stacks_of(runs.folder(how)).values()
    assert STANDS_IN[how] in stacks


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
    runs.ended("stopped", 3)
    found = events(runs.folder("stopped", 3))
    late = [each for each in found if "health probe" in each.get("problem", "")]
    assert any(re.match(r"rank [\d, ]*\b1\b.* has given no sign", e["problem"]) for e in late)


def test_every_event_of_a_hang_is_valid(runs):
    for how in ("gil", "slow"):
        runs.ended(how)
        history = read(runs.folder(how) / "healcore.events.jsonl")
        assert history.problems == []
        assert [each for event in history.events for each in schema.problems(event)] == []


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


def guards_of(pid: int) -> list[int]:
    """The guards among the children of a process."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"hang_guard" in (stat.parent / "cmdline").read_bytes():
                found.append(int(stat.parent.name))
        except OSError:  # it has ended
            continue
    return found


def test_a_guard_ends_with_its_process(tmp_path):
    run = started("healthy", tmp_path)
    try:
        until, guards = time.monotonic() + BOUND_S, []
        while not guards and time.monotonic() < until:
            guards = guards_of(run.pid)
            time.sleep(0.05)
        (guard,) = guards
    finally:
        run.kill()
        run.wait()
    until = time.monotonic() + BOUND_S
    while Path(f"/proc/{guard}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{guard}").exists()
