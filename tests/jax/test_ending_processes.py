"""A process that ends alone: the job ends, and the next start repeats few steps."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from healcore.events import read
from tests.healer.run_directory import postmortems
from tests.jax.ending_processes import FAULTS, LENGTH, REGULAR
from tests.runtime.store.programs import run

DEFAULT = ("loss", "both", "none")


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
        self._faults = faults
        self._seen = dict(map(json.loads, done.stdout.splitlines()))
        found = read(root / "run" / "healcore.events.jsonl").events
        runs = [each["run"] for each in found if each["kind"] == "start"]
        self._postmortems = {each["run"]: each for each in postmortems(root / "run")}
        self._runs = dict(zip(faults, runs, strict=True))

    def statuses(self, fault: str) -> list[int]:
        """How both processes ended; of an abort the negative number of its signal."""
        return self._seen[fault]["statuses"]

    def of(self, fault: str) -> list[dict[str, Any]]:
        """What both processes saw, which came to their end."""
        assert self.statuses(fault) == [0, 0], self.logs
        return self._seen[fault]["seen"]

    def postmortem(self, fault: str) -> dict[str, Any]:
        return self._postmortems[self._runs[fault]]

    def resumed_after(self, fault: str) -> int:
        """The step from which the next start that came to its end has resumed, on both."""
        later = self._faults[self._faults.index(fault) + 1 :]
        following = next(each for each in later if self.statuses(each) == [0, 0])
        (step,) = {each["resumed"] for each in self.of(following)}
        return step


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    return Starts(tmp_path_factory.mktemp("ending"), DEFAULT)


def test_jax_ends_both_after_an_exception_in_one_and_few_steps_are_lost(starts: Starts):
    assert 0 not in starts.statuses("loss"), starts.logs
    assert 0 <= FAULTS["loss"] - starts.resumed_after("loss") <= REGULAR


def test_the_postmortem_has_the_exception_although_jax_aborts_the_processes(starts: Starts):
    found = starts.postmortem("loss")
    assert found["exception"].startswith("rank 1:\n")
    assert "rank 1: ValueError: a wrong batch" in " ".join(found["diagnosis"].split())


def test_an_exception_in_both_is_reported_and_few_steps_are_lost(starts: Starts):
    assert [each["raised"][0] for each in starts.of("both")] == ["ValueError"] * 2
    assert starts.postmortem("both")["ending"] == "exception"
    assert 0 <= FAULTS["both"] - starts.resumed_after("both") <= REGULAR


def test_the_run_ends_as_if_nothing_had_happened(starts: Starts):
    for each in starts.of("none"):
        assert each["step"] == LENGTH
        assert each["state"] == each["undisturbed"]


@pytest.mark.stress
def test_every_end_of_one_process_ends_both(tmp_path: Path):
    starts = Starts(tmp_path, tuple(FAULTS))
    for fault in ("loss", "killed", "memory", "loader"):
        assert 0 not in starts.statuses(fault), starts.logs
        assert starts.postmortem(fault)["ending"] in ("exception", "killed")
    assert [each["code"] for each in starts.of("signal")] == [143, 143]
    assert len({each["resumed"] for each in starts.of("none")}) == 1
    for each in starts.of("none"):
        assert each["state"] == each["undisturbed"]
