"""Rules that wait for evidence: when the host looks at the weights."""

from collections.abc import Sequence

import numpy as np
import pytest

from healcore.core.decision import Action, Cause
from healcore.core.step_record import Why
from healcore.policy import load
from healcore.runtime.run.rollback.host_rules import HostRules
from healcore.runtime.run.run_record import RunRecord
from healcore.runtime.run_options import HostPolicy
from tests.healer.step_records import record

HEALTHY, BAD = False, True


@pytest.fixture
def rules() -> HostRules:
    """The host rules of the default policy. Ten healthy steps end an incident."""
    policy = HostPolicy.of("default", {"incident": {"quiet_steps": 10}})
    return HostRules(policy.host_rules, policy.engine.config, RunRecord())


def ordered_rollbacks(
    rules: HostRules, steps: Sequence[bool], *, first: int = 0, engine: str = ""
) -> list[int]:
    """Indices at which the rules order a rollback, for steps that are healthy or bad."""
    due = []
    for index, is_bad in enumerate(steps, first):
        cause = Cause.NONFINITE_LOSS if is_bad else Cause(0)
        step = record(step=index + 1, cause=cause, why=Why(is_bad), engine=engine)
        if rules.with_rollback_order(step).action & Action.ROLLBACK:
            due.append(index)
    return due


@pytest.mark.parametrize(
    ("steps", "due"),
    [
        pytest.param([HEALTHY] * 20 + [BAD] * 300, [29], id="ten in a row: one order, once"),
        pytest.param(([BAD] * 9 + [HEALTHY]) * 2, [], id="nine in a row, twice"),
        pytest.param([BAD, HEALTHY] * 100, [48], id="every other step: at the 25th"),
        pytest.param(
            [BAD] * 10 + [HEALTHY] * 100 + [BAD] * 10, [9, 119], id="again after a quiet time"
        ),
    ],
)
def test_a_rollback_is_ordered_after_enough_bad_steps(rules, steps: list[bool], due: list[int]):
    assert ordered_rollbacks(rules, steps) == due


def test_bad_steps_are_counted_for_each_optimizer(rules):
    for index in range(9):
        assert ordered_rollbacks(rules, [BAD], first=index, engine="a") == []
        assert ordered_rollbacks(rules, [HEALTHY], first=index, engine="b") == []
    assert ordered_rollbacks(rules, [BAD], first=9, engine="b") == [], "the first of b"
    assert ordered_rollbacks(rules, [BAD], first=9, engine="a") == [9], "the tenth of a"


def test_a_rule_that_is_also_for_finite_steps_stays_in_the_step():
    """The host looks for NaN in the weights, which shows nothing about a loss spike."""
    policy = load("default", respond=[{"to": ["loss_spike", "nonfinite"], "do": ["rollback"]}])
    assert policy.host_rules() == ()
    assert [rule.action for rule in policy.config().rules] == [Action.ROLLBACK]


def test_a_rule_that_also_skips_is_divided_between_the_step_and_the_host():
    policy = load("default", respond=[{"to": ["nonfinite"], "do": ["skip", "rollback"]}])
    assert [rule.action for rule in policy.host_rules()] == [Action.ROLLBACK]
    (of_step,) = policy.config().rules
    assert (of_step.skip, of_step.action) == (True, 0)
    assert np.asarray(of_step.consecutive) == 1, "the step does not wait for evidence"
