"""An optimizer that makes NaN of finite gradients: not applied, and counted at the next step."""

# optax types every state as the union of all, so that none has an attribute.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore.core.verdict import Cause
from healcore.jax import last_decision, metrics, protect
from healcore.jax.gradients import SMALL
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits

PARAMS = {"dead": jnp.asarray([0.5, -0.0]), "live": jnp.ones(3)}
DEAD = {"dead": jnp.zeros(2), "live": jnp.zeros(3)}
LIVE = {"dead": jnp.ones(2), "live": jnp.ones(3)}
OPTIMIZERS = {
    "adam without eps": optax.adam(0.1, eps=0.0),
    "a rate of NaN": optax.inject_hyperparams(optax.sgd)(lambda count: 0.1 / jnp.minimum(count, 1)),
}


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("policy", [policies.SKIP, policies.UPDATES], ids=["skip", "updates"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bad_update_is_not_applied_and_counted_at_the_next_step(name, policy, jit):
    tx = protect(OPTIMIZERS[name], policy)
    step = jit(lambda g, s: tx.update(g, s, PARAMS, value=1.0))
    updates, state = step(DEAD, tx.init(PARAMS))
    assert_same_bits(optax.apply_updates(PARAMS, updates), PARAMS)
    assert bool(state.heal_bad_update)
    _, state = step(LIVE, state)
    if policy is policies.SKIP:
        assert int(last_decision(state).cause) == Cause.NONFINITE_GRAD
        assert bool(last_decision(state).skip)
        assert int(metrics(state)["heal/skips"]) == 1
    assert not bool(state.heal_bad_update) or policy is policies.UPDATES
    updates, state = step(LIVE, state)
    assert all(np.all(np.isfinite(u) & (u != 0)) for u in jax.tree.leaves(updates))


def test_the_elements_of_a_large_tensor_are_held_one_by_one():
    params = {"large": jnp.ones(SMALL + 1), "small": jnp.ones(2)}
    grads = {"large": jnp.ones(SMALL + 1).at[7].set(0.0), "small": jnp.ones(2)}
    tx = protect(optax.adam(0.1, eps=0.0), policies.SKIP)
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    moved = optax.apply_updates(params, updates)["large"]
    assert np.flatnonzero(moved == 1.0).tolist() == [7]
    assert np.isfinite(moved).all()
    assert not bool(state.heal_bad_update)


@pytest.mark.parametrize("params", [PARAMS, {"empty": jnp.zeros((0, 2))}, {}])
def test_constant_updates_compile(params):
    """XLA crashes on a kernel without arguments or with a constant result."""
    tx = protect(optax.set_to_zero(), policies.CUT_LR)
    step = jax.jit(lambda g, s: tx.update(g, s, params, value=1.0))
    _, state = step(params, tx.init(params))
    assert not bool(state.heal_bad_update)


def test_an_overflow_of_constant_factors_is_found():
    tx = protect(optax.chain(optax.scale(1e30), optax.scale(1e20)), policies.SKIP)
    _, state = jax.jit(lambda g, s: tx.update(g, s, PARAMS, value=1.0))(LIVE, tx.init(PARAMS))
    assert bool(state.heal_bad_update)


def test_a_skip_keeps_complex_zeros_under_a_policy_that_scales_updates():
    params = {"w": jnp.asarray([complex(-0.0, -0.0), complex(-0.0, 1.0)], jnp.complex64)}
    tx = protect(optax.sgd(0.1), policies.CUT_LR)
    grads = {"w": params["w"] * jnp.nan}
    updates, _ = jax.jit(lambda g, s: tx.update(g, s, params, value=1.0))(grads, tx.init(params))
    assert_same_bits(optax.apply_updates(params, updates), params)


def test_observing_changes_nothing_and_reports():
    tx = protect(optax.adam(0.1, eps=0.0), policies.OBSERVE)
    updates, state = tx.update(DEAD, tx.init(PARAMS), PARAMS)
    assert np.isnan(updates["dead"]).all()
    _, state = tx.update(LIVE, state, PARAMS)
    assert int(metrics(state)["heal/cause"]) == Cause.NONFINITE_GRAD


def test_a_skipped_step_is_no_bad_update():
    tx = protect(optax.adam(0.1, eps=0.0), policies.SKIP)
    _, state = tx.update({**LIVE, "dead": jnp.full(2, jnp.nan)}, tx.init(PARAMS), PARAMS)
    assert bool(last_decision(state).skip)
    assert not bool(state.heal_bad_update)
