"""After a rollback a rate that the program passes to `update` is limited to its earlier value."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import healcore
from healcore.jax import protect
from tests.healer.run_directory import events

STEPS = 500
FAULT = range(250, 300)
SCHEDULE = optax.cosine_decay_schedule(0.02, STEPS)


def scheduled_rate(count: Any) -> Any:
    """The program's schedule: for some steps it is 100 times too high by mistake."""
    is_wrong = (count >= FAULT.start) & (count < FAULT.stop)
    return SCHEDULE(count) * jnp.where(is_wrong, 100.0, 1.0)


def loss_of(params: Any, batch: Any) -> jax.Array:
    inputs, targets = batch
    hidden = jnp.tanh(inputs @ params["w1"])
    return jnp.mean((hidden @ params["w2"] - targets) ** 2)


def batches() -> list[Any]:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((4, 1))
    found = []
    for _ in range(STEPS):
        inputs = rng.standard_normal((32, 4)).astype(np.float32)
        targets = np.sin(inputs @ weights).astype(np.float32)
        found.append((inputs, targets))
    return found


@pytest.mark.slow
def test_the_limit_is_the_rate_of_the_restored_step_and_not_of_the_last_step(tmp_path: Path):
    keys = jax.random.split(jax.random.key(0))
    params = {
        "w1": jax.random.normal(keys[0], (4, 16)) / 2,
        "w2": jax.random.normal(keys[1], (16, 1)) / 4,
    }
    tx = protect(optax.adam(scheduled_rate))

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        params, opt_state, count = state
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = tx.update(
            grads, opt_state, params, value=loss, learning_rate=scheduled_rate(count)
        )
        return optax.apply_updates(params, updates), opt_state, count + 1

    compare = jax.jit(lambda state, batch: loss_of(state[0], batch))
    state = params, tx.init(params), jnp.int32(0)
    with healcore.Healer("default", state=state, store=tmp_path, loss_fn=compare) as healer:
        for batch in healer.batches(batches()):
            healer.update(step(healer.state, batch))
        multiplier = healer.report().lr_scale

    (rollback,) = events(tmp_path, "rollback")
    restored = rollback["checkpoint"]
    assert restored <= FAULT.start
    assert rollback["lr_limit"] == pytest.approx(float(SCHEDULE(restored - 1)))
    assert multiplier == pytest.approx(1), "the schedule only falls after the restored step"
