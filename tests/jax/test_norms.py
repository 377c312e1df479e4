import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore.jax import global_norm, leaf_norms
from healcore.jax.norms import both_norms


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_norm_is_that_of_the_float64_values_whatever_the_dtype(dtype):
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


def test_norms_of_the_leaves_and_of_all_agree():
    tree = {"a": jnp.full((4,), 1.5), "b": jnp.asarray(2.0, jnp.bfloat16)}
    total, each = both_norms(tree)
    chex.assert_trees_all_equal((total, each), (global_norm(tree), leaf_norms(tree)))
    np.testing.assert_array_equal(each, [3.0, 2.0])
