"""Several checkpoints come to the end of their probation at the same step: how many stay."""

from __future__ import annotations

import contextlib

import pytest

from tests.runtime.recovery.simulated_run import EVERY, KEEP, PROBATION, Killed, Listed, Process

STEPS = list(range(0, 28, EVERY))


def waiting() -> Process:
    """A run with a candidate at each of `STEPS`, as every step so far was skipped."""
    process = Process(Listed())
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


@pytest.mark.parametrize("bad", [STEPS[-1:], STEPS[-3:-1], STEPS[1:], STEPS], ids=str)
def test_the_newest_that_are_finite_stay(bad):
    process = waiting()
    for step in bad:
        process.store.saves[step] = process.store.saves[step]._replace(finite=False)
    goes_well(process, EVERY)  # to the next save
    assert good(process) == [step for step in STEPS if step not in bad][-KEEP.good :]
    goes_well(process, 40)
    assert len(good(process)) == KEEP.good


def test_nothing_is_deleted_for_a_damaged_one():
    process = waiting()
    process.store.corrupt.add(STEPS[-1])
    goes_well(process, EVERY)
    assert good(process) == STEPS
    assert [e["step"] for e in process.events if e["kind"] == "damaged"] == STEPS[-1:]
    goes_well(process, EVERY + 1)
    assert good(process)[-1] > STEPS[-1]
    assert len(good(process)) == KEEP.good


@pytest.mark.parametrize("calls", range(2 * len(STEPS)))
def test_a_kill_leaves_only_what_is_not_deleted_yet(calls):
    process = waiting()
    process.store.calls_left = calls
    with contextlib.suppress(Killed):
        goes_well(process, PROBATION + EVERY)
    process.store.calls_left = -1
    assert good(process)[-KEEP.good :] in ([], STEPS[-KEEP.good :])
    again = Process(process.store)
    again.begin()
    goes_well(again, PROBATION + 2 * EVERY)
    assert len(good(again)) == KEEP.good
