"""The cut of the learning rate holds on the very next step after a restore.

Measured on how far the parameters move, against a run that goes on from the same checkpoint with
its multiplier at 1: OPT-175B's restores put the old learning rate back, and no number in a
dictionary showed it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from healcore.core.engine import Engine
from healcore.jax import heal, last_decision, protect, scale_by_heal_lr
from healcore.jax.driver.driver import JaxDriver
from healcore.runtime.recovery.orders import after_rollback
from tests.jax.driver.small_runs import POLICY, advance, batch, plain

WARM = optax.warmup_cosine_decay_schedule(0.0, 1e-2, warmup_steps=6, decay_steps=40)
PLATEAU = contrib.reduce_on_plateau(factor=0.5, patience=2, accumulation_size=1)
OPTIMIZERS = {
    "plain": optax.adamw(1e-2),
    "warm-up and cosine": optax.adamw(WARM),
    "one cycle": optax.sgd(optax.linear_onecycle_schedule(40, 0.1), momentum=0.9),
    "injected": optax.inject_hyperparams(optax.adamw)(1e-2),
    "injected schedule": optax.inject_hyperparams(optax.adamw)(WARM),
    "reduce on plateau": optax.chain(optax.adam(1e-2), PLATEAU),
}


def chained(inner: Any, policy: Any) -> Any:
    """`heal` before the optimizer, its multiplier behind it."""
    chain = optax.chain(heal(policy), inner, scale_by_heal_lr())

    def update(updates: Any, state: Any, params: Any = None, **signals: Any) -> Any:
        updates, state = chain.update(updates, state, params, **signals)
        return updates, optax.tree.set(state, heal_lr_scale=last_decision(state).lr_scale)

    return optax.GradientTransformationExtraArgs(chain.init, update)


def moved(driver: JaxDriver, run: Any, seed: int) -> np.ndarray:
    before = [np.array(leaf) for leaf in jax.tree.leaves(driver.live["params"])]
    advance(driver, run, [batch(seed)])
    after = [np.array(leaf) for leaf in jax.tree.leaves(driver.live["params"])]
    pairs = zip(before, after, strict=True)
    return np.concatenate([(b.astype(np.float64) - a).ravel() for a, b in pairs])


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        *((name, protect) for name in ("plain", "injected", "reduce on plateau")),
        ("injected schedule", chained),
        *(
            pytest.param(name, protect, marks=pytest.mark.stress)
            for name in ("warm-up and cosine", "one cycle", "injected schedule")
        ),
    ],
)
def test_the_parameters_move_by_the_cut_rate(name, wrap):
    run = plain(OPTIMIZERS[name], wrap=wrap)
    driver, engine = JaxDriver(run.state, POLICY), Engine(POLICY)
    store = driver.store(None)
    advance(driver, run, [batch(seed) for seed in range(4)])
    store.save(4, driver.state(), healing=driver.engines())
    *_, cut = advance(driver, run, [batch(4), batch(5, bad=True)])
    assert cut.steps()[-1][0].lr_scale == 0.25

    restored = store.restore(4, driver.state())
    live = driver.engines()
    driver.load(restored.state, after_rollback(engine, live, restored.healing))
    short = moved(driver, run, 4)

    uncut = JaxDriver(plain(OPTIMIZERS[name], wrap=wrap).state, POLICY)
    restored = store.restore(4, uncut.state())
    uncut.load(restored.state, restored.healing or {})
    full = moved(uncut, run, 4)
    assert np.abs(full).min() > 0
    # A parameter near 0.2 is rounded to 1.5e-8.
    np.testing.assert_allclose(short, 0.25 * full, rtol=1e-4, atol=2e-8)


@pytest.mark.parametrize("wrap", [protect, chained])
def test_a_new_process_continues_at_the_cut_rate(wrap):
    run = plain(OPTIMIZERS["injected schedule"], wrap=wrap)
    driver = JaxDriver(run.state, POLICY)
    store = driver.store(None)
    advance(driver, run, [batch(0), batch(1), batch(2, bad=True), batch(3)])
    store.save(4, driver.state(), healing=driver.engines())
    steps = []
    for cut in (True, False):
        fresh = JaxDriver(plain(OPTIMIZERS["injected schedule"], wrap=wrap).state, POLICY)
        restored = store.restore(4, fresh.state())
        fresh.load(restored.state, (restored.healing or {}) if cut else {})
        steps.append(moved(fresh, run, 4))
    np.testing.assert_allclose(steps[0], 0.25 * steps[1], rtol=1e-4, atol=2e-8)


@pytest.mark.parametrize(
    ("name", "rate"), [("injected", 1e-2), ("injected schedule", None), ("plain", None)]
)
def test_the_users_own_learning_rate_is_reported_where_it_is_known(name, rate):
    run = plain(OPTIMIZERS[name])
    driver = JaxDriver(run.state, POLICY)
    advance(driver, run, [batch(0), batch(1), batch(2, bad=True)])
    if name == "injected schedule":
        rate = float(np.asarray(WARM(1)))  # of the last step that was taken
    found = driver.learning_rate()
    assert (found is None) == (rate is None)
    assert rate is None or found == pytest.approx(rate)
    assert float(jnp.asarray(last_decision(driver.live["opt_state"]).lr_scale)) == 0.25
