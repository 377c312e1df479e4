"""A step whose gradients are finite, and of which the optimizer makes NaN or Inf, is skipped."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest

import healcore
from healcore.jax import last_decision, protect

VALUE = jnp.float32(1.0)


def nan_at(step: int) -> optax.Schedule:
    """A learning rate that is NaN at one step, as 0 / 0 in a warm-up."""
    return lambda count: jnp.where(count == step, jnp.nan, 0.1)


def trained(tx, steps, *, compiled=True, dtype=jnp.float32):
    """Parameters, state and skips after `steps` steps with finite gradients."""
    params = {"large": jnp.ones((300, 300), dtype), "small": jnp.ones((3,), dtype)}
    state = tx.init(params)

    def step(params, state):
        grads = jax.tree.map(lambda leaf: 0.1 * leaf, params)
        updates, state = tx.update(grads, state, params, value=VALUE)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step) if compiled else step
    skips = []
    for _ in range(steps):
        params, state = step(params, state)
        skips.append(bool(last_decision(state).skip))
    return params, state, skips


def is_finite(tree):
    return all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, False])
def test_a_step_at_a_rate_of_nan_is_skipped_exactly(compiled):
    steps = 2 if compiled else 1
    bad = optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(nan_at(steps)))
    params, state, skips = trained(protect(bad), steps + 1, compiled=compiled)
    before, state_before, _ = trained(protect(bad), steps, compiled=compiled)
    assert skips == [False] * steps + [True]
    assert all(map(jnp.array_equal, jax.tree.leaves(params), jax.tree.leaves(before)))
    inner, inner_before = (jax.tree.leaves(s.inner_state) for s in (state, state_before))
    assert all(map(jnp.array_equal, inner, inner_before))


@pytest.mark.slow
def test_numbers_rounded_to_bfloat16_spoil_no_weight():
    """A `b2` of 0.999 is 1 in bfloat16, so that Adam divides 0 by 0."""
    tx = protect(optax.inject_hyperparams(optax.adamw)(1e-3))
    params, _, skips = trained(tx, 3, dtype=jnp.bfloat16)
    assert all(skips)
    assert is_finite(params)


def test_observe_changes_nothing():
    params, _, _ = trained(protect(optax.sgd(nan_at(1)), "observe"), 3)
    assert not is_finite(params)


def test_a_healer_names_the_number(tmp_path, caplog):
    tx = protect(optax.inject_hyperparams(optax.sgd)(0.1))
    params = {"w": jnp.ones(4)}

    @jax.jit
    def step(state):
        params, opt = state
        updates, opt = tx.update(params, opt, params, value=VALUE)
        return optax.apply_updates(params, updates), opt

    with healcore.Healer(state=(params, tx.init(params)), store=tmp_path / "store") as healer:
        for number in healer.steps(8):
            params, opt = healer.state
            rate = jnp.float32(math.nan if number == 5 else 0.1)
            opt = optax.tree.set(opt, learning_rate=rate)
            healer.update(step((params, opt)))
        assert is_finite(healer.state[0])
    assert "made NaN or Inf of a finite gradient" in caplog.text


@pytest.mark.parametrize(
    "optimizer", [optax.adam(0.1, eps=0.0), optax.rmsprop(0.1, eps=0.0)], ids=["adam", "rmsprop"]
)
def test_elements_of_which_the_optimizer_makes_nan_keep_their_weights(optimizer):
    """A row of an embedding that no token reads has a zero gradient, and 0 / 0 is NaN."""
    tx = protect(optimizer)
    params = {"embedding": jnp.ones((8, 4)), "bias": jnp.ones(3)}
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        grads = {"embedding": params["embedding"].at[2].set(0.0), "bias": params["bias"]}
        updates, state = tx.update(grads, state, params, value=VALUE)
        return optax.apply_updates(params, updates), state

    for _ in range(3):
        params, state = step(params, state)
        assert not last_decision(state).skip
    assert (params["embedding"][2] == 1).all()
    assert is_finite(params)
    assert (jnp.delete(params["embedding"], 2, axis=0) < 1).all()
    assert (params["bias"] < 1).all()
