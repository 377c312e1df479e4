"""Two ranks that see different things do the same, and neither waits forever."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest

from healcore.events import read
from tests.events.processes import python
from tests.healer.two_ranks import (
    BAD,
    CORRUPT,
    ENDS,
    HOOKS,
    ODD,
    SECONDS,
    TOLD,
    TROUBLE,
    UNREADABLE,
)

SCENARIOS = [*ODD, *HOOKS, UNREADABLE, *ENDS]


class Pair:
    """The results of both ranks, scenario by scenario."""

    def __init__(self, root: Path) -> None:
        self.root = root
        command = "-m", "tests.healer.two_ranks"
        running = [
            python(*command, rank, root, *SCENARIOS, stderr=subprocess.PIPE) for rank in (0, 1)
        ]
        try:
            self._ends = [each.communicate(timeout=SECONDS * len(SCENARIOS)) for each in running]
        finally:
            for process in running:
                process.kill()

    @property
    def refusals(self) -> list[str]:
        """What each rank says to other options on the ranks."""
        return [json.loads(out.splitlines()[-1]) for out, _ in self._ends]

    def lines(self, rank: int) -> str:
        """What a rank has written on standard error."""
        return self._ends[rank][1]

    def result(self, scenario: str) -> dict[str, Any]:
        """The result, which must be the same on both ranks."""
        logged = []
        for out, errors in self._ends:
            lines = dict(zip(SCENARIOS, out.splitlines(), strict=False))
            assert scenario in lines, errors[-3000:]
            logged.append(json.loads(lines[scenario]))
        assert logged[0] == logged[1]
        return logged[0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(
    ("scenario", "target"),
    [
        ("agree", 15),
        ("listing", 10),
        ("forgets", 15),
        ("rots", 15),
        ("without a disk", 10),
        ("shard", 10),
    ],
)
def test_both_go_back_to_the_newest_common_step(scenario, target, pair):
    logged = pair.result(scenario)
    assert logged["rollbacks"] == 1
    assert logged["step"] == 39
    assert logged["order"].count(BAD) == 1
    (path,) = (pair.root / scenario).glob("*events*.jsonl")
    events = read(path).events
    assert [e["checkpoint"] for e in events if e["kind"] == "rollback"] == [target]
    begun = next(e for e in events if e["kind"] == "incident")
    losses = [float(each["loss"]) for each in begun["of_ranks"]]
    assert [math.isnan(loss) for loss in losses] == [False, True]
    if scenario == "rots":
        assert 15 in [e["step"] for e in events if e["kind"] == "damaged"]
    if scenario == "without a disk":
        (vote,) = (e for e in events if e["kind"] == "vote")
        assert [each["rank"] for each in vote["of_ranks"]] == [1]
        assert "damaged" in vote["why"]


def test_other_options_on_the_ranks_are_refused_on_each(pair):
    assert [each.partition(":")[0] for each in pair.refusals] == [
        "rank 1 has another policy, save_every than rank 0",
        "rank 0 has another policy, save_every than rank 1",
    ]


def test_the_most_severe_of_two_hooks_wins(pair):
    severe, milder = pair.result("severe"), pair.result("milder")
    assert "hook" in severe["stopped"]
    assert (severe["rollbacks"], milder["stopped"], milder["rollbacks"]) == (0, None, 1)


def test_a_batch_that_one_rank_cannot_read_is_replaced_and_both_have_as_many(pair):
    """The first comes again after the rollback. Left out, one rank would wait for a last step."""
    logged = pair.result(UNREADABLE)
    assert (logged["stopped"], logged["rollbacks"], logged["step"]) == (None, 1, 39)
    assert logged["corrupt"] == []
    events = read(pair.root / UNREADABLE / "run.events.jsonl").events
    reports = [each["why"] for e in events if e["kind"] == "vote" for each in e["of_ranks"]]
    for number in CORRUPT:
        problem = f"batch {number} of epoch 0 cannot be read"
        assert sum(problem in each for each in reports) == 1
        assert f"rank 1: fault: data (error): {problem}" in pair.lines(0)


@pytest.mark.parametrize(
    ("scenario", "stopped", "ending"),
    [
        ("terminated", "exit status 143", "signal"),
        ("interrupted", "exit status 130", "interrupted"),
    ],
)
def test_a_signal_to_one_rank_ends_both_at_one_step_with_its_save(scenario, stopped, ending, pair):
    """The signal comes within step TOLD, whose mark is read a step later."""
    logged = pair.result(scenario)
    assert (logged["stopped"], logged["step"]) == (stopped, TOLD + 2)
    events = read(pair.root / scenario / "run.events.jsonl").events
    vote = next(e for e in events if e["kind"] == "vote")
    assert (vote["step"], vote["outcome"]) == (TOLD + 2, "end")
    assert [each["rank"] for each in vote["of_ranks"]] == [1]
    assert [e["step"] for e in events if e["kind"] == "save" and e["why"] == "last"] == [TOLD + 2]
    assert (events[-1]["kind"], events[-1]["ending"]) == ("end", ending)


def test_a_rollback_that_the_last_step_orders_is_done_by_both_before_they_end(pair):
    logged = pair.result(TROUBLE)
    assert (logged["stopped"], logged["rollbacks"]) == ("exit status 143", 1)
    events = read(pair.root / TROUBLE / "run.events.jsonl").events
    (rollback,) = (e for e in events if e["kind"] == "rollback")
    assert (rollback["step"], logged["step"]) == (TOLD + 2, rollback["checkpoint"])
    assert (events[-1]["kind"], events[-1]["ending"]) == ("end", "signal")


def test_a_stop_file_on_one_rank_ends_both_at_one_step_with_its_save(pair):
    """The mark travels with the step after the one in which the file appears."""
    logged = pair.result("stop file")
    assert (logged["stopped"], logged["step"]) == ("exit status 0", TOLD + 3)
    root = pair.root / "stop file"
    events = read(root / "run.events.jsonl").events
    assert [e["step"] for e in events if e["kind"] == "save" and e["why"] == "last"] == [TOLD + 3]
    assert (events[-1]["kind"], events[-1]["ending"]) == ("end", "requested")
    (postmortem,) = root.glob("*postmortem*.json")
    assert f"the stop file {root / 'stop on rank 1'}" in postmortem.read_text()


def test_a_proposal_to_end_is_carried_out_by_all(pair):
    logged = pair.result("proposed")
    assert (logged["stopped"], logged["step"]) == ("exit status 0", TOLD + 2)
    events = read(pair.root / "proposed" / "run.events.jsonl").events
    (vote,) = (e for e in events if e["kind"] == "vote")
    assert (vote["step"], vote["outcome"], vote["why"]) == (TOLD + 2, "end", "the device is needed")
    assert [each["outcome"] for each in vote["of_ranks"]] == ["report", "end"]
