"""Several checkpoints come to the end of their probation at the same step: how many stay."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.runtime.recovery.simulated_run import EVERY, KEEP, PROBATION, Killed, Listed, Process

STEPS = list(range(0, 28, EVERY))


def waiting(path: Path) -> Process:
    """A run with a candidate at each of `STEPS`, as every step so far was skipped."""
    process = Process(Listed(), path / "healcore.json")
    process.begin()
    for _ in range(STEPS[-1]):
        process.take(alarm=True, skip=True, is_open=False)
    assert [*process.store.saves] == STEPS
    return process


def goes_well(process: Process, steps: int) -> None:
    for _ in range(steps):
        process.take(alarm=False, skip=False, is_open=False)


def good(process: Process) -> list[int]:
    return [each.step for each in process.store.steps() if each.status == "good"]


@pytest.mark.parametrize("damaged", [True, False], ids=["damaged", "not_finite"])
@pytest.mark.parametrize("bad", [STEPS[-1:], STEPS[-3:-1], STEPS[1:], STEPS], ids=str)
def test_the_newest_that_are_intact_stay(tmp_path, bad, damaged):
    process = waiting(tmp_path)
    for step in bad:
        if damaged:
            process.store.corrupt.add(step)
        else:
            process.store.saves[step] = process.store.saves[step]._replace(finite=False)
    goes_well(process, PROBATION)
    assert good(process) == [step for step in STEPS if step not in bad][-KEEP.good :]
    goes_well(process, 40)
    assert len(good(process)) == KEEP.good


@pytest.mark.parametrize("calls", range(2 * len(STEPS)))
def test_a_kill_leaves_one_too_many_at_most(tmp_path, calls):
    process = waiting(tmp_path)
    process.store.calls_left = calls
    with contextlib.suppress(Killed):
        goes_well(process, PROBATION)
    assert len(good(process)) <= KEEP.good + 1
