"""A rank that ends alone makes the others end with it, and all save the same state or none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from healcore.runtime.events import read
from tests.healer.ending_ranks import AT, CASES, GOES, SECONDS, WAIT_S, WORLD
from tests.torch.forked_ranks import run_ranks

SAVED = {
    "forward": AT,
    "FSDP2": AT,
    "backward": AT,
    "between": AT + 1,
    "loader": AT,
    "waits for data": AT,
    "terminated": AT + 2,
    "slow disk": AT,
    "unequal": AT,
    "breaks": AT,
}
"""Step of the save at the end; the others resume from the last regular one."""
EARLY = ("unequal", "breaks")
"""Rank 1's loop ends while the others go on."""
SIGNALS = ("waits for data", "terminated")
REGULAR = 5


class Ranks:
    """What each rank did, case by case."""

    def __init__(self, root: Path) -> None:
        self.root = root
        found = run_ranks(
            "tests.healer.ending_ranks", root, world=WORLD, seconds=SECONDS * len(CASES)
        )
        self._errors = "\n".join(errors[-3000:] for _, errors in found)
        self._outcomes = [dict(map(json.loads, out.splitlines())) for out, _ in found]

    def of(self, case: str) -> list[dict[str, Any]]:
        assert all(case in each for each in self._outcomes), self._errors
        return [each[case] for each in self._outcomes]

    def events(self, case: str) -> list[Any]:
        """Those of the run that ended on rank 1, by rank 0."""
        events = read(self.root / case / "healcore.events.jsonl").events
        return [each for each in events if each["run"] == events[0]["run"]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(tmp_path_factory.mktemp("ending"))


@pytest.mark.parametrize("case", CASES)
def test_all_end_soon_and_the_next_run_is_as_if_nothing_had_happened(case: str, ranks: Ranks):
    outcomes = ranks.of(case)
    assert {each["resumed"] for each in outcomes} == {SAVED.get(case, REGULAR)}
    assert all(each["same"] for each in outcomes)
    assert {each["code"] for each in outcomes} == ({143} if case in SIGNALS else {1})
    late = 3 * WAIT_S  # torch's own time-out is half an hour
    assert all(each["took"] < late for each in outcomes)


def test_groups_may_overlap(ranks: Ranks):
    """When they make a group, ranks may have made different numbers of others."""
    assert ranks.of("pairs") == [[[0, 1], [0, 2]], [[0, 1], [1, 2]], [[1, 2], [0, 2]]]


@pytest.mark.parametrize("case", CASES)
def test_one_file_says_why_with_what_every_rank_has_seen(case: str, ranks: Ranks):
    events = ranks.events(case)
    end = events[-1]
    assert end["kind"] == "end"
    if case == "terminated":
        return  # they agree within the run
    of_ranks = {each["rank"]: each for each in end["of_ranks"]}
    assert set(of_ranks) >= {0, 1}
    endings = {"waits for data": "signal", "stop": "stopped"} | dict.fromkeys(EARLY, "stopped")
    assert end["ending"] == of_ranks[1]["outcome"] == endings.get(case, "exception")
    problems = [each["problem"] for each in events if each["kind"] == "problem"]
    if case == "update":
        assert "rank 1: the exception interrupted" in problems[-1]
    elif case in EARLY:
        (stop,) = (each for each in events if each["kind"] == "stop")
        assert stop["why"].startswith("rank 1: its loop has ended, and rank ")
    elif case == "absent":
        assert "rank 2 has not ended" in problems[-1]
    elif case in GOES:
        assert "rank 2 was not ready in time, or has gone" in problems[-1]
    else:
        assert not problems
    if end["ending"] == "exception":
        (fault,) = (each for each in events if each["kind"] == "fault")
        assert "rank 1" in fault["problem"]
        assert fault.get("answer") == ("save" if case in SAVED else None)
        (found,) = (ranks.root / case).glob(f"*postmortem.{end['run']}.json")
        trace = json.loads(found.read_text())["exception"]
        assert trace.startswith("rank 1:\n"), "of the rank that ended first"
        assert "rank 0:\n" in trace
