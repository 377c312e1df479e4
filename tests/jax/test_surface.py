"""The public names, what an import loads, and typical first mistakes."""

import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from healcore.jax import heal, heal_zclip, last_decision, metrics, protect
from healcore.jax.driver.driver import JaxDriver
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


@pytest.mark.parametrize(
    ("tx", "warned"),
    [
        pytest.param(optax.chain(ADAM, heal_zclip()), True, id="behind Adam"),
        pytest.param(
            optax.chain(SGD, optax.inject_hyperparams(heal_zclip)()),
            True,
            id="behind SGD, injected",
        ),
        pytest.param(
            optax.chain(optax.clip(1.0), optax.chain(ADAM, heal("zclip"))),
            True,
            id="behind a chain",
        ),
        pytest.param(optax.chain(heal_zclip(), ADAM), False, id="before Adam"),
        pytest.param(
            optax.chain(optax.zero_nans(), optax.clip(1.0), heal_zclip()),
            False,
            id="behind transformations without a state",
        ),
        pytest.param(
            protect(optax.chain(optax.clip(1.0), ADAM), "zclip"), False, id="around the optimizer"
        ),
    ],
)
def test_only_healing_behind_the_optimizer_is_warned_of(tx, warned):
    def driven(state: Any) -> None:
        JaxDriver((PARAMS, ADAM.init(PARAMS), state), "zclip")

    state = tx.init(PARAMS)
    for look in (last_decision, metrics, jax.jit(last_decision), driven):
        with warnings.catch_warnings(record=True, action="always") as found:
            look(state)
        assert any("healing first" in str(each.message) for each in found) is warned


def test_parameters_in_tuples_are_no_optimizer_before_the_healing():
    tx = protect(optax.sgd(0.1), "zclip")
    for params in ((jnp.ones(4), jnp.ones(2)), optax.LookaheadParams.init_synced(PARAMS)):
        with warnings.catch_warnings(action="error"):
            JaxDriver((params, tx.init(params)), "zclip")
