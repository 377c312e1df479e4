"""A process that ends alone makes the others end with it; all save the same step or none."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from healcore.runtime.events import read
from tests.jax.ending_processes import BOUND, FAULTS, LENGTH, REGULAR
from tests.runtime.store.programs import run

DEFAULT = ("loss", "both", "none")
SAVED = {"both": FAULTS["both"]}
"""Step of the save at the end, where there is one; otherwise the newest regular one is there."""


class Starts:
    """Starts of one run, each of which has resumed where the one before had ended."""

    def __init__(self, root: Path, faults: tuple[str, ...]) -> None:
        jaxlib = importlib.import_module("jaxlib._jax")
        if not hasattr(jaxlib, "make_gloo_tcp_collectives"):
            pytest.skip("this jaxlib has no collectives of several processes on CPUs (gloo)")
        done = run("tests.jax.ending_processes", root, *faults)
        self.logs = done.stderr[-2000:] + "".join(
            each.read_text()[-2000:] for each in sorted(root.glob("*.log"))
        )
        self._seen = dict(map(json.loads, done.stdout.splitlines()))
        found = read(root / "run" / "healcore.events.jsonl").events
        ends = [i for i, each in enumerate(found) if each["kind"] == "end"]
        self.events = [found[a + 1 : b + 1] for a, b in zip([-1, *ends], ends, strict=False)]

    def of(self, fault: str) -> list[dict[str, Any]]:
        """What both processes saw; they have ended as a program does, in time."""
        assert self._seen[fault]["statuses"] == [0, 0], self.logs
        seen = self._seen[fault]["seen"]
        assert all(each["took"] < BOUND for each in seen)
        return seen


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    return Starts(tmp_path_factory.mktemp("ending"), DEFAULT)


def test_an_exception_in_one_process_ends_both_and_nothing_is_saved(starts: Starts):
    waiting, raised = starts.of("loss")
    assert raised["raised"] == ["ValueError", "a wrong batch"]
    assert "Gloo" in waiting["raised"][1], "it left the collective of a step"
    assert [waiting["code"], raised["code"]] == [1, 1]
    events = starts.events[0]
    problems = [each["problem"] for each in events if each["kind"] == "problem"]
    assert "rank 0: the exception interrupted" in problems[-1]
    end = events[-1]
    assert (end["ending"], end["step"]) == ("exception", FAULTS["loss"])
    assert "a wrong batch" in {each["rank"]: each for each in end["of_ranks"]}[1]["why"]
    assert {each["resumed"] for each in starts.of("both")} == {REGULAR}


def test_an_exception_in_both_saves_the_step_that_both_have_done(starts: Starts):
    assert [each["raised"][0] for each in starts.of("both")] == ["ValueError"] * 2
    (fault,) = (each for each in starts.events[1] if each["kind"] == "fault")
    assert fault["answer"] == "save"
    assert {each["resumed"] for each in starts.of("none")} == {SAVED["both"]}


def test_the_run_ends_as_if_nothing_had_happened(starts: Starts):
    for each in starts.of("none"):
        assert each["step"] == LENGTH
        assert each["state"] == each["undisturbed"]


@pytest.mark.stress
def test_every_end_of_one_process_ends_both(tmp_path: Path):
    starts = Starts(tmp_path, tuple(FAULTS))
    for fault in ("loss", "memory", "loader"):
        codes = [each["code"] for each in starts.of(fault)]
        assert codes == [1, 1], starts.logs
    assert [each["code"] for each in starts.of("signal")] == [143, 143]
    assert len({each["resumed"] for each in starts.of("none")}) == 1
    for each in starts.of("none"):
        assert each["state"] == each["undisturbed"]
