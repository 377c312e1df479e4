"""Norms and changes of gradients, and gradients that the optimizer does not read."""

# optax types every state as the union of all, so that none has an attribute.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore.jax import gradients, metrics, protect
from healcore.jax.heal_state import find
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def all_values(dtype):
    """All 16-bit values, 2**17 of the 32-bit ones: zeros of both signs, subnormals, Inf; no NaN."""
    patterns = np.arange(65536, dtype=np.uint32)
    if jnp.dtype(dtype).itemsize == 2:
        raw = jnp.asarray(patterns.astype(np.uint16))
    else:
        raw = jnp.asarray(np.concatenate([patterns * 65537, patterns]))
    values = jax.lax.bitcast_convert_type(raw, dtype)
    exact = np.asarray(values, np.float64)
    kept = ~np.isnan(exact)
    if dtype == jnp.bfloat16:
        # XLA's own bfloat16 addition flushes subnormals in some programs; `commit` keeps them.
        kept &= (exact == 0) | (np.abs(exact) >= float(jnp.finfo(dtype).tiny))
    return values[kept]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_held_update_leaves_every_value_bit_identical(dtype):
    params = all_values(dtype)

    @jax.jit
    def step(params, skip):
        update = gradients.fill_where(jnp.full_like(params, jnp.nan), skip, -0.0)
        return optax.apply_updates(params, update)

    assert_same_bits(step(params, True), params)


def test_complex_updates_are_held_in_both_parts():
    params = jnp.asarray([complex(-0.0, -0.0), 1 - 1j], jnp.complex64)
    update = gradients.fill_where(jnp.full_like(params, jnp.nan), jnp.bool_(True), -0.0)
    assert_same_bits(params + update, params)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaling_rounds_once(dtype):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(1000), dtype)
    factor = jnp.float32(0.3)
    out = gradients.scale({"w": x}, factor)["w"]
    assert out.dtype == dtype
    exact = (np.asarray(x, np.float32) * np.float32(0.3)).astype(np.float32)
    assert_same_bits(out, jnp.asarray(exact).astype(dtype))


def test_each_leaf_has_its_factor():
    tree = {"a": jnp.ones(2), "b": jnp.asarray([5], jnp.int32), "c": jnp.ones(3, jnp.bfloat16)}
    out = gradients.scale_each(tree, jnp.asarray([0.5, 0.25]))
    assert out["a"].tolist() == [0.5, 0.5]
    assert out["b"].tolist() == [5]
    assert out["c"].tolist() == [0.25] * 3
    assert out["c"].dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_those_of_the_float64_values_for_any_dtype(dtype):
    x = 300 * jnp.asarray(np.random.default_rng(0).standard_normal(4096), dtype)
    ints, float0 = jnp.asarray([1000], jnp.int32), np.zeros((2,), jax.dtypes.float0)
    tree = {"a": x, "b": (x[:7], ints, float0, optax.MaskedNode()), "c": jnp.zeros((0,))}
    norm, each = jax.jit(gradients.both_norms)(tree)
    exact = [np.linalg.norm(np.asarray(v, np.float64)) for v in (x, x[:7], [0.0])]
    assert norm.dtype == each.dtype == jnp.float32
    np.testing.assert_allclose(each, exact, rtol=1e-6)
    np.testing.assert_allclose(norm, np.linalg.norm(exact), rtol=1e-6)


def test_norms_of_no_gradients_of_complex_ones_and_of_one_bad_element():
    assert gradients.both_norms({"a": None})[0] == 0.0
    assert gradients.both_norms([jnp.asarray([3.0 + 4.0j], jnp.complex64)])[0] == 5.0
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        norm, each = gradients.both_norms({"a": jnp.ones(3), "b": jnp.asarray([1.0, bad])})
        assert not jnp.isfinite(norm)
        assert jnp.isfinite(each).tolist() == [True, False]


# -- `protect` judges only gradients that the optimizer reads -------------------------------------

PARAMS = {"base": jnp.ones(4), "head": jnp.full((4,), 0.5)}
LABELS = {"base": "frozen", "head": "trained"}
IS_FROZEN = {"base": True, "head": False}


def partition(rate=0.1):
    return optax.partition({"trained": optax.adam(rate), "frozen": optax.set_to_zero()}, LABELS)


def scheduled(rate):
    return optax.chain(optax.adam(rate), optax.masked(optax.set_to_zero(), IS_FROZEN))


