"""What the ledger knows of skipped steps, incidents and earlier rollbacks."""

import pytest

from healcore.core.decision import Cause
from healcore.core.engine.incident import incident_causes
from healcore.core.step_record import Why
from healcore.policy import load
from healcore.runtime.run.dispatch_queue import StepResult
from healcore.runtime.run.journal import Journal, Ledger
from healcore.runtime.run.trouble import RollbackRecord, Trouble
from tests.healer.step_records import record

SKIPPED = record(cause=Cause.NONFINITE_GRAD, why=Why.POLICY)
MICRO_STEP = record(why=Why.NOT_DUE)
TRAINED = record()


@pytest.mark.parametrize(
    ("last", "onset"),
    [
        pytest.param(MICRO_STEP, 3, id="the row goes on"),
        pytest.param(TRAINED, 13, id="a trained step ends the row"),
    ],
)
def test_a_row_of_skips_goes_on_through_the_micro_steps_of_an_accumulation(last, onset):
    """Skipped steps would seem interrupted, and the trouble to begin later than it did."""
    journal = Journal()
    update = [MICRO_STEP, MICRO_STEP, MICRO_STEP, SKIPPED]
    for index, step in enumerate([*update, *update, *update, last]):
        journal.add(StepResult(index, [step], ()))
    assert journal.first_consecutive(journal.next_step - 1) == onset


@pytest.mark.parametrize("alert", [Cause.RECORDS, Cause.DIVERGENCE], ids=lambda alert: alert.name)
def test_an_alert_without_consequences_begins_no_incident_within_skipped_steps(alert):
    """One long incident would be told as many, each with an onset of its own."""
    journal, ledger = Journal(), Ledger()
    opening = incident_causes(load("default").engine().config)
    for index in range(3, 13):
        causes = Cause.NONFINITE_GRAD
        if index == 6:
            causes |= alert
        skip = record(cause=causes, why=Why.POLICY)
        result = StepResult(index, [skip], ())
        ledger.add(result, journal.add(result, opening), is_open=journal.open)

    (incident,) = ledger.incidents
    assert (incident.onset, incident.only_skips) == (3, True)
    assert journal.first_consecutive(12) == 3


def test_trouble_that_begins_where_the_run_has_been_is_the_same_again():
    """Its tries go on where they were. New trouble would get the first row of the table again."""
    ledger = Ledger()
    trouble = Trouble(onset=250, found_at=419, since=250)
    rollback = RollbackRecord(trouble=trouble, checkpoint=100, step=420)
    ledger.add_rollback(rollback)

    # Within the steps up to 420 that the rollback has undone.
    assert ledger.same_trouble(199) == [rollback]
    assert ledger.same_trouble(420) == [rollback]
    assert ledger.same_trouble(421) == []

    # Within so many steps after them.
    assert ledger.same_trouble(520, within=100) == [rollback]
    assert ledger.same_trouble(521, within=100) == []
