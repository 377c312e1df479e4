"""Trains in torch, then in JAX, then in torch again; healing continues where it was.

python examples/port_a_run.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import healcore

Trained = tuple[np.ndarray, dict]
POLICY = "pretraining"
PART = 300
"""Steps in each framework."""
TIMES = {350: 100.0, 700: float("nan")}
"""Step: factor of its targets."""


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a step."""
    draw = np.random.default_rng(step)
    inputs = draw.normal(size=(64, 8)).astype(np.float32)
    noise = 0.1 * draw.normal(size=64)
    return inputs, ((inputs.sum(1) + noise) * TIMES.get(step, 1.0)).astype(np.float32)


def train_torch(weights: np.ndarray, heal_state: dict | None, steps: range) -> Trained:
    """Trains these steps; returns the weights and the state of healing."""
    parameter = torch.nn.Parameter(torch.from_numpy(weights.copy()))
    optimizer = torch.optim.SGD([parameter], lr=0.01)
    heal = healcore.torch.attach(optimizer, POLICY)
    if heal_state is not None:
        heal.load_state_dict(heal_state)  # from JAX, NumPy or torch
    for step in steps:
        inputs, targets = map(torch.from_numpy, batch(step))
        loss = (inputs @ parameter - targets).square().mean()
        heal.observe(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameter.detach().numpy(), heal.state_dict()


def train_jax(weights: np.ndarray, heal_state: dict, steps: range) -> Trained:
    """The same in JAX."""
    params = jnp.asarray(weights)
    tx = healcore.jax.protect(optax.sgd(0.01), POLICY)
    opt_state = healcore.jax.from_dict(tx.init(params), heal_state, POLICY)

    @jax.jit
    def train_step(params, opt_state, inputs, targets):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((inputs @ p - targets) ** 2))(params)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    for step in steps:
        params, opt_state = train_step(params, opt_state, *batch(step))
    return np.asarray(params), healcore.jax.to_dict(opt_state, POLICY)


def main() -> None:
    """Prints what healing has done in the ported run, and in a run that stays in torch."""
    first, second, third = (range(i * PART, (i + 1) * PART) for i in range(3))
    weights, heal_state = train_torch(np.zeros(8, np.float32), None, first)
    weights, heal_state = train_jax(weights, heal_state, second)
    ported = train_torch(weights, heal_state, third)
    stayed = train_torch(np.zeros(8, np.float32), None, range(3 * PART))
    for name, (weights, state) in {"ported": ported, "stayed": stayed}.items():
        tally, error = state["state"]["tally"], np.abs(weights - 1).max()
        print(f"{name}: alarms {tally['alarms']}, skips {tally['skips']}, error {error:.3f}")


if __name__ == "__main__":
    main()
