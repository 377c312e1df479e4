"""One policy per run: a state names its own, and the error names how to change it."""

# optax types every tree as the union of all trees, so that no leaf has an attribute.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false

import functools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore import Healer, policy
from healcore.core.engine import StateError
from healcore.jax import (
    HealStateError,
    from_dict,
    heal,
    metrics,
    protect,
    to_dict,
    with_heal_state,
    without_heal_state,
)

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 8), "b": jnp.ones(3)}
LOSS = jnp.float32(1.0)


def edited(number):
    """The default policy with one other number: the same names, the same shapes."""
    found = policy.to_dict(policy.load("default"))
    return policy.from_dict({**found, "max_skips": number})


@functools.cache  # compiling takes seconds
def healed(name="default"):
    return protect(optax.adam(0.1), name)


def stepped(tx, steps=3):
    state = tx.init(PARAMS)
    for _ in range(steps):
        _, state = jax.jit(tx.update)(PARAMS, state, PARAMS, value=LOSS)
    return state


@pytest.mark.parametrize("other", ["observe", "zclip", edited(7)], ids=["mode", "names", "number"])
def test_a_state_of_another_policy_is_refused(other):
    state = stepped(healed())
    saved = json.loads(json.dumps(to_dict(state, "default")))
    for use in (
        lambda: to_dict(state, other),
        lambda: from_dict(state, saved, other),
        lambda: protect(optax.adam(0.1), other).update(PARAMS, state, PARAMS, value=LOSS),
        lambda: Healer(other, state={"params": PARAMS, "opt": state}).__enter__(),
    ):
        with pytest.raises(HealStateError, match="with_heal_state"):
            use()
    with pytest.raises(StateError, match="policy"):
        from_dict(protect(optax.adam(0.1), other).init(PARAMS), saved, other)


OTHERS = {
    "bare": optax.adam(0.1),
    "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "another policy": protect(optax.adam(0.1), "observe"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_moments_of_another_run_can_be_taken_over(name):
    old = stepped(optax.with_extra_args_support(OTHERS[name]))
    tx = healed()
    with pytest.raises(HealStateError, match="with_heal_state"):
        tx.update(PARAMS, old, PARAMS, value=LOSS)
    if name == "another policy":
        old = without_heal_state(old)
    state = with_heal_state(old, like=tx.init(PARAMS))
    mu = optax.tree.get(old, "mu")
    assert jax.tree.all(jax.tree.map(jnp.array_equal, optax.tree.get(state, "mu"), mu))
    assert int(optax.tree.get(state, "count")) == 3
    jax.jit(tx.update)(PARAMS, state, PARAMS, value=LOSS)


def test_a_state_without_its_types_is_an_error_with_a_few_paths():
    params = {f"layer{i}": jnp.ones(2) for i in range(40)}
    tx = protect(optax.adam(0.1), "default")
    like = tx.init(params)
    plain = {"mu": params, "other": jnp.ones(2)}
    with pytest.raises(HealStateError, match=r"it lacks .*; like lacks ") as raised:
        with_heal_state(plain, like=like)
    assert str(raised.value).count("layer") <= 6


@pytest.mark.parametrize("make", [protect, lambda tx, p: optax.chain(heal(p), tx)])
def test_a_forgotten_loss_is_reported_once_and_is_nan_in_the_metrics(make):
    tx = make(optax.sgd(0.1), "default")
    update = jax.jit(lambda g, s: tx.update(g, s, PARAMS))
    with pytest.warns(UserWarning, match="value=loss"):
        _, state = update(PARAMS, tx.init(PARAMS))
    with warnings.catch_warnings(action="error"):
        _, state = update(PARAMS, state)
    assert np.isnan(metrics(state)["heal/loss"])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_a_loss_that_is_given_is_in_the_metrics(recwarn):
    tx = healed()
    state = tx.init(PARAMS)
    assert np.isnan(metrics(state)["heal/loss"])
    _, state = jax.jit(tx.update)(PARAMS, state, PARAMS, value=LOSS * jnp.nan)
    assert np.isnan(metrics(state)["heal/loss"])
    _, state = jax.jit(tx.update)(PARAMS, state, PARAMS, value=LOSS * 0)
    assert metrics(state)["heal/loss"] == 0
    assert not [each for each in recwarn if "value=loss" in str(each.message)]
