"""The records of a dispatch on the host: one step later, of a state that was donated since."""

# optax types every tree as the union of all trees.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore.core.verdict import Action, Cause
from healcore.jax import heal, metrics, protect
from healcore.jax.driver.driver import JaxDriver
from tests.jax import policies
from tests.jax.driver.small_runs import POLICY, RUNS, advance, batch, every_third, plain


@pytest.mark.parametrize("kind", RUNS)
def test_steps_are_reported_in_order_though_each_was_donated_to_the_next(kind):
    run = RUNS[kind]()
    driver = JaxDriver(run.state, POLICY)
    assert driver.steps() is None
    handles = advance(driver, run, [batch(0), batch(1), batch(2, bad=True), batch(3)])
    assert driver.steps() is None  # no step since
    records = [handle.steps()[-1] for handle in handles]
    assert [len(each) for each in records] == [1] * 4
    first, second, bad, after = (each[0] for each in records)
    assert [each.step for each in (first, second, bad, after)] == [1, 2, 3, 4]
    assert first.engine == {"nnx": "optimizer"}.get(kind, "opt_state")
    assert first.evidence == ()
    assert not first.skip
    assert (first.onset, first.incident, first.incident_open) == (-1, 0, False)
    assert bad.skip
    assert bad.cause == Cause.NONFINITE_LOSS | Cause.NONFINITE_GRAD
    assert bad.action == Action.ROLLBACK | Action.CUT_LR
    assert (bad.onset, bad.incident, bad.incident_open) == (2, 1, True)
    assert bad.rollback_depth == 1
    assert bad.lr_scale == 0.25
    assert (bad.loss, bad.grad_norm) == (second.loss, second.grad_norm)  # the last finite ones
    assert after.cause == 0
    assert (after.onset, after.incident) == (2, 1)


def test_the_values_are_those_on_the_device_and_have_python_types():
    run = plain(policy=policies.BOTH)
    driver = JaxDriver(run.state, policies.BOTH)
    *_, last = advance(driver, run, [batch(i) for i in range(30)])
    (record,) = last.steps()[-1]
    seen = metrics(driver.live["opt_state"])
    for name in ("loss", "grad_norm", "threshold", "z", "z_loss"):
        value = getattr(record, name)
        assert type(value) is float
        assert np.float32(value) == np.asarray(seen[f"heal/{name}"])
    assert record.threshold > 0
    assert record.grad_scale == float(seen["heal/grad_scale"])
    assert record.step == 30
    kinds = (float, bool, float, Action, Cause, int, type(None))
    assert tuple(map(type, record.decision)) == kinds


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("plain", "['params']['hidden']"),
        ("linen", ".params['BatchNorm_0']['bias']"),
        ("nnx", "['model']['first']['bias']"),
    ],
)
def test_the_evidence_names_tensors_as_the_framework_does(kind, name):
    run = RUNS[kind]()
    driver = JaxDriver(run.state, POLICY)
    _, handle = advance(driver, run, [batch(0), batch(1, bad=True)])
    evidence = handle.steps()[-1][0].evidence
    assert evidence[0].name == name
    assert all(np.isnan(each.grad_norm) for each in evidence)


def test_one_bad_tensor_is_named_alone():
    params = {"a": jnp.ones(2), "b": {"c": jnp.ones(3), "d": jnp.ones(4)}}
    tx = optax.chain(heal(POLICY), optax.adam(0.1))
    driver = JaxDriver((params, tx.init(params)), POLICY)
    grads = {"a": jnp.ones(2), "b": {"c": jnp.ones(3).at[1].set(jnp.inf), "d": jnp.ones(4)}}
    _, opt_state = jax.jit(tx.update)(grads, driver.live[1], params, value=jnp.float32(1.0))
    driver.update((params, opt_state))
    handle = driver.steps()
    assert handle is not None
    ((record,),) = handle.steps()
    assert record.evidence == (("[0]['b']['c']", float("inf")),)
    assert record.engine == "1"


def test_averages_of_the_parameters_are_not_taken_for_them():
    run = plain(ema={"hidden": jnp.zeros((4, 3)), "out": {"w": jnp.zeros((3, 1))}})
    driver = JaxDriver(run.state, POLICY)
    (handle,) = advance(driver, run, [batch(0, bad=True)])
    names = [each.name for each in handle.steps()[-1][0].evidence]
    assert names == ["['params']['hidden']", "['params']['out']['w']"]


