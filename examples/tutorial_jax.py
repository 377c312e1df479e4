"""The loop of docs/tutorial.md in JAX: it fails twice, and is healed step by step.

python examples/tutorial_jax.py --protection none|protect|healer [--kill-at STEP] [--no-faults]
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import healcore


def random_batch(seed):
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((64, 8), np.float32)
    targets = np.sin(inputs.sum(axis=1, keepdims=True))
    return inputs, targets + 0.1 * rng.standard_normal((64, 1), np.float32)


def make_data(faults):
    batches = [random_batch(seed) for seed in range(600)]
    if faults:
        batches[120][1].fill(np.nan)  # fault 1: one batch has no targets
    return batches


def build(faults):
    params = {}
    for layer, (rows, columns) in enumerate([(8, 64), (64, 64), (64, 1)]):
        normal = jax.random.normal(jax.random.key(layer), (rows, columns))
        params |= {f"w{layer}": normal / rows**0.5, f"b{layer}": jnp.zeros(columns)}
    # fault 2: for 50 steps the learning rate is 100 times too high
    wrong = {350: 100.0, 400: 0.01} if faults else {}
    rate = optax.piecewise_constant_schedule(3e-3, wrong)
    return params, optax.inject_hyperparams(optax.adamw)(learning_rate=rate)


def loss_fn(params, batch):
    inputs, targets = batch
    hidden = jnp.tanh(inputs @ params["w0"] + params["b0"])
    hidden = jnp.tanh(hidden @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] + params["b2"] - targets) ** 2)


@functools.partial(jax.jit, static_argnums=0)
def train_step(tx, state, batch):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params, value=loss)
    return (optax.apply_updates(params, updates), opt_state), loss


def train(batches, params, tx, show):
    state = (params, tx.init(params))
    for step, batch in enumerate(batches):
        state, loss = train_step(tx, state, batch)
        show(step, loss)
    return state


def train_protected(batches, params, tx, show):
    tx = healcore.jax.protect(tx)  # <- healcore
    state = train(batches, params, tx, show)
    skips = healcore.jax.metrics(state[1])["heal/skips"]  # <- healcore
    print(f"skipped steps: {int(skips)}")
    return state


def train_healed(batches, params, tx, show):
    tx = healcore.jax.protect(tx)  # <- healcore
    # healcore: the loss of any state on a batch
    evaluate = jax.jit(lambda state, batch: loss_fn(state[0], batch))
    state = (params, tx.init(params))
    with healcore.Healer(  # <- healcore
        "default", state=state, store="tutorial-jax", loss_fn=evaluate
    ) as healer:
        for batch in healer.batches(batches):  # <- healcore
            step = healer.step
            state, loss = train_step(tx, healer.state, batch)  # <- healcore
            healer.update(state)  # <- healcore
            show(step, loss)
    return healer.state


TRAIN = {"none": train, "protect": train_protected, "healer": train_healed}


def main(protection, kill_at=None, faults=True):
    """Trains, prints every 50th loss, and returns all losses with their steps."""
    losses = []

    def show(step, loss):
        losses.append((step, loss.item()))
        if step % 50 == 0:
            print(f"step {step:3}  loss {loss.item():.3f}", flush=True)
        if step == kill_at:
            time.sleep(1)  # the newest checkpoint is written in the background
            os.kill(os.getpid(), signal.SIGKILL)

    params, tx = build(faults)
    params, _ = TRAIN[protection](make_data(faults), params, tx, show)
    print(f"loss on unseen data {loss_fn(params, random_batch(600)).item():.3f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--protection", choices=TRAIN, default="none")
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--no-faults", dest="faults", action="store_false")
    main(**vars(parser.parse_args()))
