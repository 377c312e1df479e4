# optax types every tree as the union of all trees, so that no leaf has an attribute.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false

import jax
import jax.numpy as jnp
import optax
import pytest

from healcore.jax import HealStateError, heal, last_decision, scale_by_heal_lr, set_lr_scale
from tests.jax import policies

PARAMS = {"w": jnp.ones(2), "b": jnp.ones(2, jnp.bfloat16)}


def test_the_host_cuts_the_rate_of_a_chain_without_a_new_compilation():
    tx = optax.chain(optax.sgd(lambda count: 1.0), scale_by_heal_lr())
    update = jax.jit(tx.update)
    state = tx.init(PARAMS)
    updates, state = update(PARAMS, state, PARAMS)
    assert updates["w"].tolist() == [-1.0, -1.0]
    state = set_lr_scale(state, 0.5)
    updates, state = update(PARAMS, state, PARAMS)
    assert updates["w"].tolist() == [-0.5, -0.5]
    assert updates["b"].dtype == jnp.bfloat16
    assert update._cache_size() == 1
    state = optax.tree.set(state, heal_lr_scale=jnp.float32(0.25))
    updates, state = update(PARAMS, state, PARAMS)
    assert updates["w"].tolist() == [-0.25, -0.25]


def test_a_chain_follows_the_policy_one_step_later():
    tx = optax.chain(heal(policies.CUT_LR), optax.sgd(1.0), scale_by_heal_lr())

    @jax.jit
    def step(state, g):
        updates, state = tx.update(jnp.full(1, g), state, value=jnp.float32(1.0))
        return updates[0], set_lr_scale(state, last_decision(state).lr_scale)

    state = tx.init(jnp.ones(1))
    moved = []
    for g in (1.0, jnp.nan, 1.0):
        update, state = step(state, g)
        moved.append(float(update))
    assert moved == [-1.0, 0.0, -0.5]


@pytest.mark.parametrize("scale", [0.0, -0.5, 1.5, float("nan")])
def test_a_multiplier_out_of_range_is_refused(scale):
    state = scale_by_heal_lr().init(PARAMS)
    with pytest.raises(ValueError, match=r"scale must be in \(0, 1\]"):
        set_lr_scale(state, scale)


def test_a_chain_without_the_multiplier_names_what_to_add():
    with pytest.raises(HealStateError, match="scale_by_heal_lr"):
        set_lr_scale(optax.sgd(0.1).init(PARAMS), 0.5)
