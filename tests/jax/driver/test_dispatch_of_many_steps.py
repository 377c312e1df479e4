"""A compiled loop takes many steps in one dispatch: each is counted, reported and healed."""

# optax types every tree as the union of all trees.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore import Healer, RunStopped
from healcore.jax import HealStateError, protect
from healcore.jax.driver.driver import JaxDriver
from tests.healer.run_options import grouped
from tests.jax.driver.small_runs import POLICY

PARAMS = {"w": jnp.full(4, 0.5)}


@functools.cache
def program(policy, records):
    tx = protect(optax.sgd(0.01), policy, records=records)

    def one(state, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"] - 1.0) ** 2))(
            state["params"]
        )
        updates, opt = tx.update(grads, state["opt"], state["params"], value=loss)
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, None

    return tx, jax.jit(lambda state, xs: jax.lax.scan(one, state, xs)[0], donate_argnums=0)


def start(policy=POLICY, records=32):
    tx, many = program(policy, records)
    params = jax.tree.map(jnp.array, PARAMS)
    return {"params": params, "opt": tx.init(params)}, many


def data(steps, bad=()):
    xs = np.random.default_rng(0).standard_normal((steps, 8, 4)).astype(np.float32)
    xs[list(bad)] = np.nan
    return xs


def chunks(xs, k):
    return [xs[i : i + k] for i in range(0, len(xs), k)]


def run(xs, k, tmp_path, policy=POLICY, records=32, epochs=1, **options):
    state, many = start(policy, records)
    metrics = tmp_path / f"{k}.metrics.jsonl"
    healer = Healer(policy, state=state, **grouped(options, metrics=metrics))
    with healer:
        for batch in healer.batches(chunks(xs, k), epochs=epochs):
            healer.update(many(healer.state, batch))
    return healer, [json.loads(line) for line in metrics.read_text().splitlines()]


@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.stress), 10])
def test_a_run_that_is_all_nan_stops_with_a_diagnosis(k, tmp_path):
    with pytest.raises(RunStopped):
        run(data(100, bad=range(100)), k, tmp_path, "default", epochs=None, save_every=20)


def test_steps_have_the_same_line_each_however_many_are_in_a_dispatch(tmp_path):
    """52 steps in dispatches of 7: the last one is shorter."""
    logs = []
    for k in (1, 7):
        healer, lines = run(data(52), k, tmp_path, save_every=20)
        assert healer.step == 52
        kept = [saved.step for saved in healer._loop.saver.store.steps()]
        assert kept[0] == 0
        assert all(step % k == 0 for step in kept[:-1])
        logs.append([{k: v for k, v in e.items() if k not in ("time", "run")} for e in lines])
    assert logs[0] == logs[1]
    assert [line["step"] for line in logs[0]] == list(range(52))
    assert len({line["loss"] for line in logs[0]}) == 52


def test_an_order_within_a_dispatch_is_carried_out(tmp_path):
    healer, lines = run(data(60, bad=[43]), 10, tmp_path, save_every=10)
    assert healer.rollbacks == 1
    bad = [line["step"] for line in lines if "NONFINITE_GRAD" in line["cause"]]
    assert bad[0] == 43


def test_a_dispatch_of_more_steps_than_the_state_has_records_is_refused():
    state, many = start(records=4)
    driver = JaxDriver(state, POLICY)
    driver.update(many(state, data(20, bad=[3])))
    with pytest.raises(HealStateError, match="records=20"):
        driver.steps().steps()


def test_a_change_of_the_healing_state_by_the_host_is_no_step():
    """A loop takes several batches for one dispatch: the next `steps` may come before it."""
    state, many = start()
    driver = JaxDriver(state, POLICY)
    driver.update(many(state, data(10)))
    assert driver.steps().count == 10
    driver.expect_change()
    assert driver.steps() is None
    driver.update(many(driver.live, data(10)))
    driver.expect_change()
    assert driver.steps().count == 10, "a step that was not polled yet is not lost"
    assert driver.steps() is None
