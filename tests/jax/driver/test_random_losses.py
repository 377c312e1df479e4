"""The random keys of a state are the same for both weights of a comparison."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from healcore import Healer
from healcore.jax import protect
from healcore.jax.driver.driver import JaxDriver
from healcore.runtime.dominance import evidence
from tests.jax.driver.test_damage_or_data import data, initial, loss_of

TX = protect(optax.adam(1e-2), "default")


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize("uses_key", [False, True])
def test_both_sides_have_the_same_key(monkeypatch, make_key, uses_key):
    """The loss of the step had another key, so it stands for neither side."""
    monkeypatch.setattr(evidence, "time", SimpleNamespace(monotonic=lambda: 5.0))
    seen: list[Any] = []

    @jax.jit
    def noisy(params: Any, key: Any, batch: Any) -> Any:
        return loss_of(params, batch) * (0.5 + uses_key * jax.random.uniform(key))

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        params, opt, key = state
        loss, grads = jax.value_and_grad(noisy)(params, key, batch)
        updates, opt = TX.update(grads, opt, params, value=loss)
        return optax.apply_updates(params, updates), opt, jax.random.split(key)[0]

    def loss_fn(state: Any, batch: Any) -> Any:
        if batch[1].tobytes() != data(0)[1].tobytes():  # the Healer tries the first batch alone
            seen.append((batch[1].tobytes(), np.asarray(jax.random.key_data(state[2])).tobytes()))
        return noisy(state[0], state[2], batch)

    params = initial()
    state = (params, TX.init(params), make_key(0))
    with Healer("default", state=state, loss_fn=loss_fn) as healer:
        for batch in healer.batches([data(number) for number in range(310)]):
            healer.update(step(healer.state, batch))
    comparison: Any = healer._loop.recovery.dominance
    assert healer.rollbacks == 0
    assert comparison.loss_function.draws is uses_key
    assert comparison.loss_function.gives_loss is not uses_key
    assert len(seen) >= 3
    assert (seen[::2] == seen[1::2]) is uses_key


def test_other_keys_of_objects_that_are_updated_in_place():
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    layer = nnx.Linear(3, 1, rngs=nnx.Rngs(1))
    optimizer = nnx.Optimizer(layer, TX, wrt=nnx.Param)
    driver = JaxDriver({"dropout": model, "layer": layer, "optimizer": optimizer}, "default")

    def loss_fn(batch: Any) -> Any:
        return layer(model(batch)).sum()

    batch = jnp.ones((50, 3))
    first, same, other = (driver.losses_of(loss_fn, [batch], redraw=i == 2) for i in range(3))
    assert first == same == driver.losses_of(loss_fn, [batch]) != other
