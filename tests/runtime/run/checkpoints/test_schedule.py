"""`SaveSchedule`: at which steps a regular save is due."""

from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from healcore.events import Log
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run.checkpoints import schedule
from healcore.runtime.run.checkpoints.schedule import SaveReason, SaveSchedule
from healcore.runtime.run.progress import RunProgress
from healcore.runtime.run.run_record import RunRecord
from healcore.runtime.run_options import HostPolicy
from healcore.runtime.store.ranks import Alone
from tests.healer.training_loops import rules


class Steps:
    """The steps of a run that saves where its schedule says so, and does nothing else."""

    def __init__(self, every: int | None, *, observes: bool = False) -> None:
        self.record = RunRecord()
        self.progress = RunProgress()
        self.may_save = True
        driver: Any = SimpleNamespace(may_save=lambda every: self.may_save)
        run: Any = SimpleNamespace(
            policy=HostPolicy.of(rules(mode="observe" if observes else "heal")),
            driver=driver,
            ranks=Alone(),
            log=RunLog(Log(None), console=False),
            record=self.record,
            progress=self.progress,
        )
        self.schedule = SaveSchedule(run, every)

    def save(self, why: SaveReason = SaveReason.REGULAR) -> None:
        with self.schedule.saving(why):
            pass

    def saved_until(self, end: int, *, alarms: Collection[int] = ()) -> Iterator[int]:
        """Takes the steps before `end`, some with an alarm; yields the number of steps at saves."""
        while self.progress.step < end:
            if self.progress.step in alarms:
                self.record.journal.unhealthy.append(self.progress.step)
            self.progress.count(1)
            if self.schedule.due():
                self.save()
                yield self.progress.step


def begun(every: int | None = 4, **options: Any) -> Steps:
    """A run that has saved its first snapshot at step 0."""
    steps = Steps(every, **options)
    steps.save()
    return steps


def test_a_save_is_due_at_each_multiple_of_the_interval():
    assert [*begun().saved_until(13)] == [4, 8, 12]


def test_a_late_save_does_not_move_the_saves_after_it():
    steps = begun()
    steps.may_save = False  # an accumulation
    assert [*steps.saved_until(6)] == []
    steps.may_save = True
    assert [*steps.saved_until(13)] == [7, 8, 12]


def test_a_save_waits_for_two_steps_without_an_alarm():
    assert [*begun().saved_until(9, alarms=[3])] == [6, 8]


def test_lasting_alarms_delay_a_save_by_one_interval_at_most():
    assert [*begun().saved_until(17, alarms=range(17))] == [8, 16]


def test_a_policy_that_only_observes_delays_no_save():
    assert [*begun(observes=True).saved_until(9, alarms=range(9))] == [4, 8]


def test_a_save_of_another_kind_moves_no_regular_save():
    steps = begun()
    assert [*steps.saved_until(6)] == [4]
    steps.save(SaveReason.REQUESTED)
    assert (steps.schedule.last_saved, steps.schedule.last_regular) == (6, 4)
    assert [*steps.saved_until(9)] == [8]


def test_a_new_structure_of_the_model_is_saved_at_the_next_step():
    steps = begun()
    assert [*steps.saved_until(1)] == []
    steps.schedule.after_change = True
    assert [*steps.saved_until(9)] == [2, 4, 8]


def test_without_an_interval_a_run_saves_once_per_probation():
    assert rules().rollback.probation == 4
    assert [*begun(None).saved_until(9)] == [4, 8]


@pytest.mark.parametrize(
    ("every", "saved"),
    [
        pytest.param(None, [8], id="the run chooses: saves may take 10 s and 1 % of its time"),
        pytest.param(4, [4, 8], id="the user has chosen the interval"),
    ],
)
def test_slow_saves_are_skipped_until_they_are_one_percent_of_the_time(every, saved, monkeypatch):
    now = 0.0
    monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=lambda: now))
    steps = Steps(every)
    with steps.schedule.saving(SaveReason.REGULAR):
        now = 30.0
    now = 1990.0  # 10 s and 1 % of 1990 s are 29.9 s
    found = [*steps.saved_until(5)]
    now = 2010.0  # 30.1 s
    assert [*found, *steps.saved_until(9)] == saved
