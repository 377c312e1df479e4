"""Random histories of a run against a plain oracle: rollback targets and kept checkpoints."""

import contextlib
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from healcore.runtime.run.checkpoints.saver import SaveReason
from healcore.runtime.run.record.run_record import RunRecord
from healcore.runtime.store.checkpoints import NoGoodCheckpoint
from tests.runtime.run.simulated_run import EVERY, KEEP, PROBATION, REGION, Killed, Listed, Process


class Back(NamedTuple):
    onset: int
    target: int
    step: int


class History(RuleBasedStateMachine):
    """The run, and what the oracle knows: health of each step, past rollbacks, who was good."""

    @initialize()
    def begin(self) -> None:
        self.store = Listed()
        self.process = Process(self.store)
        self.process.begin()
        self.healthy: list[bool] = []
        self.skipped: list[int] = []
        self.back: list[Back] = []
        self.onset: Any = None
        self.only_skips = False
        self.good: set[int] = set()
        self.recorded: set[int] = set()
        """Known-good according to the newest record, as a restart would find them."""
        self.stays: set[int] = set()
        self.over = False

    # -- what happens ---------------------------------------------------------------------------

    @precondition(lambda self: not self.over)
    @rule(steps=st.integers(1, 14))
    def goes_well(self, steps: int) -> None:
        for _ in range(steps):
            self.onset, self.only_skips = None, False
            self.healthy.append(True)
            self.process.take(alarm=False, skip=False, is_open=False)

    @precondition(lambda self: not self.over)
    @rule()
    def one_is_skipped(self) -> None:
        self.only_skips = self.only_skips or self.onset is None
        self.onset = len(self.healthy) if self.onset is None else self.onset
        self.skipped.append(len(self.healthy))
        self.healthy.append(False)
        self.process.take(alarm=True, skip=True, is_open=False)

    @precondition(lambda self: not self.over)
    @rule(steps=st.integers(1, 5), quiet=st.integers(0, 2))
    def trouble(self, steps: int, quiet: int) -> None:
        """An incident that opens, or continues; steps that were only skipped are no part of it."""
        if self.onset is None or self.only_skips:
            self.onset = len(self.healthy)
        self.only_skips = False
        for alarm in [True] * steps + [False] * quiet:
            self.healthy.append(not alarm)
            self.process.take(alarm=alarm, skip=False, is_open=True)

    @precondition(lambda self: not self.over)
    @rule(finite=st.booleans())
    def saves_besides(self, finite: bool) -> None:
        if self.process.step in self.good:
            return  # where it went back to, unchanged
        self.store.finite = finite or self.onset is None
        self.process.save(SaveReason.REQUESTED)
        self.store.finite = True

    @precondition(lambda self: not self.over and self.onset is not None)
    @rule(depth=st.integers(1, 4), calls=st.integers(-1, 12))
    def goes_back(self, depth: int, calls: int) -> None:
        """A rollback as ordered; killed after some number of changes, if it makes so many."""
        process = self.process
        process.known_checkpoints.end_probation(before=self.onset)
        self.what_is_good()
        expected = self.target(depth)
        self.store.calls_left = calls
        try:
            arrival = process.go_back(depth)
        except Killed:
            records = [RunRecord.of(each) for each in self.store.stored.values()]
            done = max(len(each.ledger.rollbacks) for each in records)
            self.start(expected if done > len(self.back) else None)
        except NoGoodCheckpoint:
            assert expected is None
            self.over = True
            return
        else:
            assert arrival.checkpoint == expected
            self.went(expected)
        finally:
            self.store.calls_left = -1

    @precondition(lambda self: not self.over)
    @rule(during=st.integers(0, 6), steps=st.integers(0, 6))
    def is_killed(self, during: int, steps: int) -> None:
        self.store.calls_left = during
        with contextlib.suppress(Killed):
            self.goes_well(steps)
        self.store.calls_left = -1
        self.the_way_down_stays_open()  # before the count of steps goes back
        self.start(None)

    # -- the oracle -----------------------------------------------------------------------------

    def target(self, depth: int) -> int | None:
        """The checkpoint that it must return to; None if there is none."""
        usable = [
            s for s in self.process.known_checkpoints.listed() if s.finite and s.step <= self.onset
        ]
        good = [s.step for s in usable if s.status == "good"]
        # The run's first snapshot before what this process has gone on from.
        first = self.process.run.record.first_step
        begun = first, self.process.known_checkpoints.started_from
        unproven = {s.step for s in usable if s.status == "candidate"}
        last = sorted({step for step in begun if step in unproven}, reverse=True)
        tried = [past.target for past in self.back if self.onset <= past.step + REGION]
        there = sorted({*good, *last})
        if not there:
            return None
        wanted = good[-min(depth, len(good))] if good else last[0]
        if tried and wanted >= min(tried):
            deeper = [step for step in good if step < min(tried)][-1:]
            deeper = deeper or [step for step in last if step < min(tried)]
            wanted = deeper[0] if deeper else there[0]
        return wanted

    def went(self, target: int | None) -> None:
        assert target is not None
        self.back.append(Back(self.onset, target, len(self.healthy)))
        assert target <= self.onset
        del self.healthy[target:]
        # For the next one in this region, which is to go deeper.
        saves = self.process.known_checkpoints.listed()
        deeper = [s.step for s in saves if s.status == "good" and s.step < target]
        self.stays = {target, *deeper[-1:]}
        self.onset, self.only_skips = None, False

    def start(self, expected: int | None) -> None:
        """A new process, with what the one before has left on disk."""
        self.what_is_good()
        self.process = Process(self.store)
        saves = self.store.checkpoints()
        newest = [s.step for s in saves if s.finite and s.status != "abandoned"]
        # What has become known-good since the last save has to do so again.
        self.good = self.recorded
        self.process.begin()
        if expected is None:
            assert self.process.step == (newest[-1] if newest else 0)
            del self.healthy[self.process.step :]
            self.onset, self.only_skips = None, False
        else:
            assert self.process.step == expected
            self.went(expected)

    # -- what must hold -------------------------------------------------------------------------

    @invariant()
    def what_is_good(self) -> None:
        good = {s.step: s for s in self.process.known_checkpoints.listed() if s.status == "good"}
        for step in good.keys() - self.good:
            assert good[step].finite
            assert sum(self.healthy[step:]) >= PROBATION
        assert good or not self.good, "there was a known-good one"
        self.good = {*good}
        recorded = {s.step for s in self.store.checkpoints() if s.status == "good"}
        assert recorded or not self.recorded, "a restart would know a known-good one"
        self.recorded = recorded

    @invariant()
    def what_is_remembered(self) -> None:
        if self.over:
            return
        ledger = self.process.ledger
        assert self.process.step == len(self.healthy)
        assert [(e.onset, e.checkpoint, e.step) for e in ledger.rollbacks] == self.back
        self.skipped = [step for step in self.skipped if step < self.process.step]
        assert ledger.skips >= len(self.skipped)
        unhealthy = {step for step, well in enumerate(self.healthy) if not well}
        # Up to the newest known-good checkpoint, after which the trouble of a rollback began.
        on_probation = self.process.known_checkpoints.on_probation
        needed = min([max(self.good, default=0), *on_probation])
        assert {step for step in unhealthy if step >= needed} <= {*ledger.unhealthy} <= unhealthy
        assert RunRecord.of(RunRecord(ledger=ledger).to_dict()).ledger == ledger

    @invariant()
    def the_way_down_stays_open(self) -> None:
        """Only while the run is in the region: checkpoints deleted beyond it stay deleted."""
        if self.stays and len(self.healthy) > self.back[-1].step + REGION:
            self.stays = set()
        assert self.stays <= self.store.saves.keys()

    @invariant()
    def not_too_much(self) -> None:
        good = [s for s in self.store.checkpoints() if s.status == "good"]  # at the last save
        # Where it went and the next deeper one besides; more only after a kill before the
        # deletion, until the first save of the next process.
        saved = any(event["kind"] == "save" for event in self.process.events)
        assert len(good) <= KEEP.good + 2 or not saved


