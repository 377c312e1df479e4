"""Rows of unhealthy steps, with steps that no engine judges, and past rollbacks."""

from __future__ import annotations

from typing import Any

import pytest

from healcore.core.engine import incident
from healcore.core.verdict import Cause
from healcore.policy import load
from healcore.runtime.incidents.ledger import Ledger
from healcore.runtime.recovery.orders import RollbackRecord
from tests.healer.step_records import record

SKIPPED = record(cause=Cause.NONFINITE_GRAD, skip=True)
MICRO_STEP = record(judged=False)


@pytest.mark.parametrize(("last", "onset"), [(SKIPPED, 3), (MICRO_STEP, 3), (record(), 13)])
def test_a_row_goes_on_through_the_micro_steps_of_an_accumulation(last, onset):
    ledger = Ledger()
    update = [MICRO_STEP, MICRO_STEP, MICRO_STEP, SKIPPED]
    for index, each in enumerate([*update, *update, *update, last]):
        ledger.record(index, [each])
    assert ledger.first_consecutive(ledger.next_step - 1) == onset


@pytest.mark.parametrize("alert", [Cause.RECORDS, Cause.LOSS_SPIKE, Cause.DIVERGENCE])
def test_an_alert_without_consequences_begins_no_incident_within_skipped_steps(alert):
    ledger, acted_on = Ledger(), incident.causes(load("default").engine().config)
    for index in range(3, 13):
        both = record(cause=Cause.NONFINITE_GRAD | alert, skip=True)
        ledger.record(index, [both if index == 6 else SKIPPED], acted_on)
    (only,) = ledger.incidents
    assert (only.onset, only.only_skips, ledger.first_consecutive(12)) == (3, True, 3)


def applied(**fields: Any) -> RollbackRecord:
    return RollbackRecord(index=0, **fields)


def test_trouble_that_begins_where_the_run_has_been_is_the_same_again():
    ledger, back = Ledger(), applied(onset=250, target=100, step=420, lr_at_fault=0.1)
    assert ledger.same_trouble(0) == []
    ledger.on_rollback(back, None)
    assert ledger.same_trouble(199) == [back]
    assert ledger.same_trouble(420) == [back]
    assert ledger.same_trouble(421) == []
    assert ledger.same_trouble(520, within=100) == [back]
    assert ledger.same_trouble(521, within=100) == []
