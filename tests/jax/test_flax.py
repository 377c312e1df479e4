"""Flax: a linen TrainState and nnx objects are reverted whole on a skip."""

from __future__ import annotations

from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from healcore.jax import HealStateError, heal_zclip, protect
from healcore.jax.flax_linen import HealTrainState
from healcore.jax.flax_nnx import last_decision, metrics, snapshot, update
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits, differs

# -- linen ----------------------------------------------------------------------------------------


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        return nn.Dense(1)(nn.relu(x))


class State(HealTrainState):
    batch_stats: Any


X = jnp.asarray(np.random.default_rng(0).standard_normal((8, 3)), jnp.float32)


def linen_state(tx):
    net = LinenNet()
    variables = net.init(jax.random.key(0), X, train=True)
    return State.create(
        apply_fn=net.apply, params=variables["params"], batch_stats=variables["batch_stats"], tx=tx
    )


def linen_step(state, x):
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


def test_a_bad_batch_is_undone_whole_in_linen():
    state = linen_state(protect(optax.adamw(0.05), policies.ZCLIP))
    chex.clear_trace_counter()
    compiled = jax.jit(chex.assert_max_traces(linen_step, n=1))
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
    state = linen_state(protect(optax.sgd(0.1), policies.ZCLIP))
    grads = jax.tree.map(jnp.ones_like, state.params)
    other = lambda *args, **kwargs: None  # noqa: E731
    new = state.apply_gradients(grads=grads, value=jnp.float32(1.0), apply_fn=other)
    assert new.apply_fn is other
    assert new.tx is state.tx
    with pytest.raises(TypeError, match="no_such_field"):
        state.apply_gradients(grads=grads, no_such_field=1)


def test_an_optimizer_that_does_not_heal_is_an_error():
    state = linen_state(optax.sgd(0.1))
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


# -- nnx ------------------------------------------------------------------------------------------


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.outer = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.dropout(nnx.relu(self.norm(self.inner(x)))))


@nnx.jit
def step(model, optimizer, x):
    before = snapshot(model)
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - 1.0) ** 2))(model)
    return loss, update(optimizer, model, grads, value=loss, before=before)


def build(tx):
    model = NnxNet(nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def copied(tree):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(tree)))


def test_a_bad_batch_is_undone_whole_in_nnx():
    model, optimizer = build(protect(optax.adamw(0.05), policies.ZCLIP))
    first, decision = step(model, optimizer, X)
    assert not bool(decision.skip)
    weights, moments = copied(snapshot_of(model)), copied(optimizer)["opt_state"]["inner_state"]
    _, decision = step(model, optimizer, X.at[0, 0].set(jnp.nan))
    assert bool(decision.skip)
    assert_same_bits(copied(snapshot_of(model)), weights)
    assert_same_bits(copied(optimizer)["opt_state"]["inner_state"], moments)
    assert int(optimizer.step[...]) == 1
    assert bool(last_decision(optimizer).skip)
    assert int(metrics(optimizer)["heal/skips"]) == 1
    for _ in range(30):
        loss, _ = step(model, optimizer, X)
    assert float(loss) < 0.5 * float(first)
    assert differs(copied(snapshot_of(model)), weights)


def test_random_streams_go_on_over_a_skip():
    model, optimizer = build(protect(optax.adamw(0.05), policies.ZCLIP))
    before = drawn(model)
    step(model, optimizer, X.at[0].set(jnp.nan))
    assert drawn(model) == before + 1


def test_plain_optimizer_update_hears_the_loss():
    model, optimizer = build(optax.chain(heal_zclip(), optax.adamw(0.05)))

    @nnx.jit
    def plain(model, optimizer, value):
        grads = nnx.grad(lambda m: jnp.mean(m(X) ** 2))(model)
        optimizer.update(model, grads, value=value)

    plain(model, optimizer, jnp.float32(3.5))
    assert float(metrics(optimizer)["heal/loss"]) == 3.5


def drawn(model):
    assert model.dropout.rngs is not None
    return int(model.dropout.rngs.count[...])


def snapshot_of(model):
    return nnx.State(nnx.state(model, nnx.Not(nnx.RngState)))
