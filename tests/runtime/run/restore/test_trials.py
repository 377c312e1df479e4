"""`without_failed_trials`: a start after a stop undoes what the rollbacks for its trouble tried."""

from typing import Any

from healcore.policy import engine_of
from healcore.runtime.run.engine_states import limits_and_budgets
from healcore.runtime.run.healthy_ranges import Held
from healcore.runtime.run.orders import Order, RollbackRecord
from healcore.runtime.run.record.ledger import Ledger
from healcore.runtime.run.record.run_record import RunRecord, Trials
from healcore.runtime.run.restore.stored import SavedCheckpoint
from healcore.runtime.run.restore.trials import failed_trials, without_failed_trials

ENGINE = engine_of("default")
BEFORE = {"a": ENGINE.to_dict(ENGINE.init())}
"""The engine states before the trials."""
OTHER_TROUBLE = RollbackRecord(
    order=Order(index=50, onset=48, first_alarm_of_cause=48), number=1, step=51, continues_at=40
)
TRIAL = RollbackRecord(
    order=Order(index=90, onset=88, first_alarm_of_cause=88), number=2, step=91, continues_at=80
)
SKIPPED_BEFORE, SKIPPED_BY_TRIAL = [0, 48], [0, 88]


def limited() -> dict[str, Any]:
    """The engine states with the limit of a trial."""
    state = ENGINE.init()
    cut = state.lr._replace(scale=state.lr.scale * 0.25)
    budget = state.budget._replace(lr_cuts=state.budget.lr_cuts - 1)
    return {"a": ENGINE.to_dict(state._replace(lr=cut, budget=budget))}


def newest(*, failed: bool = True) -> RunRecord:
    """The newest record of a run that has stopped at step 95 in spite of one trial."""
    trials = Trials(
        first=1,
        oldest=80,
        engines=limits_and_budgets(BEFORE),
        skipped={"0": [SKIPPED_BEFORE]},
        held=Held(),
        accepted=0,
        accepted_until=0,
        failed=failed,
    )
    ledger = Ledger(
        next_step=95,
        rollbacks=[OTHER_TROUBLE, TRIAL],
        skips=12,
        untrained=9,
        accepted=2,
        accepted_until=94,
        unrepaired=[40, 88],
        not_restored=[50, 90],
    )
    return RunRecord(step=95, ledger=ledger, trials=trials)


def checkpoint() -> SavedCheckpoint:
    """The checkpoint of step 80, whose record the trial has replaced."""
    record = RunRecord(
        step=80,
        ledger=Ledger(next_step=80, rollbacks=[OTHER_TROUBLE, TRIAL], untrained=3),
        skipped={"0": [SKIPPED_BEFORE, SKIPPED_BY_TRIAL]},
    )
    return SavedCheckpoint(80, {}, record, limited(), "", None)


def test_trials_have_failed_only_if_the_run_has_stopped():
    assert failed_trials(None) is None
    assert failed_trials(RunRecord()) is None
    assert failed_trials(newest(failed=False)) is None
    record = newest()
    assert failed_trials(record) is record.trials


def test_without_a_stop_a_checkpoint_is_resumed_as_it_is():
    saved = checkpoint()
    record, engines = without_failed_trials(saved, newest(failed=False))
    assert record is saved.record
    assert engines is saved.engines


def test_limits_and_skipped_batches_of_the_trials_are_undone():
    record, engines = without_failed_trials(checkpoint(), newest())
    assert engines == BEFORE
    assert record.skipped == {"0": [SKIPPED_BEFORE]}


def test_the_rollbacks_of_the_trials_count_no_longer_and_the_earlier_ones_do():
    record, _ = without_failed_trials(checkpoint(), newest())
    assert [each.number for each in record.ledger.rollbacks] == [1, 2], "the report names them"
    assert [each.number for each in record.ledger.in_force] == [1]


def test_the_run_still_counts_its_skips_and_judges_the_end_by_the_steps_of_the_checkpoint():
    record, _ = without_failed_trials(checkpoint(), newest())
    ledger = record.ledger
    assert (ledger.skips, ledger.untrained) == (12, 3)
    assert (ledger.accepted, ledger.accepted_until) == (0, 0)
    assert (ledger.unrepaired, ledger.not_restored) == ([40], [50]), (
        "what begins after step 80 is decided again"
    )


def test_a_record_keeps_the_damage_that_was_not_repaired_and_an_older_record_has_none():
    stored = newest().to_dict()
    assert RunRecord.of(stored).ledger.unrepaired == [40, 88]
    del stored["ledger"]["unrepaired"]
    del stored["ledger"]["not_restored"]
    assert RunRecord.of(stored).ledger.damage_left == ()


def test_a_rollback_undoes_damage_unless_it_comes_back_each_time():
    ledger = newest().ledger
    assert ledger.damage_left == (40, 50, 88, 90)
    ledger.on_rollback(TRIAL, None)  # to step 80
    assert ledger.damage_left == (40, 50, 88)


def test_a_checkpoint_of_another_program_gets_a_record_of_its_step():
    saved = SavedCheckpoint(7, {}, None, {}, "", None)
    record, engines = without_failed_trials(saved, None)
    assert (record.first_step, record.step, engines) == (7, 7, {})
