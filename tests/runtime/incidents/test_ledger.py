"""Rows of unhealthy steps, with steps that no engine judges, and past rollbacks."""

from __future__ import annotations

import pytest

from healcore.core.verdict import Cause
from healcore.runtime.ledger import Ledger, PastRollback
from tests.healer.step_records import record

SKIPPED = record(cause=Cause.NONFINITE_GRAD, skip=True)
MICRO_STEP = record(judged=False)


@pytest.mark.parametrize(("last", "onset"), [(SKIPPED, 3), (MICRO_STEP, 3), (record(), 13)])
def test_a_row_goes_on_through_the_micro_steps_of_an_accumulation(last, onset):
    ledger = Ledger()
    update = [MICRO_STEP, MICRO_STEP, MICRO_STEP, SKIPPED]
    for index, each in enumerate([*update, *update, *update, last]):
        ledger.record(index, [each])
    assert ledger.row_onset(ledger.next_step - 1) == onset


def test_a_lasting_alert_goes_on_through_the_micro_steps_of_an_accumulation():
    ledger = Ledger()
    for index, each in enumerate([record(cause=Cause.PLATEAU), MICRO_STEP] * 3):
        ledger.record(index, [each])
    (incident,) = ledger.incidents
    assert (incident.onset, incident.last, incident.over) == (0, 4, False)


def test_trouble_that_begins_where_the_run_has_been_is_the_same_again():
    ledger = Ledger()
    assert ledger.rollback_before(0) is None
    ledger.on_rollback(PastRollback(250, 100, 420, "rate"), None)
    ledger = Ledger.from_dict(ledger.to_dict())
    assert ledger.rollback_before(199) == PastRollback(250, 100, 420, "rate")
    assert ledger.rollback_before(420) is not None
    assert ledger.rollback_before(421) is None


def test_the_rollbacks_of_an_older_journal_are_read():
    saved = Ledger().to_dict() | {"past_rollbacks": [[250, 100]]}
    assert Ledger.from_dict(saved).past_rollbacks == [PastRollback(250, 100)]
