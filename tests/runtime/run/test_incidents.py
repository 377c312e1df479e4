"""The ledger of incidents, and hooks, which change the actions and cannot break the run."""

import pytest

from healcore.core.decision import Action, Cause, Decision
from healcore.core.engine import recovery
from healcore.policy import load
from healcore.runtime.run.orders import RollbackRecord
from healcore.runtime.run.record import Ledger
from healcore.runtime.run_options import Hooks, IncidentContext
from tests.events.sample_events import READINGS
from tests.healer.step_records import record

ORDERED = Action.ROLLBACK | Action.CUT_LR
DECISION = Decision(1.0, True, 0.5, ORDERED, Cause.LOSS_SPIKE, 1)
INCIDENT = IncidentContext(2, 9, 7, Cause.LOSS_SPIKE, DECISION, READINGS)


def nothing(incident):
    return Action(0)


def test_each_hook_sees_the_result_so_far_and_the_last_result_counts():
    seen = []
    look = seen.append
    assert Hooks(look).run(INCIDENT) == (None, "", [])
    assert seen == [INCIDENT]
    stop = lambda incident: Action.STOP  # noqa: E731
    action, hook, problems = Hooks([stop, look, nothing, look]).run(INCIDENT)
    assert [each.action for each in seen] == [ORDERED, Action.STOP, Action(0)]
    assert (action, problems) == (Action(0), [])
    assert hook.endswith("test_incidents.nothing")


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize("error", [ValueError, Unprintable])
def test_an_exception_is_contained_and_reported(error):
    def raising(incident):
        raise error

    action, _, problems = Hooks([raising, nothing, raising]).run(INCIDENT)
    assert action == Action(0), "the other hooks still count"
    assert len(problems) == 2
    assert error.__name__ in problems[0]
    assert "<locals>.raising" in problems[0]


@pytest.mark.parametrize("returned", [True, 4, "rollback", Action(1024), Cause.DATA])
def test_a_value_that_is_no_action_counts_as_no_result(returned):
    action, _, problems = Hooks(lambda incident: returned).run(INCIDENT)
    assert action is None
    assert "Action.ROLLBACK" in problems[0]


SKIPPED = record(cause=Cause.NONFINITE_GRAD, skip=True)
MICRO_STEP = record(judged=False)


@pytest.mark.parametrize(("last", "onset"), [(MICRO_STEP, 3), (record(), 13)])
def test_a_row_goes_on_through_the_micro_steps_of_an_accumulation(last, onset):
    ledger = Ledger()
    update = [MICRO_STEP, MICRO_STEP, MICRO_STEP, SKIPPED]
    for index, each in enumerate([*update, *update, *update, last]):
        ledger.record(index, [each])
    assert ledger.first_consecutive(ledger.next_step - 1) == onset


@pytest.mark.parametrize("alert", [Cause.RECORDS, Cause.DIVERGENCE])
def test_an_alert_without_consequences_begins_no_incident_within_skipped_steps(alert):
    ledger, acted_on = Ledger(), recovery.incident_causes(load("default").engine().config)
    for index in range(3, 13):
        both = record(cause=Cause.NONFINITE_GRAD | alert, skip=True)
        ledger.record(index, [both if index == 6 else SKIPPED], acted_on)
    (only,) = ledger.incidents
    assert (only.onset, only.only_skips, ledger.first_consecutive(12)) == (3, True, 3)


def test_trouble_that_begins_where_the_run_has_been_is_the_same_again():
    ledger = Ledger()
    back = RollbackRecord(index=0, onset=250, target=100, step=420, lr_at_fault={"": 0.1})
    ledger.on_rollback(back, None)
    assert ledger.same_trouble(199) == ledger.same_trouble(420) == [back]
    assert ledger.same_trouble(421) == ledger.same_trouble(521, within=100) == []
    assert ledger.same_trouble(520, within=100) == [back]
