"""A rank ends alone: the job ends, the next start repeats few steps, and rank 0 says why."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from healcore.events import read
from tests.events.processes import run
from tests.healer.ending_ranks import AT, CASES, EVERY, GRACE, RAISES, TIMEOUT, WORLD
from tests.healer.run_directory import postmortems

ENDED = {1, -signal.SIGTERM, 128 + signal.SIGTERM}
"""Exit statuses of a rank after another one's end; the launcher's SIGTERM may come first."""
SLACK = 60.0
"""Seconds for which a busy machine may delay a start of three ranks."""


class Ranks:
    """What each rank did, case by case."""

    def __init__(self, root: Path) -> None:
        self.root = root
        done = run("-m", "tests.healer.ending_ranks", root, seconds=3600)
        assert done.returncode == 0, done.stderr[-3000:]
        self.of: dict[str, dict[str, Any]] = dict(map(json.loads, done.stdout.splitlines()))

    def events(self, case: str) -> list[Any]:
        """The events of the run that ended on rank 1, by rank 0."""
        events = read(self.root / case / "store" / "healcore.events.jsonl").events
        return [each for each in events if each["run"] == events[0]["run"]]

    def postmortem(self, case: str) -> dict[str, Any]:
        """The postmortem of that run."""
        run = self.events(case)[0]["run"]
        return next(each for each in postmortems(self.root / case / "store") if each["run"] == run)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(tmp_path_factory.mktemp("ending"))


@pytest.mark.parametrize("case", CASES)
def test_the_job_ends_and_the_next_run_is_as_if_nothing_had_happened(case: str, ranks: Ranks):
    found = ranks.of[case]
    if case == "terminated":
        # The launcher's SIGTERM may reach the other ranks behind the end of their runs.
        assert found["statuses"][1] == 128 + signal.SIGTERM
        assert {*found["statuses"]} <= {128 + signal.SIGTERM, -signal.SIGTERM}
    elif case in ("killed", "hangs", "stopped"):
        assert found["statuses"][1] == -signal.SIGKILL
    assert {found["statuses"][0], found["statuses"][2]} <= ENDED
    assert found["same"] == [True] * WORLD
    assert found["took"] < TIMEOUT + GRACE + SLACK


@pytest.mark.parametrize("case", CASES)
def test_the_work_that_is_lost_is_at_most_the_distance_of_two_checkpoints(case: str, ranks: Ranks):
    (resumed,) = {*ranks.of[case]["resumed"]}
    done = AT + (case == "between") + 2 * (case == "terminated")
    assert 0 <= done - resumed <= EVERY
    assert (resumed == done) == (case == "terminated"), "a signal is voted on, and saves"


@pytest.mark.parametrize("case", RAISES)
def test_the_postmortem_of_rank_0_has_the_exception_of_the_rank_that_raised(case, ranks: Ranks):
    events, found = ranks.events(case), ranks.postmortem(case)
    assert (events[-1]["kind"], events[-1]["ending"]) == ("end", "exception")
    (fault,) = (each for each in events if each["kind"] == "fault")
    assert fault["problem"].startswith("the loop raised on rank 1: ")
    of_ranks = {each["rank"]: each for each in events[-1]["of_ranks"]}
    assert set(of_ranks) >= {0, 1}
    assert found["exception"].startswith("rank 1:\n"), "of the rank that ended first"
    assert "rank 0:\n" in found["exception"]
    assert ("no memory" if case == "loader" else "Spoilt") in found["diagnosis"]


@pytest.mark.parametrize(
    ("case", "ending", "part"),
    [
        ("stop", "stopped", "rank 1: the user has seen enough"),
        ("terminated", "signal", "signal 15"),
        ("killed", "exception", "the connection to another rank broke"),
        ("unequal", "exception", "rank 1: its loop has ended"),
        ("breaks", "exception", "rank 1: its loop has ended"),
        ("hangs", "exception", "rank 0: RuntimeError"),
    ],
)
def test_the_postmortem_says_what_has_ended_the_run(case, ending, part, ranks: Ranks):
    found = ranks.postmortem(case)
    assert found["ending"] == ending
    assert part in " ".join(found["diagnosis"].split())


@pytest.mark.parametrize("case", CASES)
def test_no_note_is_left_once_it_is_read(case, ranks: Ranks):
    assert not list((ranks.root / case / "store").glob("healcore.*.rank*.json"))
