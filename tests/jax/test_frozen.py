"""Gradients of frozen parameters: `protect` judges only gradients that the optimizer reads."""

# optax types every state as the union of all, so that none has an attribute.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore.jax import metrics, protect
from healcore.jax.heal_state import find
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits

PARAMS = {"base": jnp.ones(4), "head": jnp.full((4,), 0.5)}
LABELS = {"base": "frozen", "head": "trained"}
IS_FROZEN = {"base": True, "head": False}


def partition(rate=0.1):
    return optax.partition({"trained": optax.adam(rate), "frozen": optax.set_to_zero()}, LABELS)


def scheduled(rate):
    return optax.chain(optax.adam(rate), optax.masked(optax.set_to_zero(), IS_FROZEN))


FROZEN = {
    "partition": lambda: protect(partition(), policies.BOTH),
    "masked before": lambda: protect(
        optax.chain(optax.masked(optax.set_to_zero(), IS_FROZEN), optax.adam(0.1)), policies.BOTH
    ),
    "masked after": lambda: protect(scheduled(0.1), policies.BOTH),
    "chain of partition": lambda: protect(
        optax.chain(optax.trace(0.9), partition(), optax.scale(0.5)), policies.BOTH
    ),
    "accumulation": lambda: protect(optax.MultiSteps(partition(), 2), policies.BOTH),
    "injected inside": lambda: protect(
        optax.inject_hyperparams(scheduled)(rate=0.1), policies.BOTH
    ),
    "injected outside": lambda: optax.inject_hyperparams(
        lambda rate: protect(partition(rate), policies.BOTH)
    )(rate=0.1),
    "per tensor": lambda: protect(partition(), policies.ADAGC),
    "observe": lambda: protect(partition(), policies.OBSERVE),
    "update norm": lambda: protect(partition(), policies.UPDATES),
}
EAGER = ("masked after", "accumulation", "injected outside")


def in_scan(tx, grads, state) -> tuple[Any, Any]:
    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params, value=1.0)
        return (optax.apply_updates(params, updates), state), None

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads)
    return jax.jit(lambda state: jax.lax.scan(step, (PARAMS, state), stacked)[0])(state)


def in_loop(tx, grads, state) -> tuple[Any, Any]:
    params = PARAMS
    for each in grads:
        updates, state = tx.update(each, state, params, value=1.0)
        params = optax.apply_updates(params, updates)
    return params, state


def gradients(*bases, bad=None):
    """Ordinary gradients of the head, one for each gradient of the base."""
    random = np.random.default_rng(0).normal(0.1, 0.001, (len(bases), 4)).astype(np.float32)
    return [
        {
            "base": jnp.full(4, base, jnp.float32),
            "head": jnp.asarray(random[i] * (np.nan if i == bad else 1)),
        }
        for i, base in enumerate(bases)
    ]


@pytest.mark.parametrize("name", FROZEN)
def test_a_gradient_of_a_frozen_parameter_does_not_count(name):
    run = in_loop if name in EAGER else in_scan
    tx = FROZEN[name]()
    params, state = run(tx, gradients(1.0, 1.0, np.nan, 1.0, 1e8, 1.0), tx.init(PARAMS))
    expected, healthy = run(tx, gradients(*6 * [1.0]), tx.init(PARAMS))
    assert_same_bits(params, expected)
    assert_same_bits(params["base"], PARAMS["base"])
    assert np.all(params["head"] != PARAMS["head"])
    assert metrics(state)["heal/skips"] == 0
    assert metrics(state)["heal/clips"] == metrics(healthy)["heal/clips"]
    assert find(state).heal_leaf_norms[0] == 0
    if name != "observe":
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.inner_state))


@pytest.mark.parametrize("name", ["partition", "injected outside"])
def test_a_trained_parameter_with_nan_still_skips(name):
    tx = FROZEN[name]()
    params, state = in_scan(tx, gradients(1.0, 1e8, 1.0, bad=2), tx.init(PARAMS))
    assert metrics(state)["heal/skips"] == 1
    assert np.isfinite(params["head"]).all()


def test_all_gradients_of_an_optimizer_that_reads_them_count():
    zero_rate = optax.partition({"trained": optax.sgd(1.0), "frozen": optax.sgd(0.0)}, LABELS)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), partition())
    by_schedule = optax.sgd(lambda count: jnp.where(jnp.asarray(count) < 100, 0.0, 0.1))
    for inner in (zero_rate, clipped, by_schedule):
        tx = protect(inner, policies.SKIP)
        _, state = in_scan(tx, gradients(1.0, np.nan), tx.init(PARAMS))
        assert metrics(state)["heal/skips"] == 1


def test_an_optimizer_that_needs_concrete_values_runs_eagerly():
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return (updates if float(updates["head"][0]) < 5 else PARAMS), state

    tx = protect(optax.GradientTransformation(optax.init_empty_state, update), policies.SKIP)
    params, _ = in_loop(tx, gradients(1.0, 1.0), tx.init(PARAMS))
    assert np.all(params["head"] > 0.6)
