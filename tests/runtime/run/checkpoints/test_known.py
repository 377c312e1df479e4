"""`KnownCheckpoints`: which checkpoints are known-good, and which a rollback could restore."""

from typing import Any

import pytest

from healcore.events import Log
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run.checkpoints.known import KnownCheckpoints
from healcore.runtime.run.record.run_record import RunRecord
from healcore.runtime.run_options import HostPolicy
from healcore.runtime.store.checkpoints import CheckpointDamaged
from tests.healer.training_loops import rules
from tests.runtime.run.simulated_run import Listed

PROBATION = 4


class Checkpoints:
    """The known checkpoints of a run whose store is a list."""

    def __init__(self, *steps: int) -> None:
        assert rules().rollback.probation == PROBATION
        self.store, self.record, self.events = Listed(), RunRecord(), []
        self.ledger = self.record.ledger
        log: Any = RunLog(Log(None), console=False)
        log.event = lambda kind, **fields: self.events.append((kind, fields["step"]))
        self.known = KnownCheckpoints(
            policy=HostPolicy.of(rules()),
            store=self.store,
            log=log,
            record=self.record,
            ledger=self.ledger,
        )
        self.known.begin_attempt(0)
        for step in steps:
            self.known.add(step)

    def after(self, steps: int, *, unhealthy: tuple[int, ...] = ()) -> int | None:
        """The newest known-good checkpoint after so many steps."""
        self.ledger.next_step, self.ledger.unhealthy = steps, [*unhealthy]
        self.known.end_due_probation()
        return self.known.last_good_step


def test_a_checkpoint_is_known_good_after_its_probation():
    run = Checkpoints(0, 5)
    assert [run.after(steps) for steps in (3, 4, 8, 9)] == [None, 0, 0, 5]
    assert run.events == [("good", 0), ("good", 5)]


def test_an_unhealthy_step_makes_a_probation_one_step_longer():
    run = Checkpoints(0)
    assert [run.after(steps, unhealthy=(2,)) for steps in (4, 5)] == [None, 0]


def test_no_probation_ends_while_an_incident_is_open():
    run = Checkpoints(0)
    run.ledger.open = True
    assert run.after(9) is None
    run.ledger.open = False
    assert run.after(9) == 0


def test_steps_after_the_onset_of_a_trouble_end_no_probation():
    run = Checkpoints(0, 5)
    run.ledger.next_step = 9
    run.known.end_probation(before=8)
    assert run.known.last_good_step == 0


def test_a_checkpoint_with_nan_is_never_known_good():
    run = Checkpoints(0, 5)
    run.store.bad.append((5, ("weights",)))
    assert run.after(9) == 0
    assert run.known.restorable == {0}
    assert run.known.nonfinite == [(5, ("weights",))]


def test_a_rollback_abandons_later_checkpoints_and_what_was_known_of_them():
    run = Checkpoints(0, 5, 10)
    assert run.after(14) == 10
    run.known.begin_attempt(5)
    assert run.known.last_good_step == 5
    assert run.known.restorable == {0, 5}
    assert run.record.attempts == [0, 5]


def test_checkpoints_on_probation_are_those_after_the_newest_known_good_one():
    run = Checkpoints(0, 5, 10)
    assert run.after(9) == 5
    assert run.known.on_probation == [10]


@pytest.mark.parametrize(
    ("path", "reports"),
    [("runs/step-5", 1), ("memory", 2)],
    ids=["a directory", "a copy in memory"],
)
def test_damage_of_a_directory_is_reported_once_and_a_copy_in_memory_has_no_name(path, reports):
    run = Checkpoints(5)
    for _ in range(2):
        run.known.report_damage(CheckpointDamaged(5, path, "a file", "is damaged"))
    assert run.events == [("damaged", 5)] * reports


def test_a_directory_that_loses_its_other_copy_too_is_reported_again():
    run = Checkpoints(5)
    error = CheckpointDamaged(5, "runs/step-5", "a file", "is damaged")
    for other_copy in (True, True, False, False):
        run.known.report_damage(error, other_copy=other_copy)
    assert run.events == [("damaged", 5)] * 2
    assert run.known.damage == [error]


def test_a_lost_checkpoint_is_not_restorable_until_its_step_is_saved_again():
    run = Checkpoints(0, 5)
    run.known.lose(CheckpointDamaged(5, "runs/step-5", "a file", "is damaged"))
    assert run.known.restorable == {0}
    run.known.add(5)
    assert run.known.restorable == {0, 5}
