"""`protect` warns of an optimizer that clips or heals already, and of no other optimizer."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from healcore import Healer
from healcore.jax import heal, protect

PARAMS = {"w": jnp.ones(3)}
ADAM = optax.adam(1e-3)
CLIP = optax.clip_by_global_norm(1.0)
LIMIT = {"max_norm": 1.0}


@pytest.mark.parametrize(
    "inner",
    [
        pytest.param(CLIP, id="clip"),
        pytest.param(optax.chain(CLIP, ADAM), id="chain"),
        pytest.param(optax.chain(optax.identity(), optax.chain(CLIP, ADAM)), id="nested chain"),
        pytest.param(optax.named_chain(("clip", CLIP), ("adam", ADAM)), id="named chain"),
        pytest.param(optax.MultiSteps(optax.chain(CLIP, ADAM), 4), id="MultiSteps"),
    ],
)
def test_a_clip_inside_of_a_clip_is_named(inner: Any):
    with pytest.warns(UserWarning, match="remove optax.clip_by_global_norm") as found:
        protect(inner, clip=LIMIT)
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        protect(inner)  # without clip=, the clip of the program is the only one


@pytest.mark.parametrize(
    "inner", [ADAM, optax.MultiSteps(ADAM, 4), optax.chain(optax.clip(1.0), ADAM)]
)
def test_an_optimizer_without_a_clip_by_norm_gets_no_warning(inner: Any):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        protect(inner, clip=LIMIT).init(PARAMS)


@pytest.mark.parametrize("inner", [protect(ADAM), optax.chain(heal(), ADAM)])
def test_a_second_engine_is_named(inner: Any):
    tx = protect(inner)
    with pytest.warns(UserWarning, match="remove one of them") as found:
        tx.init(PARAMS)
    assert found[0].filename == __file__


def test_a_second_engine_gets_the_loss_and_no_warning_about_it():
    tx = protect(protect(ADAM))
    with pytest.warns(UserWarning, match="remove one of them"):
        state = PARAMS, tx.init(PARAMS)

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        updates, opt_state = tx.update(batch, opt_state, params, value=batch["w"].sum())
        return optax.apply_updates(params, updates), opt_state

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Healer("default", state=state) as healer:
            for batch in healer.batches([PARAMS] * 3):
                healer.update(step(healer.state, batch))