def test_a_spike_is_compared_with_the_last_step_without_an_alarm():
    """The same rule as in torch, see `healcore.core.step_record`."""
    params = {"a": jnp.ones(1), "b": jnp.ones(1), "c": jnp.ones(1)}
    policy = policies.SKIP
    tx = optax.chain(heal(policy), optax.sgd(0.0))
    driver = JaxDriver((params, tx.init(params)), policy)
    update = jax.jit(tx.update)

    def step(a: float, b: float = 3.0, c: float = 1.0) -> Any:
        grads = {"a": jnp.full(1, a), "b": jnp.full(1, b), "c": jnp.full(1, c)}
        _, opt_state = update(grads, driver.live[1], params, value=jnp.float32(1.0))
        driver.update((params, opt_state))
        ((record,),) = driver.steps().steps()
        return record

    for i in range(100):
        assert step(1.0 + 0.01 * (i % 3)).evidence == ()
    for _ in range(2):  # the first bad step is not what is usual at the second
        spike = step(50.0, c=500.0)
        assert spike.cause & Cause.GRAD_SPIKE
        assert [each.name for each in spike.evidence] == ["[0]['c']", "[0]['a']"]


def test_a_norm_given_by_the_caller_leaves_no_evidence():
    """Inside shard_map the norms of this shard's leaves would differ between the devices."""
    tx, params = heal(POLICY), {"w": jnp.ones(3)}
    _, state = tx.update(params, tx.init(params), params, grad_norm=jnp.float32(jnp.nan))
    assert state.heal_leaf_norms.tolist() == [0.0]


def read(handles: list[Any]) -> list[Any]:
    return [record for handle in handles for record in handle.steps()[-1]]


def neutral(record: Any) -> bool:
    decision = record.decision
    return (decision.cause, decision.action, decision.skip) == (0, 0, False) and (
        decision.grad_scale,
        decision.rollback_depth,
        record.evidence,
    ) == (1.0, 0, ())


@pytest.mark.parametrize("at_once", [True, False])
def test_an_order_is_reported_once_and_not_at_every_micro_step_after_it(at_once):
    run = plain(wrap=every_third)
    driver = JaxDriver(run.state, POLICY)
    batches = [batch(i, bad=i == 1) for i in range(5)]
    if at_once:
        records = [each for one in batches for each in read(advance(driver, run, [one]))]
    else:
        records = read(advance(driver, run, batches))
    assert [each.step for each in records] == [0, 0, 1, 1, 1]
    assert records[2].action == Action.ROLLBACK | Action.CUT_LR
    assert records[2].evidence
    after = records[3:]
    assert all(map(neutral, records[:2] + after))
    assert [each.incident for each in records] == [0, 0, 1, 1, 1]
    assert [each.lr_scale for each in records] == [1.0, 1.0, 0.25, 0.25, 0.25]
    assert {(each.onset, each.incident) for each in after} == {(0, 1)}


@pytest.mark.parametrize("replaced", [True, False])
def test_a_healing_state_that_was_put_back_orders_nothing_itself(replaced):
    """`Engine.on_rollback` keeps the last decision, which is the order that it answers."""
    run = plain(wrap=every_third)
    driver = JaxDriver(run.state, POLICY)
    store = driver.store(None)
    store.save(0, driver.state())
    advance(driver, run, [batch(i, bad=i == 1) for i in range(3)])
    if replaced:
        driver.load(store.restore(0, driver.state()).state)
    driver.load(None, driver.engines())
    assert driver.steps() is None
    records = read(advance(driver, run, [batch(i) for i in range(3)]))
    assert [each.step for each in records] == [1, 1, 2]
    assert neutral(records[0])
    assert neutral(records[1])
    assert bool(records[2].skip) is not replaced  # the accumulator still has the NaN


def test_each_engine_is_reported_at_its_own_cadence():
    tx = protect(optax.sgd(0.1), POLICY)
    params = {"w": jnp.ones(3)}
    driver = JaxDriver({"slow": tx.init(params), "fast": tx.init(params)}, POLICY)
    records = []
    for i in range(5):
        state = dict(driver.live)
        # The slow one sees a NaN in step 1, and is inactive in steps 2 and 3.
        for name in ("slow", "fast") if i in (1, 4) else ("fast",):
            bad = name == "slow" and i == 1
            grads = {"w": jnp.full(3, jnp.nan if bad else 0.5)}
            _, state[name] = tx.update(grads, state[name], params)
        driver.update(state)
        records.append({each.engine: each for each in driver.steps().steps()[-1]})
    assert [each["slow"].step for each in records] == [0, 1, 1, 1, 2]
    assert [each["fast"].step for each in records] == [1, 2, 3, 4, 5]
    causes = [each["slow"].cause for each in records]
    assert causes == [0, Cause.NONFINITE_GRAD, 0, 0, 0]
    assert all(neutral(each["slow"]) for each in (records[0], *records[2:]))
    assert all(neutral(each["fast"]) for each in records)
