"""healcore under ``jax_numpy_dtype_promotion="strict"``, which refuses to mix dtypes."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from healcore.jax import heal, heal_zclip, protect, scale_by_heal_lr
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
