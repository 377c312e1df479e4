"""`on_incident` can change the actions and sees everything; it cannot break the run (fault 43)."""

from __future__ import annotations

import pytest

from healcore.core.verdict import Action, Cause, Decision
from healcore.runtime.run_options import Hooks, IncidentContext
from tests.events.sample_events import EVIDENCE, READINGS

ORDERED = Action.ROLLBACK | Action.CUT_LR
INCIDENT = IncidentContext(
    number=2,
    step=9,
    onset=7,
    cause=Cause.LOSS_SPIKE,
    decision=Decision(1.0, True, 0.5, ORDERED, Cause.LOSS_SPIKE, 1),
    readings=READINGS,
    evidence=EVIDENCE,
    batches=((0, 9),),
)


def keep(incident):
    return None


def stop(incident):
    return Action.STOP


def nothing(incident):
    return Action(0)


def test_it_sees_the_incident():
    seen = []
    assert Hooks(seen.append).run(INCIDENT) == (None, "", [])
    assert seen == [INCIDENT]
    assert seen[0].action == ORDERED


def test_it_overrides():
    action, hook, problems = Hooks(stop).run(INCIDENT)
    assert (action, problems) == (Action.STOP, [])
    assert hook.endswith("test_hooks.stop")
    assert Hooks([stop]).run(INCIDENT) == (action, hook, problems)


def test_the_last_result_counts_and_each_hook_sees_the_result_so_far():
    seen = []

    def look(incident):
        seen.append(incident.action)

    action, hook, _ = Hooks([look, stop, look, nothing, look, keep]).run(INCIDENT)
    assert seen == [ORDERED, Action.STOP, Action(0)]
    assert action == Action(0)
    assert hook.endswith("nothing")


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no")


def raising(error):
    def hook(incident):
        raise error

    return hook


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("on purpose"), "ValueError: on purpose"),
        (StopIteration(), "StopIteration"),
        (RecursionError("deep"), "RecursionError: deep"),
        (Unprintable(), "Unprintable"),
    ],
    ids=["value", "stop", "deep", "unprintable"],
)
def test_an_exception_is_contained_and_reported(error, message):
    action, _, problems = Hooks([raising(error), stop, raising(error)]).run(INCIDENT)
    assert action is Action.STOP, "the other hooks still count"
    assert len(problems) == 2
    assert message in problems[0]
    assert "raising.<locals>.hook" in problems[0]


@pytest.mark.parametrize(
    "returned", [True, 4, "rollback", Action(1024), Action.STOP | 64, Cause.DATA]
)
def test_a_value_that_is_no_action_counts_as_no_result(returned):
    action, _, problems = Hooks([lambda incident: returned, keep]).run(INCIDENT)
    assert action is None
    assert "Action.ROLLBACK" in problems[0]