FROZEN = {
    "partition": lambda: protect(partition(), policies.BOTH),
    "masked before": lambda: protect(
        optax.chain(optax.masked(optax.set_to_zero(), IS_FROZEN), optax.adam(0.1)), policies.BOTH
    ),
    "masked after": lambda: protect(scheduled(0.1), policies.BOTH),
    "chain of partition": lambda: protect(
        optax.chain(optax.trace(0.9), partition(), optax.scale(0.5)), policies.BOTH
    ),
    "accumulation": lambda: protect(optax.MultiSteps(partition(), 2), policies.BOTH),
    "injected inside": lambda: protect(
        optax.inject_hyperparams(scheduled)(rate=0.1), policies.BOTH
    ),
    "injected outside": lambda: optax.inject_hyperparams(
        lambda rate: protect(partition(rate), policies.BOTH)
    )(rate=0.1),
    "per tensor": lambda: protect(partition(), policies.ADAGC),
    "observe": lambda: protect(partition(), policies.OBSERVE),
    "update norm": lambda: protect(partition(), policies.UPDATES),
}
EAGER = ("masked after", "accumulation", "injected outside")


def in_scan(tx, grads, state) -> tuple[Any, Any]:
    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params, value=1.0)
        return (optax.apply_updates(params, updates), state), None

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads)
    return jax.jit(lambda state: jax.lax.scan(step, (PARAMS, state), stacked)[0])(state)


def in_loop(tx, grads, state) -> tuple[Any, Any]:
    params = PARAMS
    for each in grads:
        updates, state = tx.update(each, state, params, value=1.0)
        params = optax.apply_updates(params, updates)
    return params, state


def head_gradients(*bases, bad=None):
    """Ordinary gradients of the head, one for each gradient of the base."""
    random = np.random.default_rng(0).normal(0.1, 0.001, (len(bases), 4)).astype(np.float32)
    return [
        {
            "base": jnp.full(4, base, jnp.float32),
            "head": jnp.asarray(random[i] * (np.nan if i == bad else 1)),
        }
        for i, base in enumerate(bases)
    ]


@pytest.mark.parametrize("name", FROZEN)
def test_a_gradient_of_a_frozen_parameter_does_not_count(name):
    run = in_loop if name in EAGER else in_scan
    tx = FROZEN[name]()
    params, state = run(tx, head_gradients(1.0, 1.0, np.nan, 1.0, 1e8, 1.0), tx.init(PARAMS))
    expected, healthy = run(tx, head_gradients(*6 * [1.0]), tx.init(PARAMS))
    assert_same_bits(params, expected)
    assert_same_bits(params["base"], PARAMS["base"])
    assert np.all(params["head"] != PARAMS["head"])
    assert metrics(state)["heal/skips"] == 0
    assert metrics(state)["heal/clips"] == metrics(healthy)["heal/clips"]
    assert find(state).heal_leaf_norms[0] == 0
    if name != "observe":
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.inner_state))


@pytest.mark.parametrize("name", ["partition", "injected outside"])
def test_a_trained_parameter_with_nan_still_skips(name):
    tx = FROZEN[name]()
    params, state = in_scan(tx, head_gradients(1.0, 1e8, 1.0, bad=2), tx.init(PARAMS))
    assert metrics(state)["heal/skips"] == 1
    assert np.isfinite(params["head"]).all()


def test_all_gradients_of_an_optimizer_that_reads_them_count():
    zero_rate = optax.partition({"trained": optax.sgd(1.0), "frozen": optax.sgd(0.0)}, LABELS)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), partition())
    by_schedule = optax.sgd(lambda count: jnp.where(jnp.asarray(count) < 100, 0.0, 0.1))
    for inner in (zero_rate, clipped, by_schedule):
        tx = protect(inner, policies.SKIP)
        _, state = in_scan(tx, head_gradients(1.0, np.nan), tx.init(PARAMS))
        assert metrics(state)["heal/skips"] == 1


def test_an_optimizer_that_needs_concrete_values_runs_eagerly():
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return (updates if float(updates["head"][0]) < 5 else PARAMS), state

    tx = protect(optax.GradientTransformation(optax.init_empty_state, update), policies.SKIP)
    params, _ = in_loop(tx, head_gradients(1.0, 1.0), tx.init(PARAMS))
    assert np.all(params["head"] > 0.6)
