"""healcore under ``jax_numpy_dtype_promotion="strict"``, which refuses to mix dtypes."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import healcore
from healcore.jax import (
    commit,
    expect_change,
    from_dict,
    heal,
    heal_zclip,
    metrics,
    on_rollback,
    protect,
    scale_by_heal_lr,
    to_dict,
)
from tests.jax import policies

PARAMS = {"w": jnp.ones(3)}
MIXED = {**PARAMS, "b": jnp.ones(2, jnp.bfloat16)}
INNER = optax.lion(1e-3)
SIGNALS = [
    {},
    {"value": 1.0, "learning_rate": 0.1, "eval_loss": 1.0, "grad_norm": 1.0},
    {"value": jnp.bfloat16(1), "externally_skipped": jnp.bool_(False)},
]


@pytest.fixture(autouse=True)
def strict():
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "standard")


INJECTED = optax.inject_hyperparams(optax.sgd)(lambda count: 0.1)  # itself refuses `MIXED`


@pytest.mark.parametrize(
    ("tx", "params"),
    [
        (optax.chain(heal_zclip(), INNER), MIXED),
        (optax.chain(optax.inject_hyperparams(heal_zclip)(max_norm=0.5), INNER), PARAMS),
        (optax.chain(heal(policies.ADAGC), INNER, scale_by_heal_lr()), MIXED),
        (protect(INNER, policies.OBSERVE), MIXED),
        (protect(INNER, policies.UPDATES), MIXED),
        (protect(INNER, policies.EVERYTHING), MIXED),
        (protect(INJECTED, policies.CUT_LR), PARAMS),
    ],
    ids=["heal_zclip", "injected", "heal", "observe", "update_norm", "everything", "schedule"],
)
@pytest.mark.filterwarnings("ignore:no loss reaches")
def test_updates(tx, params):
    state = tx.init(params)
    for signals in SIGNALS:
        update = functools.partial(tx.update, **signals)
        jax.eval_shape(update, params, state, params)  # compiles nothing
    tx.update(params, state, params)


def test_functions_of_a_state():
    tx = protect(INNER)
    state = expect_change(tx.init(PARAMS))
    state = on_rollback(state, from_dict(state, to_dict(state, "default"), "default"), "default")
    assert commit(jnp.bool_(True), MIXED, MIXED)["b"].dtype == jnp.bfloat16
    assert metrics(state)["heal/steps"] == 0


def test_a_healer(tmp_path):
    tx = protect(optax.inject_hyperparams(optax.sgd)(1e-3), "pretraining")
    params = {"w": jnp.ones(3)}

    @jax.jit
    def step(state, batch):
        params, memory = state
        loss, grads = jax.value_and_grad(lambda p: jnp.sum(p["w"] ** 2) * batch)(params)
        updates, memory = tx.update(grads, memory, params, value=loss)
        return optax.apply_updates(params, updates), memory

    with healcore.Healer("pretraining", state=(params, tx.init(params)), store=tmp_path) as healer:
        for batch in healer.batches([jnp.float32(x) for x in (1, 1, jnp.nan, 1)]):
            healer.update(step(healer.state, batch))
    assert jnp.isfinite(healer.state[0]["w"]).all()
