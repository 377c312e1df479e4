"""The user's hooks at an incident: whose result counts, and what an error in one costs."""

import pytest

from healcore.core.decision import Action, Cause, Decision
from healcore.runtime.run_options import Hooks, IncidentContext
from tests.events.sample_events import READINGS

ORDERED = Action.ROLLBACK | Action.CUT_LR
DECISION = Decision(
    grad_scale=1.0,
    skip=True,
    lr_scale=0.5,
    action=ORDERED,
    cause=Cause.LOSS_SPIKE,
    rollback_depth=1,
)
INCIDENT = IncidentContext(
    number=2, step=9, onset=7, cause=Cause.LOSS_SPIKE, decision=DECISION, readings=READINGS
)


def order_nothing(incident: IncidentContext) -> Action:
    return Action(0)


def order_stop(incident: IncidentContext) -> Action:
    return Action.STOP


def test_a_hook_that_returns_nothing_changes_nothing():
    seen: list[IncidentContext] = []
    assert Hooks(seen.append).run(INCIDENT) == (None, "", [])
    assert seen == [INCIDENT]


def test_each_hook_sees_the_result_so_far_and_the_last_result_counts():
    seen: list[IncidentContext] = []
    hooks = Hooks([seen.append, order_stop, seen.append, order_nothing, seen.append])

    action, hook, problems = hooks.run(INCIDENT)

    assert [incident.action for incident in seen] == [ORDERED, Action.STOP, Action(0)]
    assert (action, problems) == (Action(0), [])
    assert hook.endswith("test_hooks.order_nothing")


class Unprintable(Exception):
    """An exception that raises another one when it is printed."""

    def __str__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize("error", [ValueError, Unprintable])
def test_an_exception_is_reported_and_the_other_hooks_still_count(error):
    def raising(incident):
        raise error

    action, _, problems = Hooks([raising, order_nothing, raising]).run(INCIDENT)

    assert action == Action(0)
    assert len(problems) == 2
    assert error.__name__ in problems[0]
    assert "<locals>.raising" in problems[0]


@pytest.mark.parametrize(
    "returned",
    [True, 4, "rollback", Action(1024), Cause.DATA],
    ids=["bool", "int", "name", "unknown flag", "another type of flag"],
)
def test_a_value_that_is_no_action_counts_as_no_result(returned):
    action, _, problems = Hooks(lambda incident: returned).run(INCIDENT)
    assert action is None
    assert "Action.ROLLBACK" in problems[0]
