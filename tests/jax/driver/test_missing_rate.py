"""A program whose learning rate does not reach healcore gets one line, and no other one does."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from healcore import Healer
from healcore.jax import protect

LINE = "no learning rate"
RATE = 0.1


def train(
    tmp_path: Any,
    tx: optax.GradientTransformationExtraArgs,
    keywords: Callable[[jax.Array], dict[str, Any]],
    policy: str = "default",
    *,
    store: bool = True,
    loss_fn: bool = True,
) -> None:
    params = {"w": jnp.zeros((3, 1))}

    def loss_of(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((batch @ params["w"] - 1) ** 2)

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        params, opt_state, count = state
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        more = keywords(count)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss, **more)
        return optax.apply_updates(params, updates), opt_state, count + 1

    compare = jax.jit(lambda state, batch: loss_of(state[0], batch))
    with Healer(
        policy,
        state=(params, tx.init(params), jnp.int32(0)),
        store=tmp_path if store else None,
        loss_fn=compare if loss_fn else None,
    ) as healer:
        for batch in healer.batches(list(jax.random.normal(jax.random.key(0), (12, 4, 3)))):
            healer.update(step(healer.state, batch))


def nothing(count: jax.Array) -> dict[str, Any]:
    return {}


def constant(count: jax.Array) -> dict[str, Any]:
    return {"learning_rate": RATE}


@pytest.mark.parametrize(
    ("keywords", "store", "loss_fn"),
    [
        pytest.param(nothing, False, True, id="none, with a loss_fn"),
        pytest.param(lambda count: {"learning_rat": RATE}, True, True, id="misspelled"),
    ],
)
def test_a_rate_that_is_missing_or_misspelled_is_named_once(
    keywords, store, loss_fn, tmp_path, caplog
):
    train(tmp_path, protect(optax.sgd(RATE)), keywords, store=store, loss_fn=loss_fn)
    assert caplog.text.count(LINE) == 1
    assert "multiply it by 0.25. Write tx.update(..., learning_rate=rate)" in caplog.text


SCHEDULE = optax.linear_schedule(0.0, RATE, 10)


@pytest.mark.parametrize(
    ("inner", "keywords"),
    [
        pytest.param(optax.sgd(RATE), constant, id="passed"),
        pytest.param(
            optax.sgd(SCHEDULE),
            lambda count: {"learning_rate": SCHEDULE(count)},
            id="schedule from 0",
        ),
        pytest.param(optax.inject_hyperparams(optax.sgd)(RATE), nothing, id="injected"),
        pytest.param(optax.inject_hyperparams(optax.sgd)(SCHEDULE), nothing, id="both"),
        pytest.param(optax.MultiSteps(optax.sgd(RATE), 4), constant, id="accumulation"),
    ],
)
def test_a_program_whose_rate_is_known_gets_no_line(inner, keywords, tmp_path, caplog):
    train(tmp_path, protect(inner), keywords)
    assert LINE not in caplog.text


@pytest.mark.parametrize(
    ("policy", "how"),
    [
        ("default", {"store": False, "loss_fn": False}),
        ("default", {"store": True, "loss_fn": False}),
        ("observe", {}),
        ("pretraining", {}),
        ("zclip", {}),
    ],
)
def test_a_run_that_limits_no_rate_needs_none(policy, how, tmp_path, caplog):
    train(tmp_path, protect(optax.sgd(RATE), policy), nothing, policy, **how)
    assert LINE not in caplog.text
