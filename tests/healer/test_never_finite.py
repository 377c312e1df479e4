"""A run that trains nothing ends with one true sentence, in every entry point that can end it."""

from __future__ import annotations

import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import healcore
from healcore.jax import protect
from healcore.runtime.healer import Healer
from healcore.runtime.incidents.steps import FROM_START
from healcore.runtime.loop.termination import RunStopped
from healcore.torch import LightningHealingCallback, attach, heal_trainer
from tests.healer.run_directory import events
from tests.torch.trainers.huggingface import small_runs
from tests.torch.trainers.lightning.fits import Regression, trainer

SENTENCES = {
    "loss": "the loss is NaN or Inf since the start; the first tensor is the gradient of 0.weight",
    "gradient": "the gradient is NaN or Inf since the start; the first tensor is the gradient of ",
    "weights": "Inf since the start, because they were loaded so; the first tensor is 1.bias",
}


class Loop:
    """A linear regression whose loss, gradient or weights are NaN from a step on."""

    def __init__(self, kind: str, begin: int = 0) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.kind, self.begin, self.done = kind, begin, 0
        if kind == "weights":
            nn.init.constant_([*self.model.parameters()][-1], math.nan)

    def loss(self, batch: int) -> torch.Tensor:
        x = torch.ones(4, 2) * (1 + batch % 3)
        if self.kind == "gradient" and batch >= self.begin:  # the root of 0 has a gradient of Inf
            return self.model(x).square().mean() + (self.model(x) * 0).sum().square().sqrt()
        factor = math.nan if self.kind == "loss" and batch >= self.begin else 1.0
        return self.model(x).square().mean() * factor

    def run(self, steps: int, observe: Any, numbers: Any = None) -> None:
        for number in range(steps) if numbers is None else numbers:
            self.optimizer.zero_grad()
            loss = self.loss(number)
            observe(loss)
            loss.backward()
            self.optimizer.step()
            self.done += 1


def healed(loop: Loop, policy: Any, folder: Any, steps: int, *, compares: bool) -> None:
    state = {"model": loop.model, "optimizer": loop.optimizer}
    loss_fn = loop.loss if compares else None
    with Healer(policy, state=state, store=folder, loss_fn=loss_fn) as healer:
        loop.run(steps, healer.observe, healer.batches(range(steps)))


@pytest.mark.parametrize("steps", [20, 300])
@pytest.mark.parametrize("compares", [False, True], ids=["", "loss_fn"])
@pytest.mark.parametrize("kind", SENTENCES)
def test_without_a_finite_step_the_healer_ends(kind, compares, steps, tmp_path):
    loop = Loop(kind)
    with pytest.raises(RunStopped) as stop:
        healed(loop, "default", tmp_path, steps, compares=compares)
    assert SENTENCES[kind] in stop.value.why
    assert loop.done <= FROM_START + 1
    text = str(stop.value.code)
    assert not [e for e in ("resolved by the end", "finite loss 0", "norm 0") if e in text]


def test_observing_never_ends_a_run(tmp_path):
    policy = healcore.policy.load("default", mode="observe")
    healed(Loop("loss"), policy, tmp_path, FROM_START + 20, compares=False)
    assert events(tmp_path, "end")[0]["ending"] == "completed"


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_an_attached_policy_logs_an_error_at_powers_of_ten(kind, caplog):
    caplog.set_level(logging.ERROR, logger="healcore")
    loop = Loop(kind)
    loop.run(1100, attach(loop.optimizer, "default").observe)
    assert [f"the {kind} is" in each.getMessage() for each in caplog.records] == [True, True]


