"""JAX programs that change the structure of their state between two calls of `update`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore import Checkpoints, Healer, RunStopped
from healcore.errors import StateMismatch
from healcore.jax import protect
from tests.healer.run_directory import events, new_process
from tests.healer.training_loops import rules

pytestmark = pytest.mark.slow  # in JAX, what test_changed_models.py shows in torch

EPOCHS, BATCHES, CHANGED_EPOCH = 3, 6, 1
CHANGE = CHANGED_EPOCH * BATCHES
POLICY = rules(cut=False)
TX = protect(optax.adam(1e-2), POLICY)


def wider(size: int, old: Any = None) -> Any:
    params = {"w": jnp.full((4, size), 0.1), "v": jnp.full((size, 1), 0.1)}
    if old is not None:
        known = old["w"].shape[1]
        params["w"] = params["w"].at[:, :known].set(old["w"])
        params["v"] = params["v"].at[:known].set(old["v"])
    return {"params": params, "opt_state": TX.init(params)}


@jax.jit
def step(state: Any, x: Any) -> Any:
    def loss_of(params: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - x.sum(1, keepdims=True)) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt_state = TX.update(grads, state["opt_state"], state["params"], value=loss)
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}


def batch(number: int, bad: int) -> Any:
    x = np.random.default_rng(number).normal(size=(8, 4)).astype(np.float32)
    return jnp.asarray(x * np.nan if number == bad else x)


def run(store: Any, *, size: int = 3, bad: int = -1, until: int = -1) -> tuple[Healer, Any]:
    saves = Checkpoints(every=4)
    with Healer(POLICY, state=wider(size), store=store, checkpoints=saves) as healer:
        for epoch in healer.epochs(EPOCHS):
            for index in healer.batches(range(BATCHES), epoch=epoch):
                if healer.step == until:
                    raise KeyboardInterrupt
                state = healer.state
                if epoch == CHANGED_EPOCH and state["params"]["w"].shape[1] == 3:
                    state = wider(5, state["params"])
                healer.update(step(state, batch(epoch * BATCHES + index, bad)))
        return healer, healer.state


def weights(state: Any) -> list[Any]:
    return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(state["params"])]


def plain() -> Any:
    state = wider(3)
    for number in range(EPOCHS * BATCHES):
        if number == CHANGE:
            state = wider(5, state["params"])
        state = step(state, batch(number, -1))
    return state


def test_a_wider_state_is_taken_and_saved_at_once(tmp_path):
    healer, state = run(tmp_path)
    assert (healer.step, healer.rollbacks) == (EPOCHS * BATCHES, 0)
    assert weights(state) == weights(plain())
    assert CHANGE + 1 in {each["step"] for each in events(tmp_path, "save")}


@pytest.mark.parametrize("late", [0, 1, 4, 7])
def test_a_bad_batch_after_the_change_ends_no_run(late, tmp_path):
    healer, state = run(tmp_path, bad=CHANGE + late)
    assert healer.state["params"]["w"].shape == (4, 5)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state["params"]))
    assert all(each["checkpoint"] > CHANGE for each in events(tmp_path, "rollback"))


def test_damage_that_comes_back_never_ends_at_a_checkpoint_that_does_not_fit(tmp_path):
    """The oldest one that fits is restored again, until the budget of rollbacks ends the run."""

    def spoilt_run() -> None:
        saves = Checkpoints(every=4)
        with Healer(POLICY, state=wider(3), store=tmp_path, checkpoints=saves) as healer:
            for number in healer.steps(EPOCHS * BATCHES):
                state = healer.state
                if state["params"]["w"].shape[1] == 3 and number == CHANGE:
                    state = wider(5, state["params"])
                if number == CHANGE + 9:  # also if the number comes again
                    state = {**state, "params": jax.tree.map(lambda x: x * np.nan, state["params"])}
                healer.update(step(state, batch(number, -1)))

    with pytest.raises(RunStopped, match="budget of recoveries"):
        spoilt_run()
    assert [each["checkpoint"] for each in events(tmp_path, "rollback")] == [12, 7, 7]


def test_a_restart_needs_the_state_in_its_later_form(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, until=CHANGE + 3)
    new_process()
    with pytest.raises(StateMismatch, match="changed the structure of its model"):
        run(tmp_path)
    _, state = run(tmp_path, size=5)
    assert weights(state) == weights(plain())


def test_a_part_of_the_state_may_grow_at_each_step(tmp_path):
    """From the first step on: the number of steps of one update is not known yet."""
    start = {**wider(3), "history": []}
    with Healer(POLICY, state=start, store=tmp_path) as healer:
        for number in healer.batches(range(BATCHES)):
            state = healer.state
            trained = step(
                {"params": state["params"], "opt_state": state["opt_state"]}, batch(number, -1)
            )
            healer.update({**trained, "history": [*state["history"], float(number)]})
    assert healer.state["history"] == [float(number) for number in range(BATCHES)]
    assert healer.step == BATCHES
