"""Norms of gradients, and functions on trees of gradients or updates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore.jax import gradients
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
