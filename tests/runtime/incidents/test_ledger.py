"""Rows of unhealthy steps, where an accumulation has steps that no engine judges."""

from __future__ import annotations

import pytest

from healcore.core.verdict import Cause
from healcore.runtime.ledger import Ledger
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