TestHistory = pytest.mark.slow(History.TestCase)
TestHistory.settings = settings(
    max_examples=30,
    stateful_step_count=40,
    derandomize=True,  # the same histories in every run; others under stress
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.stress
class TestLongHistory(TestHistory):
    settings = settings(max_examples=3000, stateful_step_count=80, derandomize=False)


STEPS = list(range(0, 28, EVERY))


def begun() -> Process:
    process = Process(Listed())
    process.begin()
    return process


def waiting() -> Process:
    """A run with a candidate at each of `STEPS`, as every step so far was skipped."""
    process = begun()
    for _ in range(STEPS[-1]):
        process.take(alarm=True, skip=True, is_open=False)
    assert [*process.store.saves] == STEPS
    return process


def goes_well(process: Process, steps: int) -> None:
    for _ in range(steps):
        process.take(alarm=False, skip=False, is_open=False)


def good(process: Process) -> list[int]:
    return [each.step for each in process.store.checkpoints() if each.status == "good"]


@pytest.mark.parametrize("bad", [STEPS[-1:], STEPS[-3:-1], STEPS[1:], STEPS], ids=str)
def test_the_newest_that_are_finite_stay(bad):
    process = waiting()
    for step in bad:
        process.store.saves[step] = process.store.saves[step]._replace(nonfinite=("w",))
    goes_well(process, EVERY)  # to the next save
    assert good(process) == [step for step in STEPS if step not in bad][-KEEP.good :]
    goes_well(process, 40)
    assert len(good(process)) == KEEP.good


def test_healthy_steps_after_an_onset_prove_nothing():
    process = begun()
    goes_well(process, 2 * EVERY + PROBATION - 1)
    for alarm in (True, False, False):
        process.take(alarm=alarm, skip=False, is_open=True)
    assert process.go_back(1).checkpoint == EVERY


def test_after_a_rollback_the_probation_begins_again():
    process = begun()
    goes_well(process, 3 * EVERY + PROBATION)
    process.take(alarm=True, skip=False, is_open=True)
    assert process.go_back(2).checkpoint == 2 * EVERY
    goes_well(process, EVERY)
    assert good(process)[-1] == 2 * EVERY


def test_the_next_older_one_stays_for_a_second_rollback():
    process = waiting()
    goes_well(process, PROBATION)
    process.take(alarm=True, skip=False, is_open=True)
    assert process.go_back(2).checkpoint == STEPS[-2]
    goes_well(process, 3 * EVERY + 1)
    assert {STEPS[-3], STEPS[-2]} <= {*good(process)} < {*STEPS[-3:], *range(STEPS[-1], 100)}


def test_an_alarm_delays_a_save_by_two_steps():
    process = begun()
    delayed = []
    goes_well(process, EVERY - 1)
    process.take(alarm=True, skip=True, is_open=False)
    for _ in range(3):
        delayed.append(process.run.schedule.delayed)
        goes_well(process, 1)
    assert delayed == [True, True, False]


def test_a_run_that_cannot_save_says_so_at_twice_the_distance_each_time():
    process = begun()
    for process.run.progress.step in range(1, 25 * EVERY):
        assert not process.run.schedule.due()
    assert [e["step"] for e in process.events if e["kind"] == "problem"] == [12, 24, 48, 96]


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
