"""Optax's tests of contributed transformations (contrib/_common_test.py), on healcore's."""

# optax types every tree as the union of all trees, so that no leaf has an attribute.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore.core.clipping import ZClipConfig
from healcore.jax import heal, heal_zclip, last_decision, metrics, protect
from healcore.jax.heal_state import find
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits, avals

# Small policies mostly: XLA takes two seconds for one with every detector.
OPTIMIZERS = {
    "heal_zclip": lambda lr=0.05: optax.chain(heal_zclip(), optax.adam(lr)),
    "heal_adagc": lambda lr=0.05: optax.chain(heal(policies.ADAGC), optax.adam(lr)),
    "heal_observe": lambda lr=0.05: optax.chain(heal(policies.OBSERVE), optax.adam(lr)),
    "protect": lambda lr=0.05: protect(optax.adam(lr), policies.CUT_LR),
    "protect_everything": lambda lr=0.05: protect(optax.adam(lr), policies.EVERYTHING),
    "protect_adagc": lambda lr=0.05: protect(optax.adam(lr), policies.ADAGC),
    "protect_updates": lambda lr=0.05: protect(optax.adam(lr), policies.UPDATES),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
HALVES = [jnp.bfloat16, jnp.float16]


def parabola(dtype):
    target = (jnp.asarray([1.0, -1.0, 1.0], dtype), jnp.asarray([[3.0, -2.0], [1.0, 4.0]], dtype))
    start = (jnp.asarray([-1.0, 3.0, 1.0], dtype), jnp.zeros((2, 2), dtype))

    def loss(params):
        return sum(jnp.sum((p - t) ** 2) for p, t in zip(params, target, strict=True))

    return start, target, loss


def rosenbrock(dtype):
    def loss(params):
        return (1.0 - params[0]) ** 2 + 100.0 * (params[1] - params[0] ** 2) ** 2

    return jnp.zeros((2,), dtype), jnp.ones((2,), dtype), loss


@pytest.mark.parametrize("name", ["heal_zclip", "protect_updates"])
def test_takes_unknown_arguments_and_traces_once(name):
    chex.clear_trace_counter()  # it counts by source line, over all parameters of this test
    tx = OPTIMIZERS[name]()
    params, _, loss = rosenbrock(jnp.float32)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params, value=value, nobody_expects_this=1)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(3):
        params, state = step(params, state)
    assert int(last_decision(state).cause) == 0


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        *((name, parabola) for name in ("heal_zclip", "heal_adagc", "protect_everything")),
        *((name, rosenbrock) for name in ("heal_observe", "protect", "protect_adagc")),
    ],
)
def test_converges_inside_scan(name, problem):
    tx = OPTIMIZERS[name](0.01)
    params, target, loss = problem(jnp.float32)
    state = optax.tree.map_params(tx, lambda leaf: leaf, tx.init(params))

    def step(carry, _):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params, value=value)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.jit(lambda c: jax.lax.scan(step, c, length=10_000))((params, state))
    chex.assert_trees_all_close(params, target, rtol=3e-2, atol=3e-2)


@every_optimizer
def test_tree_map_reaches_the_moments_and_not_the_healing_state(name):
    tx = OPTIMIZERS[name]()
    state = tx.init({"a": jnp.ones(3), "b": jnp.ones((2, 2))})
    doubled = optax.tree.map_params(tx, lambda leaf: leaf + 2, state)
    assert optax.tree.get(doubled, "mu")["a"].tolist() == [2.0, 2.0, 2.0]
    assert_same_bits(find(doubled), find(state))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, HALVES[i % 2]) for i, name in enumerate(OPTIMIZERS)),
        *(("protect_everything", dtype) for dtype in (jnp.float16, jnp.float32, jnp.float64)),
        *((name, jnp.float64) for name in ("heal_adagc", "protect_updates")),
    ],
)
def test_keeps_shapes_dtypes_and_weak_types(name, dtype):
    with jax.enable_x64(dtype == jnp.float64):
        tx = OPTIMIZERS[name]()
        params, _, loss = parabola(dtype)

        def step(params, state, take):
            value, grads = jax.value_and_grad(loss)(params)
            # The wrong precision on purpose; cond refuses branches of two types.
            value = value.astype(jnp.float16)
            return jax.lax.cond(
                take, lambda: tx.update(grads, state, params, value=value), lambda: (params, state)
            )

        state = tx.init(params)
        updates, new = jax.eval_shape(step, params, state, jnp.bool_(True))
        assert all(u.dtype == dtype for u in updates)
        assert avals(new) == avals(state)


def test_hyperparameters_can_be_injected():
    plain, injected = heal_zclip(), optax.inject_hyperparams(heal_zclip)()
    params = [jnp.negative(jnp.ones((2, 3))), jnp.ones((2, 5, 2))]
    s, si = jax.jit(plain.init)(params), jax.jit(injected.init)(params)
    rng = np.random.default_rng(0)
    for i in range(40):
        grads = [jnp.asarray(rng.standard_normal(p.shape), jnp.float32) * 0.1 for p in params]
        if i % 10 == 9:
            grads = [g * 20 for g in grads]
        u, s = jax.jit(plain.update)(grads, s, params)
        ui, si = jax.jit(injected.update)(grads, si, params)
        chex.assert_trees_all_close(u, ui, rtol=1e-5)
    # A policy whose numbers are arrays has no fingerprint.
    s = s._replace(heal_engine=s.heal_engine.at[:2].set(0))
    chex.assert_trees_all_close(s, si.inner_state, rtol=1e-4, atol=1e-6)
    assert int(metrics(s)["heal/clips"]) > 0


