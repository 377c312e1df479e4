"""The end of an epoch in `Healer.epochs` is not the end of the run: a suspicion can wait."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from healcore import Checkpoints, Healer
from healcore.jax import protect
from tests.healer.run_directory import events
from tests.healer.training_loops import BOTH_FRAMEWORKS

EPOCHS, BATCHES, EVERY = 3, 100, 67
LAST = 2 * BATCHES
"""Steps at the end of the second epoch. The newest checkpoint before it is of step 134."""


def data() -> list[Any]:
    random = np.random.default_rng(1)
    inputs = [random.normal(size=(16, 4)).astype(np.float32) for _ in range(BATCHES)]
    return [(each, np.sin(each.sum(axis=1, keepdims=True))) for each in inputs]


Damage = Callable[[Healer], bool]
Loop = Callable[[Healer, list[Any]], Iterator[Any]]


def torch_run(loop: Loop, damaged: Damage, **options: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    state = {"model": model, "optimizer": optimizer}

    def loss_fn(batch: Any) -> Any:
        inputs, targets = map(torch.from_numpy, batch)
        return (model(inputs) - targets).square().mean()

    with Healer("default", state=state, loss_fn=loss_fn, **options) as healer:
        for batch in loop(healer, data()):
            healer.loss(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if damaged(healer):
                model.bias.data.fill_(np.nan)


def jax_run(loop: Loop, damaged: Damage, **options: Any) -> None:
    tx = protect(optax.adam(0.02), policy="default")
    params = {"w": jnp.full((4, 1), 0.1), "b": jnp.zeros(1)}
    first = {"params": params, "opt_state": tx.init(params)}

    def loss_of(params: Any, batch: Any) -> Any:
        return jnp.mean((batch[0] @ params["w"] + params["b"] - batch[1]) ** 2)

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"], value=loss)
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    evaluate = jax.jit(lambda state, batch: loss_of(state["params"], batch))
    with Healer("default", state=first, loss_fn=evaluate, **options) as healer:
        for batch in loop(healer, data()):
            state = step(healer.state, batch)
            if damaged(healer):
                state["params"] = {**state["params"], "b": jnp.full(1, jnp.nan)}
            healer.update(state, batch=batch)


def counted(healer: Healer, batches: list[Any]) -> Iterator[Any]:
    """A loop whose number of epochs healcore knows."""
    for epoch in healer.epochs(EPOCHS):
        yield from healer.batches(batches, epoch=epoch)


def uncounted(healer: Healer, batches: list[Any]) -> Iterator[Any]:
    """A loop whose number of epochs only the program knows."""
    for _ in range(EPOCHS):
        yield from healer.batches(batches)


def rollback_of(framework: str, loop: Loop, before: int, store: Any) -> dict[str, Any]:
    """The rollback of a run in which a weight becomes NaN `before` steps before an epoch's end."""
    done = []

    def damaged(healer: Healer) -> bool:
        if done or healer.step != LAST - before:
            return False
        done.append(healer.step)
        return True

    run = torch_run if framework == "torch" else jax_run
    run(loop, damaged, store=store, checkpoints=Checkpoints(every=EVERY))
    (rollback,) = events(store, "rollback")
    return rollback


@BOTH_FRAMEWORKS
@pytest.mark.parametrize("before", [1, 3])
def test_a_known_epoch_end_restores_the_newest_finite_checkpoint(framework, before, tmp_path):
    assert rollback_of(framework, counted, before, tmp_path)["checkpoint"] == 2 * EVERY


def test_an_epoch_end_that_may_be_the_end_of_the_run_does_not_wait(tmp_path):
    assert rollback_of("torch", uncounted, 3, tmp_path)["step"] == LAST
