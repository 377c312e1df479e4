"""Norms by name, for a logger: of the right tensors, inside and outside of jit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from healcore.jax import HealStateError, flax_nnx, gradient_norms, heal_zclip, protect
from tests.jax import policies

PARAMS = {"dense": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}, "steps": jnp.int32(3)}
GRADS = {
    "dense": {"kernel": jnp.full((2, 2), 3.0), "bias": jnp.asarray([jnp.nan, 1.0])},
    "steps": np.zeros((), jax.dtypes.float0),
}


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("tx", [protect(optax.identity(), policies.ZCLIP), heal_zclip()])
def test_each_gradient_has_its_norm_before_clipping(tx, jit):
    state = tx.init(PARAMS)
    assert set(map(float, gradient_norms(state, PARAMS).values())) == {0.0}
    _, state = tx.update(GRADS, state, PARAMS)
    found = jit(gradient_norms)(state, PARAMS)
    assert list(found) == ["dense/bias", "dense/kernel"]
    assert float(found["dense/kernel"]) == 6.0
    assert np.isnan(found["dense/bias"])


def test_another_tree_is_an_error():
    state = heal_zclip().init(PARAMS)
    with pytest.raises(HealStateError, match="2 gradients, and params has 1 floating"):
        gradient_norms(state, {"w": jnp.ones(2)})


def test_an_nnx_model_names_its_parameters():
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    optimizer = nnx.Optimizer(model, protect(optax.sgd(0.1), policies.ZCLIP), wrt=nnx.Param)
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    flax_nnx.update(optimizer, model, grads, value=jnp.float32(1.0))
    found = flax_nnx.gradient_norms(optimizer, model)
    assert {name: round(float(norm) ** 2) for name, norm in found.items()} == {
        "layers/0/bias": 3, "layers/0/kernel": 6, "layers/1/bias": 3, "layers/1/scale": 3,
    }  # fmt: skip