def test_a_scheduled_threshold_is_followed():
    limit = lambda count: jnp.where(count < 5, 10.0, 0.5)  # noqa: E731
    tx = optax.inject_hyperparams(heal_zclip)(max_norm=limit)
    params = jnp.ones(1)
    state = tx.init(params)
    norms = []
    for _ in range(8):
        updates, state = jax.jit(tx.update)(jnp.asarray([2.0]), state, params)
        norms.append(float(updates[0]))
    np.testing.assert_allclose(norms, [2.0] * 5 + [0.5] * 3, rtol=1e-5)


# Not the policies with every detector: MultiSteps selects each leaf of their state, which takes XLA
# five seconds to compile.
@pytest.mark.parametrize(
    ("name", "dtype"), [("heal_zclip", jnp.bfloat16), ("protect_adagc", jnp.float32)]
)
def test_multisteps_called_directly(name, dtype):
    tx = optax.MultiSteps(OPTIMIZERS[name](), every_k_schedule=2)
    params = jnp.asarray([1.0, 2.0], dtype)
    value, grads = jax.value_and_grad(lambda x: jnp.sum(x**2))(params)
    state = jax.jit(tx.init)(params)
    updates, state = jax.jit(tx.update)(grads, state, params, value=value)
    assert not np.any(np.asarray(updates, np.float32))
    assert int(optax.tree.get(state, "mini_step")) == 1
    updates, state = jax.jit(tx.update)(grads, state, params, value=value)
    assert np.all(np.asarray(updates, np.float32))
    assert metrics(state)["heal/steps"] == 1  # only the emitting micro-batch is judged
    assert updates.dtype == dtype


def test_a_bad_micro_batch_does_not_enter_the_accumulator_of_a_protected_multisteps():
    inner = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=2)
    tx = protect(optax.GradientTransformationExtraArgs(inner.init, inner.update), policies.SKIP)
    params = jnp.zeros(2)
    state = tx.init(params)
    for g in (1.0, jnp.nan, 3.0):
        updates, state = jax.jit(tx.update)(jnp.full(2, g), state, params)
        params = optax.apply_updates(params, updates)
    assert params.tolist() == [-2.0, -2.0]


@pytest.mark.parametrize("name", ["heal_adagc", "protect"])
def test_masked_tensors_are_neither_judged_nor_changed(name):
    mask = {"a": True, "b": False}
    tx = optax.masked(OPTIMIZERS[name](), mask)
    params = {"a": jnp.ones(3), "b": jnp.ones(3)}
    state = tx.init(params)
    grads = {"a": jnp.full(3, 0.1), "b": jnp.full(3, jnp.nan)}
    updates, state = jax.jit(tx.update)(grads, state, params, value=jnp.float32(1.0))
    assert not bool(last_decision(state).skip)
    assert_same_bits(updates["b"], grads["b"])
    grads = {"a": jnp.full(3, jnp.nan), "b": jnp.full(3, 0.1)}
    updates, state = jax.jit(tx.update)(grads, state, params, value=jnp.float32(1.0))
    assert bool(last_decision(state).skip)
    assert jnp.isfinite(updates["a"]).all()


def test_multi_transform_heals_each_group_by_itself():
    each = protect(optax.sgd(1.0), policies.SKIP)
    tx = optax.multi_transform({"x": each, "y": each}, {"a": "x", "b": "y"})
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    state = tx.init(params)
    grads = {"a": jnp.ones(2), "b": jnp.full(2, jnp.nan)}
    updates, state = jax.jit(tx.update)(grads, state, params, value=jnp.float32(1.0))
    assert updates["a"].tolist() == [-1.0, -1.0]
    assert updates["b"].tolist() == [0.0, 0.0]
    assert not bool(last_decision(state.inner_states["x"]).skip)
    assert bool(last_decision(state.inner_states["y"]).skip)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float64])
def test_the_precision_of_a_threshold_is_not_that_of_the_state(dtype):
    with jax.enable_x64(dtype == jnp.float64):
        params = jnp.ones(3, dtype)
        clip = ("zclip", ZClipConfig(max_norm=jnp.asarray(1.0, dtype)))
        for tx in (
            heal(policies.ZCLIP._replace(clip=clip)),
            optax.inject_hyperparams(heal_zclip)(),
        ):
            state = tx.init(params)
            updates, new = jax.eval_shape(tx.update, params, state, params)
            assert updates.dtype == dtype
            assert avals(new) == avals(state)


def test_survives_donation_even_after_an_eager_step():
    tx = OPTIMIZERS["protect"]()
    params = {"w": jnp.ones(4), "b": jnp.ones(2, jnp.bfloat16)}
    grads = jax.tree.map(jnp.ones_like, params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, value=jnp.float32(1.0))
        return optax.apply_updates(params, updates), state, last_decision(state)

    state = tx.init(params)
    _, state = tx.update(grads, state, params, value=jnp.float32(1.0))
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
    params = {"w": jnp.linspace(-1.0, 1.0, 5), "b": jnp.ones(2, jnp.bfloat16)}
    p, q = params, params
    s, t = tx.init(p), inner.init(q)
    rng = np.random.default_rng(0)
    for scale in (1.0, 0.5, 1e6, jnp.nan, 1.0):
        grads = jax.tree.map(
            lambda x: jnp.asarray(rng.standard_normal(x.shape) * scale, x.dtype),  # noqa: B023
            params,
        )
        u, s = jax.jit(tx.update)(grads, s, p, value=jnp.float32(1.0))
        v, t = jax.jit(inner.update)(grads, t, q)
        assert_same_bits(u, v)
        p, q = optax.apply_updates(p, u), optax.apply_updates(q, v)
    assert not bool(last_decision(s).skip)
    assert int(metrics(s)["heal/skips"]) >= 1  # it would have
