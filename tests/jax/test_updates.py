import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore.jax import updates
from tests.jax.bits import assert_same_bits

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
        update = updates.no_update_where(skip, jnp.full_like(params, jnp.nan))
        return optax.apply_updates(params, update)

    assert_same_bits(step(params, True), params)
    assert_same_bits(step(params, False), params)  # no NaN is applied


def test_plain_zero_would_not():
    negative_zero = jnp.asarray([-0.0])
    assert not jnp.signbit(negative_zero + 0.0).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["no_update_where", "zero_where", "nan_where"])
def test_dtype_and_other_leaves_are_kept(name, dtype):
    tree = {"w": jnp.ones((3,), dtype), "n": jnp.asarray([7], jnp.int32), "m": optax.MaskedNode()}
    for skip in (True, False):
        out = getattr(updates, name)(jnp.bool_(skip), tree)
        assert out["w"].dtype == dtype
        assert out["n"][0] == 7
        if not skip:
            assert_same_bits(out, tree)
    expected = {"no_update_where": -0.0, "zero_where": 0.0, "nan_where": jnp.nan}[name]
    out = getattr(updates, name)(jnp.bool_(True), tree)
    assert_same_bits(out["w"], jnp.full((3,), expected, dtype))


def test_complex_updates_are_held_in_both_parts():
    params = jnp.asarray([complex(-0.0, -0.0), 1 - 1j], jnp.complex64)
    update = updates.no_update_where(jnp.bool_(True), jnp.full_like(params, jnp.nan))
    assert_same_bits(params + update, params)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaling_rounds_once(dtype):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(1000), dtype)
    factor = jnp.float32(0.3)
    out = updates.scale({"w": x}, factor)["w"]
    assert out.dtype == dtype
    exact = (np.asarray(x, np.float32) * np.float32(0.3)).astype(np.float32)
    assert_same_bits(out, jnp.asarray(exact).astype(dtype))


def test_scaling_by_one_changes_nothing():
    tree = {"w": all_values(jnp.bfloat16), "n": jnp.asarray([3], jnp.int32)}
    assert_same_bits(updates.scale(tree, jnp.float32(1.0)), tree)


def test_each_leaf_has_its_factor():
    tree = {"a": jnp.ones(2), "b": jnp.asarray([5], jnp.int32), "c": jnp.ones(3, jnp.bfloat16)}
    out = updates.scale_each(tree, jnp.asarray([0.5, 0.25]))
    assert out["a"].tolist() == [0.5, 0.5]
    assert out["b"].tolist() == [5]
    assert out["c"].tolist() == [0.25] * 3
    assert out["c"].dtype == jnp.bfloat16
