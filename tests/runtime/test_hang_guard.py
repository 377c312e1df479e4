"""Steps that never return are reported with the stacks of every rank, and ended on request."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from healcore.events import read
from healcore.runtime.hang_guard import EXIT_STATUS
from tests import forked_programs
from tests.events import processes
from tests.events.sample_events import problems
from tests.healer.run_directory import events, postmortems

BOUND_S = 1200
"""After which a test fails. How long it takes depends on what else runs, and is not asserted."""
ALONE = ("python", "sleeps")
RANKS = {"stopped": 3, "sleeps": 2}
RUNS = [(how, 1) for how in (*ALONE, "slow", "preset", "healthy")] + [*RANKS.items()]


def run(root: Path, runs: list[tuple[str, int]]) -> dict[str, int]:
    """The exit status of each process, by how it hangs, number of ranks and rank."""
    program = "-m", "tests.runtime.hanging_run", root, json.dumps(runs)
    done = processes.run(*program, seconds=BOUND_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Runs:
    """One process for each way to hang, all at once, and some of several ranks."""

    def __init__(self, root: Path) -> None:
        self.root, self._statuses = root, run(root, RUNS)

    def folder(self, how: str, world: int = 1) -> Path:
        return self.root / f"{how}{world}"

    def ended(self, how: str, world: int = 1) -> list[int]:
        """The exit status of each rank."""
        return [self._statuses[f"{how}{world}.{rank}"] for rank in range(world)]


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
    assert runs.ended(how) == [EXIT_STATUS]
    (stacks,) = stacks_of(runs.folder(how)).values()
    assert "in hang" in stacks.partition("\nThread ")[0], "the thread that trains comes first"


def test_all_ranks_are_ended_with_the_stacks_of_each(runs):
    first, second = runs.ended("sleeps", 2)
    assert (first, second) == (EXIT_STATUS, EXIT_STATUS)
    stacks = stacks_of(runs.folder("sleeps", 2))
    assert sorted(stacks) == [0, 1]
    assert "in hang" in stacks[1]
    assert "in all_reduce" in stacks[0]
    assert "in hang" not in stacks[0]


def test_a_stopped_rank_is_named_and_left_to_the_launcher(runs):
    first, stopped, third = runs.ended("stopped", 3)
    assert (first, stopped) == (EXIT_STATUS, -signal.SIGKILL)
    assert third in (EXIT_STATUS, 1), "the connection to rank 0 breaks"
    *_, fault = (each for each in events(runs.folder("stopped", 3)) if each["kind"] == "fault")
    assert "rank 1 has not answered" in fault["problem"]
    assert sorted(stacks_of(runs.folder("stopped", 3))) == [0, 2]


def test_every_event_of_a_hang_is_valid(runs):
    for how in ("python", "slow"):
        history = read(runs.folder(how) / "healcore.events.jsonl")
        assert history.problems == []
        assert [each for event in history.events for each in problems(event)] == []


@pytest.mark.parametrize(("how", "answer"), [("slow", None), ("preset", "alert")])
def test_what_does_not_end_a_run(how, answer, runs):
    """A policy that observes, and the presets."""
    assert runs.ended(how) == [0]
    fault, *_ = (each for each in events(runs.folder(how)) if each["kind"] == "fault")
    assert fault.get("answer") == answer
    assert fault.get("observed", False) == (how == "slow")
    assert "in hang" in fault["stacks"][0]["stacks"]
    assert [each["ending"] for each in postmortems(runs.folder(how))] == ["completed"]


def test_a_long_first_step_and_a_long_evaluation_are_no_hang(runs):
    assert runs.ended("healthy") == [0]
    assert not [each for each in events(runs.folder("healthy")) if each["kind"] == "fault"]


LEFT = """
import torch, healcore
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with healcore.Healer(state={"model": model, "optimizer": optimizer}) as healer:
    iterator = healer.batches([torch.ones(4, 2)] * 9)
    for batch in iterator:
        healer.observe(model(batch).square().mean())
        if healer.step == 4:
            break
        model(batch).sum().backward()
        optimizer.step()
"""


def test_an_iterator_that_is_left_and_kept_ends_with_the_interpreter():
    done = forked_programs.run("-c", LEFT)
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr
