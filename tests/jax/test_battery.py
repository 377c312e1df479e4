"""Optax's tests of contributed transformations (contrib/_common_test.py), and JAX's transforms."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore.core.clipping import ZClipConfig
from healcore.jax import heal, heal_zclip, last_decision, metrics, protect
from healcore.jax.opt_state import find
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits, avals
from tests.jax.processes import Program

ADAM = optax.adam(0.05)
# Small policies mostly: XLA takes two seconds for one with every detector.
OPTIMIZERS = {
    "heal_zclip": optax.chain(heal_zclip(), ADAM),
    "heal_adagc": optax.chain(heal(policies.ADAGC), ADAM),
    "heal_observe": optax.chain(heal(policies.OBSERVE), ADAM),
    "protect": protect(ADAM, policies.CUT_LR),
    "protect_everything": protect(ADAM, policies.EVERYTHING),
    "protect_adagc": protect(ADAM, policies.ADAGC),
}
LOSS = jnp.float32(1.0)


@pytest.mark.parametrize("name", ["heal_zclip", "heal_adagc", "protect"])
def test_tree_map_reaches_the_moments_and_not_the_healing_state(name):
    tx = OPTIMIZERS[name]
    state = tx.init({"a": jnp.ones(3), "b": jnp.ones((2, 2))})
    moved = optax.tree.map_params(tx, lambda leaf: leaf + 2, state)
    assert optax.tree.get(moved, "mu")["a"].tolist() == [2.0, 2.0, 2.0]
    assert_same_bits(find(moved), find(state))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float64])
def test_keeps_shapes_dtypes_and_weak_types(dtype):
    with jax.enable_x64(dtype == jnp.float64):
        # A threshold has the precision of the parameters, which the state does not take over.
        clip = ZClipConfig(max_norm=jnp.asarray(1.0, dtype))
        more = {"threshold": heal(policies.ZCLIP._replace(clip=clip))}
        more["injected"] = optax.inject_hyperparams(heal_zclip)()
        params = (jnp.ones(3, dtype), jnp.zeros((2, 2), dtype))
        for name, tx in {**OPTIMIZERS, **more}.items():
            state = tx.init(params)
            # A loss in the wrong precision on purpose.
            update = functools.partial(tx.update, value=jnp.float16(1))
            updates, new = jax.eval_shape(update, params, state, params)
            assert all(u.dtype == dtype for u in updates), name
            assert avals(new) == avals(state), name


def test_a_scheduled_threshold_is_followed():
    def limit(count):
        return jnp.where(count < 5, 10.0, 0.5)

    tx = optax.inject_hyperparams(heal_zclip)(max_norm=limit)
    params = jnp.ones(1)
    state = tx.init(params)
    norms = []
    for _ in range(8):
        updates, state = jax.jit(tx.update)(jnp.asarray([2.0]), state, params)
        norms.append(float(updates[0]))
    np.testing.assert_allclose(norms, [2.0] * 5 + [0.5] * 3, rtol=1e-5)


@pytest.mark.parametrize("name", ["heal_adagc", "protect"])
def test_masked_tensors_are_neither_judged_nor_changed(name):
    tx = optax.masked(OPTIMIZERS[name], {"a": True, "b": False})
    params = {"a": jnp.ones(3), "b": jnp.ones(3)}
    state = tx.init(params)
    for bad in "ba":
        grads = {name: jnp.full(3, jnp.nan if name == bad else 0.1) for name in "ab"}
        updates, state = jax.jit(tx.update)(grads, state, params, value=LOSS)
        assert bool(last_decision(state).skip) == (bad == "a")
        assert_same_bits(updates["b"], grads["b"])
    assert jnp.isfinite(updates["a"]).all()


@pytest.mark.slow
def test_survives_donation_even_after_an_eager_step():
    chex.clear_trace_counter()
    tx = OPTIMIZERS["protect"]
    params = {"w": jnp.ones(4), "b": jnp.ones(2, jnp.bfloat16)}
    grads = jax.tree.map(jnp.ones_like, params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @chex.assert_max_traces(n=1)
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, value=LOSS)
        return optax.apply_updates(params, updates), state, last_decision(state)

    _, state = tx.update(grads, tx.init(params), params, value=LOSS)
    params, state, first = step(params, state, grads)
    old = state
    params, state, _ = step(params, state, grads)
    # What the step does not read (the last decision) is not donated either.
    moments = [optax.tree.get(old, name) for name in ("mu", "nu", "count")]
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(moments))
    assert find(old).heal_engine.is_deleted()
    assert float(first.lr_scale) == 1.0  # readable after the state it came from is gone


@pytest.mark.parametrize("kind", ["heal", "protect"])
def test_observe_mode_changes_no_bit(kind):
    inner = optax.adamw(0.1)
    policy = policies.OBSERVE
    tx = protect(inner, policy) if kind == "protect" else optax.chain(heal(policy), inner)
    p = q = {"w": jnp.linspace(-1.0, 1.0, 5), "b": jnp.ones(2, jnp.bfloat16)}
    s, t = tx.init(p), inner.init(q)
    rng = np.random.default_rng(0)
    for scale in (1.0, 0.5, 1e6, jnp.nan, 1.0):
        draws = [rng.standard_normal(x.shape) * scale for x in p.values()]
        grads = {name: jnp.asarray(x, p[name].dtype) for name, x in zip(p, draws, strict=True)}
        u, s = jax.jit(tx.update)(grads, s, p, value=LOSS)
        v, t = jax.jit(inner.update)(grads, t, q)
        assert_same_bits(u, v)
        p, q = optax.apply_updates(p, u), optax.apply_updates(q, v)
    assert not bool(last_decision(s).skip)
    assert int(metrics(s)["heal/skips"]) >= 1  # it would have


@pytest.mark.parametrize(
    "name",
    [
        "heal_zclip",
        "protect",
        pytest.param("pretraining", marks=pytest.mark.slow),
        pytest.param("line_search", marks=pytest.mark.slow),
    ],
)
def test_runs_in_every_control_flow_and_with_a_sharded_state(name):
    scenario = f"four_devices:flows_of:{name}"
    assert Program("", scenario, world=1, devices=4).of(scenario) == [None]
