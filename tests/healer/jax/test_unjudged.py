# optax types every tree as the union of all trees.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false
"""Steps at which an engine has judged nothing: they do not tell of the step before once more."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
import pytest

from healcore.core.verdict import Action, Cause
from healcore.jax import protect
from healcore.jax.driver import JaxDriver
from tests.healer.jax.runs import POLICY, advance, batch, plain


def every_third(inner: Any, policy: Any) -> Any:
    steps = optax.MultiSteps(protect(inner, policy), every_k_schedule=3)
    return optax.GradientTransformationExtraArgs(steps.init, steps.update)


def read(handles: list[Any]) -> list[Any]:
    return [told for handle in handles for told in handle.read()]


def neutral(told: Any) -> bool:
    decision = told.decision
    return (decision.cause, decision.action, decision.skip) == (0, 0, False) and (
        decision.grad_scale,
        decision.rollback_depth,
        told.evidence,
    ) == (1.0, 0, ())


@pytest.mark.parametrize("at_once", [True, False])
def test_an_order_is_told_once_and_not_at_every_micro_step_after_it(at_once):
    run = plain(wrap=every_third)
    driver = JaxDriver(run.state, POLICY)
    batches = [batch(i, bad=i == 1) for i in range(5)]
    if at_once:
        told = [each for one in batches for each in read(advance(driver, run, [one]))]
    else:
        told = read(advance(driver, run, batches))
    assert [each.step for each in told] == [0, 0, 1, 1, 1]
    assert told[2].action == Action.ROLLBACK | Action.CUT_LR
    assert told[2].evidence
    after = told[3:]
    assert all(map(neutral, told[:2] + after))
    assert [each.incident_open for each in told] == [False, False, True, True, True]
    assert [each.lr_scale for each in told] == [1.0, 1.0, 0.25, 0.25, 0.25]
    assert {(each.onset, each.incident) for each in after} == {(0, 1)}


@pytest.mark.parametrize("replaced", [True, False])
def test_a_healing_state_that_was_put_back_orders_nothing_itself(replaced):
    """`Engine.on_rollback` keeps the last decision, which is the order that it answers."""
    run = plain(wrap=every_third)
    driver = JaxDriver(run.state, POLICY)
    store = driver.store(None, ())
    store.save(0, driver.items())
    advance(driver, run, [batch(i, bad=i == 1) for i in range(3)])
    if replaced:
        driver.replace(store.restore(0, driver.items()).state)
    driver.load_healing(driver.healing())
    assert driver.poll_step() is None
    told = read(advance(driver, run, [batch(i) for i in range(3)]))
    assert [each.step for each in told] == [1, 1, 2]
    assert neutral(told[0])
    assert neutral(told[1])
    assert bool(told[2].skip) is not replaced  # the accumulator still has the NaN


def test_each_engine_is_told_at_its_own_cadence():
    tx = protect(optax.sgd(0.1), POLICY)
    params = {"w": jnp.ones(3)}
    driver = JaxDriver({"slow": tx.init(params), "fast": tx.init(params)}, POLICY)
    told = []
    for i in range(5):
        state = dict(driver.state)
        # The slow one sees a NaN in step 1, and rests in steps 2 and 3.
        for name in ("slow", "fast") if i in (1, 4) else ("fast",):
            bad = name == "slow" and i == 1
            grads = {"w": jnp.full(3, jnp.nan if bad else 0.5)}
            _, state[name] = tx.update(grads, state[name], params)
        driver.update(state)
        told.append({each.engine: each for each in driver.poll_step().read()})
    assert [each["slow"].step for each in told] == [0, 1, 1, 1, 2]
    assert [each["fast"].step for each in told] == [1, 2, 3, 4, 5]
    causes = [each["slow"].cause for each in told]
    assert causes == [0, Cause.NONFINITE_GRAD, 0, 0, 0]
    assert all(neutral(each["slow"]) for each in (told[0], *told[2:]))
    assert all(neutral(each["fast"]) for each in told)


def test_a_step_is_judged_though_its_numbers_are_read_late_or_twice():
    run = plain()
    driver = JaxDriver(run.state, POLICY)
    handles = advance(driver, run, [batch(i, bad=i == 1) for i in range(3)])
    first = [read([each])[0].skip for each in reversed(handles)]
    again = [read([each])[0].skip for each in handles]
    assert (first, again) == ([False, True, False], [False, True, False])
