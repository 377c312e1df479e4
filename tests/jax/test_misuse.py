"""Typical first mistakes: an error with the rule, or a warning where it may be intended."""

from __future__ import annotations

import warnings
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


@pytest.mark.parametrize("wrong", [optax.adam(1e-3), "default", True, (1.0,)])
@pytest.mark.parametrize("name", ["z_threshold", "ema_decay", "warmup_steps", "max_norm"])
def test_zclip_takes_numbers(name, wrong):
    with pytest.raises(PolicyError, match=f"clip.{name}"):
        heal_zclip(**{name: wrong})
    for right in (np.float32(0.5), jnp.float32(0.5)):
        heal_zclip(z_threshold=right)


BEHIND = {
    "adam": optax.chain(optax.adam(1e-3), heal_zclip()),
    "momentum": optax.chain(optax.sgd(0.1, momentum=0.9), heal("zclip")),
    "with hyperparameters": optax.chain(
        optax.inject_hyperparams(optax.sgd)(0.1), optax.inject_hyperparams(heal_zclip)()
    ),
    "within": optax.chain(optax.clip(1.0), optax.chain(optax.adam(1e-3), heal_zclip())),
}
BEFORE = {
    "adam": optax.chain(heal_zclip(), optax.adam(1e-3)),
    "behind what keeps nothing": optax.chain(optax.zero_nans(), optax.clip(1.0), heal_zclip()),
    "protect": protect(optax.chain(optax.clip(1.0), optax.adam(1e-3)), "zclip"),
    "alone": heal_zclip(),
}


@pytest.mark.parametrize("name", BEHIND)
def test_healing_behind_the_optimizer_is_warned_of(name):
    state = BEHIND[name].init(PARAMS)
    for look in (last_decision, metrics, jax.jit(last_decision)):
        with pytest.warns(UserWarning, match="heal_zclip"):
            look(state)
    with pytest.warns(UserWarning, match="healing first"):
        JaxDriver({"params": PARAMS, "opt_state": state}, "zclip")


@pytest.mark.parametrize("name", BEFORE)
def test_healing_before_the_optimizer_is_not(name):
    state = BEFORE[name].init(PARAMS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        last_decision(state)
        JaxDriver((PARAMS, state), "zclip")
        JaxDriver((PARAMS, optax.adam(1e-3).init(PARAMS), state), "zclip")


def test_sam_gets_only_the_keywords_that_it_names():
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05))
    tx = protect(sam, "zclip", clip={"kind": "none"})
    state, own = tx.init(PARAMS), sam.init(PARAMS)
    params: Any = PARAMS
    expected: Any = PARAMS
    for _ in range(4):
        updates, state = tx.update(params, state, params, value=jnp.float32(1.0))
        params = optax.apply_updates(params, updates)
        updates, own = sam.update(expected, own, expected)
        expected = optax.apply_updates(expected, updates)
    np.testing.assert_array_equal(params["w"], expected["w"])


def test_accumulation_around_protect_is_warned_of():
    def warnings_of(tx: Any) -> list[str]:
        return JaxDriver({"params": PARAMS, "opt": tx.init(PARAMS)}, "zclip").warnings

    around = optax.MultiSteps(protect(optax.sgd(0.1), "zclip"), 2)
    (warning,) = warnings_of(around)
    assert "Write protect(optax.MultiSteps(optimizer, k))" in warning
    skipping: Any = optax.skip_not_finite
    inner = protect(optax.sgd(0.1), "zclip")
    assert not warnings_of(optax.MultiSteps(inner, 2, should_skip_update_fn=skipping))
    inside: Any = optax.MultiSteps(optax.sgd(0.1), 2)
    assert not warnings_of(protect(inside, "zclip"))
