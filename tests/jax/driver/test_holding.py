"""Damage that comes back in a jitted step: what is held while the steps repeat."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore import Healer, Logging
from healcore.jax import protect
from healcore.runtime.run.rollback import holding

STEPS = 360
BAD_STEPS = range(220, 232)
TX = protect(optax.inject_hyperparams(optax.sgd)(learning_rate=0.05, momentum=0.9))


def loss_of(params: Any, batch: Any) -> Any:
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)


@jax.jit
def train(params: Any, opt: Any, batch: Any, sign: Any) -> Any:
    value, grads = jax.value_and_grad(loss_of)(params, batch)
    grads = jax.tree.map(lambda g: sign * g, grads)
    updates, opt = TX.update(grads, opt, params, value=value)
    return optax.apply_updates(params, updates), opt


def batches(number: int) -> list[Any]:
    make = np.random.default_rng(1)
    target = make.standard_normal(8).astype(np.float32)
    found = []
    for _ in range(number):
        x = make.standard_normal((32, 8)).astype(np.float32)
        noise = make.standard_normal((32, 1)).astype(np.float32)
        found.append((x, np.tanh(x @ target)[:, None] + 0.1 * noise))
    return found


def initial() -> dict[str, jax.Array]:
    a, b = jax.random.split(jax.random.key(0))
    return {"a": jax.random.normal(a, (8, 32)) / 3, "b": jax.random.normal(b, (32, 1)) / 6}


def run(*, bad_steps: Any = BAD_STEPS, folder: Any = None) -> tuple[float, list[Any]]:
    """Loss on unseen batches at the end, and the rollbacks of a run with healcore, if any."""
    data = batches(STEPS + 10)

    def sign(step: int) -> Any:
        return jnp.float32(-1 if step in bad_steps else 1)

    params = initial()
    state = (params, TX.init(params))
    rollbacks = []
    if folder is None:
        for step, batch in enumerate(data[:STEPS]):
            state = train(*state, batch, sign(step))
    else:
        log = Logging(events=folder / "events.jsonl", console=False)
        healer: Healer
        with Healer(
            state=state, loss_fn=lambda state, batch: loss_of(state[0], batch), logging=log
        ) as healer:
            for batch in healer.batches(data[:STEPS]):
                healer.update(train(*healer.state, batch, sign(healer.step)), batch=batch)
        state = healer.state
        lines = (folder / "events.jsonl").read_text().splitlines()
        rollbacks = [each for each in map(json.loads, lines) if each["kind"] == "rollback"]
    return float(sum(loss_of(state[0], batch) for batch in data[STEPS:])), rollbacks


@pytest.mark.slow
def test_updates_with_flipped_signs_are_frozen(tmp_path):
    """Nothing shows at these steps: neither their norms nor their batches are unusual."""
    clean, _ = run(bad_steps=())
    damaged, _ = run()
    assert not damaged < 2 * clean
    healed, rollbacks = run(folder=tmp_path)
    assert healed < 1.1 * clean
    first, last = (int(word) for word in rollbacks[-1]["held"][-1].split() if word.isdigit())
    assert first < BAD_STEPS[0] < BAD_STEPS[-1] < last


@pytest.mark.slow
def test_a_number_that_the_program_keeps_is_used_in_the_end(tmp_path, monkeypatch):
    """As in torch, the run ends with the bits of a run without healcore."""
    monkeypatch.setattr(holding, "LASTING_STEPS", 20)
    tx = protect(optax.inject_hyperparams(optax.adamw)(learning_rate=0.01, weight_decay=0.01))
    log = Logging(events=tmp_path / "events.jsonl", console=False)

    @jax.jit
    def step(params: Any, opt: Any, batch: Any, late: Any) -> Any:
        opt = optax.tree.set(opt, weight_decay=jnp.where(late, 40.0, 0.01))
        value, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt = tx.update(grads, opt, params, value=value)
        return optax.apply_updates(params, updates), opt

    params = initial()
    plain = (params, tx.init(params))
    for number, batch in enumerate(batches(STEPS)):
        plain = step(*plain, batch, number >= 110)
    healer: Healer
    with Healer(
        state=(params, tx.init(params)),
        loss_fn=lambda state, batch: loss_of(state[0], batch),
        logging=log,
    ) as healer:
        for batch in healer.batches(batches(STEPS)):
            healer.update(step(*healer.state, batch, healer.step >= 110), batch=batch)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    rollbacks = [each for each in map(json.loads, lines) if each["kind"] == "rollback"]
    assert any(each.get("held") for each in rollbacks)
    assert rollbacks[-1]["by"] == "intended_numbers"
    for a, b in zip(jax.tree.leaves(plain[0]), jax.tree.leaves(healer.state[0]), strict=True):
        assert np.array_equal(a, b)
