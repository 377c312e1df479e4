"""Before the Healer goes back: is the model worse, or are the data different? In JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from healcore import Healer
from healcore.jax import protect
from healcore.runtime.events.reading import read


def data(number: int, relabelled: bool) -> tuple[Any, Any]:
    x = np.random.default_rng(number).standard_normal((64, 6)).astype(np.float32)
    y = (x[:, 0] > 0) * 2 + (x[:, 1] > 0)
    return x, (y + 1) % 4 if relabelled else y


def run(folder: Any, *, change: int = 10**9, damage: int = -1) -> tuple[Healer, list[Any]]:
    keys = jax.random.split(jax.random.key(0))
    params = {
        "a": jax.random.normal(keys[0], (6, 32)) / 2.5,
        "b": jax.random.normal(keys[1], (32, 4)) / 6,
    }

    def loss_of(params: Any, batch: Any) -> Any:
        x, y = batch
        logits = jnp.tanh(x @ params["a"]) @ params["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    tx = protect(optax.adam(1e-2), "default")

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        params, opt = state
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt = tx.update(grads, opt, params, value=loss)
        return optax.apply_updates(params, updates), opt

    batches = [data(number, number >= change) for number in range(350)]
    done = False
    with Healer(
        "default",
        state=(params, tx.init(params)),
        events=folder / "e.jsonl",
        loss_fn=lambda state, batch: loss_of(state[0], batch),
    ) as healer:
        for batch in healer.batches(batches):
            state = healer.state
            if healer.step == damage and not done:
                done = True
                state = ({**state[0], "b": -4.0 * state[0]["b"]}, state[1])
            healer.update(step(state, batch))
    return healer, read(folder / "e.jsonl").events


def test_other_data_are_left_alone(tmp_path):
    healer, events = run(tmp_path, change=250)
    assert {e["verdict"] for e in events if e["kind"] == "assessment"} == {"data"}
    assert healer.rollbacks == 0
    assert not [e for e in events if e["kind"] == "lr"]


def test_a_damaged_model_goes_back(tmp_path):
    healer, events = run(tmp_path, damage=250)
    found = [e for e in events if e["kind"] == "assessment" and e["verdict"] == "damage"]
    assert [e["by"] for e in found] == ["remembered_batches"]
    assert healer.rollbacks == 1
