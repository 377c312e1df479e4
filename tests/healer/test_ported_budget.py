"""The rollbacks of a run that was ported from another framework count in the budget."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
import torch

import healcore
import healcore.jax
import healcore.torch


def ported_state(rollbacks_left):
    """The engine's state of a run in torch."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], 0.01)
    healing = healcore.torch.attach(optimizer)
    for _ in range(3):
        healing.observe(1.0)
        weight.grad = torch.full((4,), 0.1)
        optimizer.step()
    state = healing.state_dict()
    state["state"]["budget"]["recoveries"] = rollbacks_left
    return state


class Broken(Exception):
    """Ends a run, which is then resumed."""


def rollbacks_in_torch(
    engine_state, store, *, ends: type[BaseException] = healcore.RunStopped, damaged_at=15
):
    """Trains a model that is damaged after each rollback. Returns the rollbacks until the end."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    healcore.torch.attach(optimizer).load_state_dict(engine_state)
    healer = healcore.Healer(state={"model": model, "optimizer": optimizer}, store=store)

    def train():
        with healer:
            for step in healer.steps(200):
                loss = model(torch.ones(4, 2)).square().mean()
                healer.observe(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == damaged_at:
                    model.weight.data.fill_(math.nan)
                elif step == 10 and ends is Broken:
                    healer.save()
                    raise Broken

    with pytest.raises(ends):
        train()
    return healer.rollbacks


def rollbacks_in_jax(engine_state, store):
    tx = healcore.jax.protect(optax.sgd(0.01))
    params = jnp.ones(2)
    opt_state = healcore.jax.from_dict(tx.init(params), engine_state, "default")

    @jax.jit
    def train_step(params, opt_state):
        loss, grads = jax.value_and_grad(lambda p: jnp.square(p - 2).mean())(params)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    healer = healcore.Healer(state=(params, opt_state), store=store)

    def train():
        with healer:
            for step in healer.steps(200):
                params, opt_state = train_step(*healer.state)
                healer.update((params * (math.nan if step == 15 else 1), opt_state))

    with pytest.raises(healcore.RunStopped):
        train()
    return healer.rollbacks


FRAMEWORKS = [
    pytest.param(rollbacks_in_torch, id="torch"),
    pytest.param(rollbacks_in_jax, id="jax", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("rollbacks", FRAMEWORKS)
@pytest.mark.parametrize("left", [0, 1, 3])
def test_what_is_left_is_what_follows(rollbacks, left, tmp_path):
    """A run that moves to another framework would get its whole budget of rollbacks again."""
    assert rollbacks(ported_state(left), tmp_path) == left


def test_a_restart_does_not_give_them_back(tmp_path):
    """The spent rollbacks are in the checkpoint's record."""
    assert rollbacks_in_torch(ported_state(1), tmp_path, ends=Broken) == 0
    assert rollbacks_in_torch(ported_state(3), tmp_path) == 1
