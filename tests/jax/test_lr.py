# optax types every tree as the union of all trees, so that no leaf has an attribute.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore.jax import (
    HealStateError,
    heal,
    last_decision,
    protect,
    scale_by_heal_lr,
    set_lr_scale,
)
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


def schedule_free(base):
    return optax.contrib.schedule_free(base, 0.1)


def sam(base):
    return optax.contrib.sam(base, optax.chain(optax.contrib.normalize(), optax.sgd(0.05)))


@pytest.mark.parametrize(("wrapper", "period"), [(schedule_free, 1), (sam, 2)])
def test_a_cut_reaches_the_second_iterate(wrapper, period):
    """It is what the same rates give as a schedule of the base optimizer."""
    tx = protect(wrapper(optax.chain(optax.sgd(0.1), scale_by_heal_lr())), policies.CUT_LR)
    update, params, gradient = jax.jit(tx.update), jnp.ones(2), jnp.array([1.0, -3.0])
    state, scales = tx.init(params), []
    for number in range(12):
        bad = number == 2
        updates, state = update(gradient * (jnp.nan if bad else 1.0), state, params)
        params = optax.apply_updates(params, updates)
        if not bad:
            scales.append(float(last_decision(state).lr_scale))
    assert min(scales) == 0.5
    rates = 0.1 * jnp.array(scales[period - 1 :: period])
    reference = wrapper(optax.sgd(lambda count: rates[count]))
    expected, base = jnp.ones(2), reference.init(jnp.ones(2))
    for _ in scales:
        updates, base = reference.update(gradient, base, expected)
        expected = optax.apply_updates(expected, updates)
    np.testing.assert_allclose(np.asarray(params), np.asarray(expected), rtol=1e-6)
    second = "z" if wrapper is schedule_free else "cache"
    found: list[Any] = [optax.tree.get(each, second) for each in (state, base)]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)


@pytest.mark.parametrize("wrapper", [schedule_free, sam, lambda base: optax.contrib.madgrad(0.1)])
def test_a_cut_that_would_not_reach_the_second_iterate_is_refused(wrapper):
    inner = wrapper(optax.sgd(0.1))
    with pytest.raises(HealStateError, match=r"keeps a second iterate .* write "):
        protect(inner, policies.CUT_LR).init(PARAMS["w"])
    with pytest.raises(HealStateError, match=r"use a policy without \[update_clip\]"):
        protect(inner, "levanter-clip-update").init(PARAMS["w"])
    protect(inner, "zclip").init(PARAMS["w"])  # cuts nothing
    protect(inner, "observe").init(PARAMS["w"])
