"""`HostRules`: when the host looks at the weights because of steps with NaN or Inf."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from healcore.core.step_record import numbers, to_host
from healcore.core.verdict import Action, Cause
from healcore.policy import engine_of, load
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.steps import HostRules

QUIET = 10
FIRST = to_host(numbers(engine_of("default").init()))


def rules() -> HostRules:
    policy = HostPolicy.of("default", {"incident": {"quiet_steps": QUIET}})
    return HostRules(policy.rules, policy.engine.config)


def orders(found: HostRules, bad: Sequence[int], engine: str = "", start: int = 0) -> list[int]:
    """Steps at which the host looks at the weights; `bad` has 1 for a step that is not finite."""
    due = []
    for step, is_bad in enumerate(bad, start):
        cause = Cause.NONFINITE_LOSS if is_bad else Cause(0)
        record = FIRST._replace(step=step + 1, cause=cause, skip=bool(is_bad), engine=engine)
        if found.ordered(record).action & Action.ROLLBACK:
            due.append(step)
    return due


def test_ten_in_a_row_are_one_order_however_long_it_goes_on():
    assert orders(rules(), [0] * 20 + [1] * 300) == [29]
    assert orders(rules(), ([1] * 9 + [0]) * 2) == []


def test_every_other_step_is_one_order_at_the_twenty_fifth():
    assert orders(rules(), [1, 0] * 100) == [48]


def test_another_row_after_a_quiet_time_is_another_order():
    assert orders(rules(), [1] * 10 + [0] * 100 + [1] * 10) == [9, 119]


def test_hits_are_counted_for_each_optimizer():
    found = rules()
    for step in range(9):
        assert orders(found, [1], "a", step) == orders(found, [0], "b", step) == []
    assert orders(found, [1], "b", 9) == []
    assert orders(found, [1], "a", 9) == [9]


def test_a_rollback_forgets_the_hits():
    found = rules()
    assert orders(found, [1] * 9) == []
    found.restart()
    assert orders(found, [1] * 10) == [9]


def test_a_rule_for_finite_steps_and_one_that_also_skips_stay_in_the_step():
    rule = {"to": ["loss_spike", "nonfinite"], "do": ["rollback"]}
    policy = load("default", respond=[rule])
    assert policy.host_rules() == ()
    assert [each.action for each in policy.config().rules] == [Action.ROLLBACK]
    rule = {"to": ["nonfinite"], "do": ["skip", "rollback"]}
    policy = load("default", respond=[rule])
    assert [each.action for each in policy.host_rules()] == [Action.ROLLBACK]
    (of_step,) = policy.config().rules
    assert (of_step.skip, of_step.action) == (True, 0)
    assert np.asarray(of_step.consecutive) == 1
