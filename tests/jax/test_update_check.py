"""A step whose gradients are finite, and of which the optimizer makes NaN or Inf, is skipped."""

import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
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
def test_numbers_rounded_to_bfloat16_are_named_and_spoil_no_weight():
    tx = protect(optax.inject_hyperparams(optax.adamw)(1e-3))
    with pytest.warns(UserWarning, match=r"bfloat16.*b2=0.999 is 1.0"):
        params, _, skips = trained(tx, 3, dtype=jnp.bfloat16)
    assert all(skips)
    assert is_finite(params)


@pytest.mark.slow
@pytest.mark.parametrize("tx", [optax.adamw(1e-3), optax.inject_hyperparams(optax.adamw)(1e-3)])
def test_an_update_without_rounding_warns_of_nothing(tx):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, _, skips = trained(protect(tx), 2)
    assert not any(skips)


def test_each_partition_is_looked_at():
    """A rate of NaN of the large tensors alone, as in an optimizer with two groups."""
    labels = {"large": "a", "small": "b"}
    tx = optax.partition({"a": optax.sgd(nan_at(1)), "b": optax.sgd(0.1)}, labels)
    params, _, _ = trained(protect(tx), 3)
    assert is_finite(params)


def test_rows_without_a_gradient_keep_their_values_where_adam_divides_0_by_0():
    """As the unused rows of an embedding in float16, whose `eps` of 1e-8 is rounded to 0."""
    tx = protect(optax.adamw(0.1, eps=0.0, weight_decay=0.0))
    params = {"embedding": jnp.ones((30, 10)), "bias": jnp.ones(3)}
    state = tx.init(params)
    used = jnp.arange(30)[:, None] < 20
    for _ in range(2):
        grads = {"embedding": jnp.where(used, params["embedding"], 0.0), "bias": params["bias"]}
        updates, state = tx.update(grads, state, params, value=VALUE)
        params = optax.apply_updates(params, updates)
    assert not last_decision(state).skip
    assert is_finite((params, state.inner_state))
    embedding = np.asarray(params["embedding"])
    assert (embedding[20:] == 1).all()
    assert (embedding[:20] < 1).all()


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
