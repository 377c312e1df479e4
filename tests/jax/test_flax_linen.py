from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore.jax import HealStateError, protect
from healcore.jax.flax_linen import HealTrainState
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits, differs


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        return nn.Dense(1)(nn.relu(x))


class State(HealTrainState):
    batch_stats: Any


X = jnp.asarray(np.random.default_rng(0).standard_normal((8, 3)), jnp.float32)


def create(tx):
    net = Net()
    variables = net.init(jax.random.key(0), X, train=True)
    return State.create(
        apply_fn=net.apply, params=variables["params"], batch_stats=variables["batch_stats"], tx=tx
    )


def step(state, x):
    def loss_fn(params):
        out, new = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            x,
            train=True,
            mutable=["batch_stats"],
        )
        return jnp.mean((out - 1.0) ** 2), new["batch_stats"]

    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads, value=loss, batch_stats=stats)
    return state, loss, state.last_decision


def whole(state):
    return state.step, state.params, state.batch_stats, state.opt_state.inner_state


def test_a_bad_batch_is_undone_whole_and_training_continues():
    state = create(protect(optax.adamw(0.05), policies.ZCLIP))
    chex.clear_trace_counter()
    compiled = jax.jit(chex.assert_max_traces(step, n=1))
    state, first, decision = compiled(state, X)
    assert not bool(decision.skip)
    new, _, decision = compiled(state, X.at[0, 0].set(jnp.nan))
    assert bool(decision.skip)
    assert_same_bits(whole(new), whole(state))
    assert int(new.step) == 1
    for _ in range(30):
        new, loss, _ = compiled(new, X)
    assert float(loss) < 0.5 * float(first)
    assert differs(new.batch_stats, state.batch_stats)


def test_other_keywords_are_fields_as_in_flax():
    state = create(protect(optax.sgd(0.1), policies.ZCLIP))
    grads = jax.tree.map(jnp.ones_like, state.params)
    other = lambda *args, **kwargs: None  # noqa: E731
    new = state.apply_gradients(grads=grads, value=jnp.float32(1.0), apply_fn=other)
    assert new.apply_fn is other
    assert new.tx is state.tx
    with pytest.raises(TypeError, match="no_such_field"):
        state.apply_gradients(grads=grads, no_such_field=1)


def test_an_optimizer_that_does_not_heal_is_an_error():
    state = create(optax.sgd(0.1))
    with pytest.raises(HealStateError, match="no healing state"):
        state.apply_gradients(grads=state.params)


class WithKey(HealTrainState):
    key: Any


@pytest.mark.parametrize(
    "make",
    [
        jax.random.key,
        jax.random.PRNGKey,
        lambda seed: jax.random.key(seed, impl="rbg"),
        lambda seed: jax.random.PRNGKey(seed, impl="rbg"),
        lambda seed: {"noise": jax.random.split(jax.random.key(seed), 3)},
    ],
    ids=["typed", "raw", "typed rbg", "raw rbg", "several"],
)
def test_random_keys_go_on_over_a_skip(make):
    """Otherwise a bad draw would repeat at every step."""
    tx = protect(optax.sgd(0.1), policies.ZCLIP)
    state: Any = WithKey.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=tx, key=make(0))
    bad = {"w": jnp.full(2, jnp.nan)}
    new = jax.jit(lambda s, k: s.apply_gradients(grads=bad, value=jnp.float32(1.0), key=k))(
        state, make(1)
    )
    assert bool(new.last_decision.skip)
    assert int(new.step) == 0
    assert_same_bits(new.key, make(1))


def test_counters_that_are_no_keys_stay_over_a_skip():
    tx = protect(optax.sgd(0.1), policies.ZCLIP)
    counts = jnp.zeros((3,), jnp.uint32)
    state: Any = WithKey.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=tx, key=counts)
    new = state.apply_gradients(grads={"w": jnp.full(2, jnp.nan)}, key=counts + 1)
    assert not jnp.any(new.key)
