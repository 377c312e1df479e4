"""`limit_rates`: the learning rates after a rollback."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from healcore.policy import engine_of, load
from healcore.runtime.run.engine_states import RatesAfterRollback, limit_rates
from healcore.runtime.run.healthy_ranges import HealthyValues

ENGINE = engine_of(load("default", lr={"factor": 0.25, "ceiling": 1.0}))
UNLIMITED = ENGINE.to_dict(ENGINE.init())


def after_rollback(
    rates: Mapping[str, float | None],
    at_fault: Mapping[str, float],
    *,
    healthy: bool = True,
    highest: Mapping[str, float] | None = None,
    engines: Any = None,
) -> RatesAfterRollback:
    """The rates after a rollback to a step with `rates`; `highest` healthy rates are learnt."""
    learnt = HealthyValues()
    learnt.add_checkpoint(highest or {}, {})
    return limit_rates(
        ENGINE,
        engines or dict.fromkeys(rates, UNLIMITED),
        at_fault,
        rates,
        healthy=healthy,
        learnt=learnt,
    )


def test_the_limit_is_the_rate_of_the_restored_step_if_the_rate_at_the_fault_was_higher():
    found = after_rollback({"a": 0.1}, {"a": 3.0})
    assert found.limits == pytest.approx({"a": 0.1})
    assert found.scales == {"a": 1.0}


def test_the_limit_is_the_last_learnt_rate_if_the_restored_step_was_above_all_of_them():
    found = after_rollback({"a": 0.1}, {"a": 3.0}, highest={"a": 0.02})
    assert found.limits == pytest.approx({"a": 0.02})
    assert found.scales == pytest.approx({"a": 0.2})


def test_the_limit_is_a_share_of_the_rate_at_the_fault_if_no_healthy_rate_is_known():
    found = after_rollback({"a": 0.1}, {"a": 0.2}, healthy=False)
    assert found.limits == pytest.approx({"a": 0.25 * 0.2})
    assert found.scales == pytest.approx({"a": 0.5})


def test_the_limit_is_a_share_of_the_rate_at_the_fault_if_this_rate_was_healthy():
    found = after_rollback({"a": 0.1}, {"a": 0.1})
    assert found.limits == pytest.approx({"a": 0.25 * 0.1})
    assert found.scales == pytest.approx({"a": 0.25})


def test_only_the_optimizer_above_its_healthy_rate_is_limited():
    found = after_rollback({"a": 0.1, "b": 0.5}, {"a": 3.0, "b": 0.5})
    assert found.limits == pytest.approx({"a": 0.1})
    assert found.scales == {"a": 1.0, "b": 1.0}


def test_without_a_rate_at_the_fault_nothing_is_limited():
    found = after_rollback({"a": 0.1}, {})
    assert (found.limits, found.scales) == ({}, {"a": 1.0})


def test_a_limit_of_an_earlier_rollback_scales_the_rate_of_a_higher_step():
    limited = after_rollback({"a": 0.1}, {"a": 3.0}).engines
    found = after_rollback({"a": 0.4}, {}, engines=limited)
    assert found.limits == pytest.approx({"a": 0.1})
    assert found.scales == pytest.approx({"a": 0.25})


def test_an_optimizer_without_a_known_rate_keeps_its_multiplier():
    found = after_rollback({"a": None}, {})
    assert (found.limits, found.scales) == ({}, {"a": 1.0})


def test_without_cuts_left_there_is_no_new_limit():
    state = ENGINE.init()
    spent = state._replace(
        budget=state.budget._replace(lr_cuts=np.zeros_like(state.budget.lr_cuts))
    )
    found = after_rollback({"a": 0.1}, {"a": 3.0}, engines={"a": ENGINE.to_dict(spent)})
    assert (found.limits, found.scales) == ({}, {"a": 1.0})


def test_the_given_states_stay_as_they_are():
    before = ENGINE.to_dict(ENGINE.init())
    after_rollback({"a": 0.1}, {"a": 3.0})
    assert before == UNLIMITED
