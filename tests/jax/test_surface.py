"""The public names, what an import loads, and typical first mistakes."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from healcore.jax import heal, heal_zclip, protect
from healcore.policy import PolicyError

PARAMS = {"w": jnp.ones(4)}


@pytest.mark.parametrize(
    ("inner", "got"),
    [
        (optax.adam, "adam"),
        (optax.MultiSteps, "MultiSteps"),
        (1e-3, "a float"),
        ("default", "a str"),
        (nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param), "a Opt"),
    ],
)
def test_protect_takes_a_transformation(inner, got):
    with pytest.raises(TypeError, match=f"got {got}"):
        protect(inner)
    for wrap in (heal, partial(protect, optax.sgd(0.1))):
        with pytest.raises(ValueError, match="records is a number of steps >= 1"):
            wrap(records=0)


@pytest.mark.parametrize("name", ["z_threshold", "ema_decay", "warmup_steps", "max_norm"])
def test_zclip_takes_numbers(name):
    wrongs: list[Any] = [optax.adam(1e-3), "default", True, (1.0,)]
    for wrong in wrongs:
        with pytest.raises(PolicyError, match=f"clip.{name}"):
            heal_zclip(**{name: wrong})
    for right in (np.float32(0.5), jnp.float32(0.5)):
        heal_zclip(z_threshold=right)


SGD = optax.inject_hyperparams(optax.sgd)(0.1)
ADAM = optax.adam(1e-3)
