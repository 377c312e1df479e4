"""Flax: a linen TrainState and nnx objects are reverted whole on a skip."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from healcore.jax import HealStateError, protect
from healcore.jax.flax_linen import HealTrainState
from healcore.jax.flax_nnx import last_decision, metrics
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits, bits
from tests.jax.driver.small_runs import State, batch, in_place, linen


def test_a_bad_batch_is_undone_whole_in_linen():
    def whole() -> Any:
        return bits((state.step, state.params, state.batch_stats, state.opt_state.inner_state))

    run = linen()
    state = run.step(run.state, batch(0))
    assert not bool(state.last_decision.skip)
    before = whole()
    key = bits(state.key)
    statistics = bits(state.batch_stats)
    state = run.step(state, batch(1, bad=True))
    assert bool(state.last_decision.skip)
    assert whole() == before
    assert int(state.step) == 1
    assert bits(state.key) != key, "random keys continue: otherwise a bad draw would repeat"
    state = run.step(state, batch(2))
    assert int(state.step) == 2
    assert bits(state.batch_stats) != statistics


def keys(seed: int) -> dict[str, Any]:
    return {
        "typed": jax.random.split(jax.random.key(seed), 3),
        "raw": jax.random.PRNGKey(seed),
        "raw rbg": jax.random.PRNGKey(seed, impl="rbg"),
        "counters": jnp.full(3, seed, jnp.uint32),
    }


def test_random_keys_go_on_over_a_skip_and_counters_do_not():
    tx = protect(optax.sgd(0.1), policies.ZCLIP)
    params = {"w": jnp.ones(2)}
    state: Any = State.create(apply_fn=None, params=params, tx=tx, batch_stats=None, key=keys(0))
    bad = {"w": jnp.full(2, jnp.nan)}
    step = jax.jit(lambda s, k: s.apply_gradients(grads=bad, value=jnp.float32(1.0), key=k))
    new = step(state, keys(1))
    assert bool(new.last_decision.skip)
    assert int(new.step) == 0
    assert_same_bits(new.key, {**keys(1), "counters": keys(0)["counters"]})


def test_other_keywords_are_fields_and_an_optimizer_that_does_not_heal_is_an_error():
    tx = protect(optax.sgd(0.1), policies.ZCLIP)

    def other(*args, **kwargs):
        return None

    state = HealTrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=tx)
    new = state.apply_gradients(grads=state.params, value=jnp.float32(1.0), apply_fn=other)
    assert new.apply_fn is other
    with pytest.raises(TypeError, match="no_such_field"):
        state.apply_gradients(grads=state.params, no_such_field=1)
    state = HealTrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
    with pytest.raises(HealStateError, match="no healing state"):
        state.apply_gradients(grads=state.params)


def test_a_bad_batch_is_undone_whole_in_nnx():
    def whole() -> Any:
        weights = nnx.state(model, nnx.Not((nnx.RngState, nnx.Intermediate)))
        moments = nnx.to_pure_dict(nnx.state(optimizer))["opt_state"]["inner_state"]
        return bits((nnx.to_pure_dict(weights), moments))

    run = in_place()
    model, optimizer = run.state["model"], run.state["optimizer"]
    run.step(run.state, batch(0))
    assert not bool(last_decision(optimizer).skip)
    before = whole()
    run.step(run.state, batch(1, bad=True))
    assert bool(last_decision(optimizer).skip)
    assert whole() == before
    assert int(optimizer.step[...]) == 1
    assert int(model.dropout.rngs.count[...]) == 2, "random streams continue over a skip"
    assert int(metrics(optimizer)["heal/skips"]) == 1
    run.step(run.state, batch(2))
    assert whole() != before
