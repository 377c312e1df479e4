"""A training step with a guard of its own, which keeps its old state at NaN."""

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore.jax import protect
from healcore.runtime.healer import Healer
from tests.healer.run_directory import events
from tests.open_run import run_of


def guarded(guard: str, tx: Any) -> Any:
    """A step that keeps its old state, healing state included, if the loss is NaN."""

    @jax.jit
    def step(state: Any, x: Any, factor: Any = 1.0) -> Any:
        params, memory = state
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        updates, new = tx.update(grads, memory, params, value=loss, learning_rate=0.01)
        new = optax.apply_updates(params, updates) * factor, new
        if guard == "apply_if_finite":
            return new
        return jax.tree.map(lambda n, o: jnp.where(jnp.isfinite(loss), n, o), new, state)

    return step


def loss_of(params: Any, x: Any) -> Any:
    return jnp.mean((params @ x - x.sum()) ** 2) + 0 * (params**2).sum()


INPUTS = [*np.random.default_rng(0).normal(size=(420, 2)).astype(np.float32)]


@pytest.mark.parametrize("guard", ["where", "apply_if_finite"])
def test_a_step_that_keeps_its_old_state_is_counted_and_said_once(guard, tmp_path, capsys):
    tx = protect(optax.sgd(0.01))
    if guard == "apply_if_finite":
        tx = optax.with_extra_args_support(optax.apply_if_finite(tx, 10**6))
    step = guarded(guard, tx)
    state = (jnp.zeros(2), tx.init(jnp.zeros(2)))
    with Healer("default", state=state, store=tmp_path) as healer:
        for number in healer.batches(range(40)):
            factor = np.float32(math.nan if 20 <= number < 25 else 1.0)
            healer.update(step(healer.state, INPUTS[number] * factor))
    assert "has not changed the healing state" in capsys.readouterr().err
    (problem,) = events(tmp_path, "problem")
    assert "guard of the training step" in problem["problem"]
    assert healer.report().counts["skips"] == 5
    assert run_of(healer).journal.unhealthy == [*range(20, 25)]


@pytest.mark.slow
def test_damaged_weights_behind_a_guard_are_found_by_the_loss_of_the_batches(tmp_path):
    tx = protect(optax.inject_hyperparams(optax.sgd)(0.01))
    step = guarded("where", tx)
    state = (jnp.zeros(2), tx.init(jnp.zeros(2)))
    loss_fn = jax.jit(lambda state, x: loss_of(state[0], x))
    with Healer(state=state, store=tmp_path, loss_fn=loss_fn) as healer:
        for number, x in enumerate(healer.batches(INPUTS)):
            healer.update(step(healer.state, x, jnp.float32(1e25 if number == 200 else 1.0)))
    (rollback,) = events(tmp_path, "rollback")
    assert (rollback["checkpoint"], rollback["onset"]) == (100, 201), "the comparisons know more"
    assert float(loss_fn(healer.state, INPUTS[0])) < 1e-3


def test_a_step_that_a_loss_scale_leaves_out_is_no_step_of_an_accumulation(tmp_path):
    """Its batch is not one of the next step, which a rollback would leave out as well."""
    tx = protect(optax.sgd(0.01))

    @jax.jit
    def step(state: Any, x: Any) -> Any:
        params, memory = state
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        overflow = ~jnp.isfinite(loss)
        updates, memory = tx.update(grads, memory, params, value=loss, externally_skipped=overflow)
        return optax.apply_updates(params, updates), memory

    state = (jnp.zeros(2), tx.init(jnp.zeros(2)))
    with Healer("default", state=state, store=tmp_path) as healer:
        for number in healer.batches(range(30)):
            factor = np.float32(math.inf if number in (9, 10, 20) else 1.0)
            healer.update(step(healer.state, INPUTS[number] * factor))
    assert healer.metrics()["heal/scaler_skips"] == 3
    assert healer.report().counts["skips"] == 0
    rows = [json.loads(line) for line in (tmp_path / "healcore.metrics.jsonl").open()]
    assert [row["step"] for row in rows if row.get("scaler_skip")] == [9, 10, 20]
    monitor = run_of(healer).journal
    assert [len(monitor.batches_of([index])) for index in (10, 11, 21)] == [1, 1, 1]
