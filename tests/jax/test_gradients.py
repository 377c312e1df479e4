"""Norms of gradients, and functions on trees of gradients or updates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore.jax import global_norm, gradients, leaf_norms
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "value",
    [-0.0, 0.0, jnp.nan],
)
def test_dtype_and_other_leaves_are_kept(value, dtype):
    tree = {"w": jnp.ones((3,), dtype), "n": jnp.asarray([7], jnp.int32), "m": optax.MaskedNode()}
    for skip in (True, False):
        out = gradients.fill_where(tree, jnp.bool_(skip), value)
        assert out["w"].dtype == dtype
        assert out["n"][0] == 7
        if not skip:
            assert_same_bits(out, tree)
    out = gradients.fill_where(tree, jnp.bool_(True), value)
    assert_same_bits(out["w"], jnp.full((3,), value, dtype))


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


def test_scaling_by_one_changes_nothing():
    tree = {"w": all_values(jnp.bfloat16), "n": jnp.asarray([3], jnp.int32)}
    assert_same_bits(gradients.scale(tree, jnp.float32(1.0)), tree)


def test_each_leaf_has_its_factor():
    tree = {"a": jnp.ones(2), "b": jnp.asarray([5], jnp.int32), "c": jnp.ones(3, jnp.bfloat16)}
    out = gradients.scale_each(tree, jnp.asarray([0.5, 0.25]))
    assert out["a"].tolist() == [0.5, 0.5]
    assert out["b"].tolist() == [5]
    assert out["c"].tolist() == [0.25] * 3
    assert out["c"].dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_norm_is_that_of_the_float64_values_for_any_dtype(dtype):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(4096), dtype)
    norm = jax.jit(global_norm)({"a": x, "b": (x[:7],)})
    exact = np.sqrt(sum((np.asarray(v, np.float64) ** 2).sum() for v in (x, x[:7])))
    assert norm.dtype == jnp.float32
    assert norm.shape == ()
    np.testing.assert_allclose(norm, exact, rtol=1e-6)


def test_half_precision_does_not_overflow_where_optax_does():
    x = jnp.full((4,), 300.0, jnp.float16)
    assert not jnp.isfinite(optax.tree.norm(x))
    np.testing.assert_allclose(global_norm(x), 600.0)


@pytest.mark.parametrize("tree", [{}, (), None, {"a": None}, optax.MaskedNode(), [jnp.zeros((0,))]])
def test_a_tree_without_gradients_has_norm_zero(tree):
    assert global_norm(tree) == 0.0
    assert leaf_norms(tree).dtype == jnp.float32


def test_leaves_that_are_no_gradients_do_not_count():
    tree = {
        "w": jnp.asarray([3.0, 4.0]),
        "steps": jnp.asarray([1000], jnp.int32),
        "frozen": optax.MaskedNode(),
        "int_grad": np.zeros((2,), jax.dtypes.float0),
    }
    assert global_norm(tree) == 5.0
    assert leaf_norms(tree).shape == (1,)


def test_complex_leaves_count_by_magnitude():
    assert global_norm([jnp.asarray([3.0 + 4.0j], jnp.complex64)]) == 5.0


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_one_bad_element_shows(bad):
    assert not jnp.isfinite(global_norm({"a": jnp.ones(3), "b": jnp.asarray([1.0, bad])}))


def test_each_leaf_has_its_norm():
    tree = {"a": jnp.full((4,), 1.5), "b": jnp.asarray(2.0, jnp.bfloat16)}
    np.testing.assert_array_equal(leaf_norms(tree), [3.0, 2.0])