@pytest.mark.parametrize("entry", ["heal_trainer", "lightning"])
@pytest.mark.parametrize("steps", [30, 120])
def test_a_trainer_ends_too(entry, steps, tmp_path):
    scaled = dict.fromkeys(range(steps), math.nan)
    if entry == "lightning":
        healing = LightningHealingCallback("default", store=tmp_path)
        fit = trainer(healing, max_steps=steps)
        bad = TensorDataset(torch.full((8 * steps, 8), math.nan), torch.zeros(8 * steps, 1))
        train = lambda: fit.fit(Regression(), DataLoader(bad, 8))  # noqa: E731
    else:
        train = heal_trainer(small_runs.trainer(tmp_path, steps=steps, scaled=scaled)).train
    with pytest.raises(RunStopped, match=f"none of the first {min(steps, FROM_START)} steps was"):
        train()


GUARDS = ("where", "cond", "apply_if_finite", "loss scale")


def guarded(guard: str, tx: Any, params: Any) -> tuple[Any, Any]:
    """A step whose own guard keeps the old state, healing state included, if the loss is NaN."""
    if guard == "apply_if_finite":
        tx = optax.with_extra_args_support(optax.apply_if_finite(tx, 10**6))

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        params, memory, scale = state
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((p @ batch - 1) ** 2))(params)

        def update(_: Any = None) -> Any:
            updates, new = tx.update(grads, memory, params, value=loss)
            return optax.apply_updates(params, updates), new

        finite = jnp.isfinite(loss)
        if guard == "apply_if_finite":
            return *update(), scale
        if guard == "cond":
            return *jax.lax.cond(finite, update, lambda _: (params, memory), None), scale
        kept = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), update(), (params, memory)
        )
        return *kept, jnp.where(finite, scale, scale / 2) if guard == "loss scale" else scale

    return step, (params, tx.init(params), jnp.float32(1))


def run_guarded(guard: str, bad: Any, folder: Any, steps: int = 40) -> Any:
    step, state = guarded(guard, protect(optax.sgd(0.01)), jnp.zeros(2))
    with Healer("default", state=state, store=folder) as healer:
        for number in healer.batches(range(steps)):
            batch = jnp.full(2, math.nan if number in bad else 1.0 + number % 3)
            healer.update(step(healer.state, batch))
    return healer


@pytest.mark.parametrize("guard", GUARDS)
def test_a_step_that_keeps_its_old_state_is_counted_and_said_once(guard, tmp_path, capsys):
    healer = run_guarded(guard, range(20, 25), tmp_path)
    assert "has not changed the healing state" in capsys.readouterr().err
    (problem,) = events(tmp_path, "problem")
    assert "guard of the training step" in problem["problem"]
    assert healer.report().counts["skips"] == 5
    assert healer._loop.recovery.ledger.unhealthy == [*range(20, 25)]


def test_damaged_weights_behind_a_guard_are_found_by_the_loss_of_the_batches(tmp_path):
    tx, damaged = protect(optax.inject_hyperparams(optax.sgd)(0.01)), [False]
    draw = np.random.default_rng(0)
    data = [draw.normal(size=2).astype(np.float32) for _ in range(420)]

    def loss_of(params: Any, x: Any) -> Any:
        return jnp.mean((params @ x - x.sum()) ** 2) + 0 * (params**2).sum()

    @jax.jit
    def step(state: Any, x: Any, factor: Any) -> Any:
        params, memory = state
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        updates, new = tx.update(grads, memory, params, value=loss)
        made = optax.apply_updates(params, updates) * factor, new
        return jax.tree.map(lambda n, o: jnp.where(jnp.isfinite(loss), n, o), made, state)

    state = jnp.zeros(2), tx.init(jnp.zeros(2))
    loss_fn = jax.jit(lambda state, x: loss_of(state[0], x))
    with Healer(state=state, store=tmp_path, loss_fn=loss_fn) as healer:
        for number, x in enumerate(healer.batches(data)):
            factor = 1e25 if number == 200 and not damaged[0] else 1.0
            damaged[0] |= factor != 1
            healer.update(step(healer.state, x, jnp.float32(factor)))
    (rollback,) = events(tmp_path, "rollback")
    assert (rollback["checkpoint"], rollback["onset"]) == (100, 201)
    assert float(loss_fn(healer.state, data[0])) < 1e-3
