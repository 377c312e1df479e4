"""Every policy that comes with healcore loads, replays, and can be attached in both frameworks."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import healcore.jax
import healcore.torch
from healcore.policy import load, preset_names, recipe_names

ALL = (*preset_names(), *recipe_names())
STEPS, BAD = 14, 10
NOISE = np.random.default_rng(0).normal(size=(3, STEPS))
LOSSES = (2 + 0.02 * NOISE[0]).astype(np.float32)
GRADIENTS = (0.3 * np.exp(0.1 * NOISE[1:].T)).astype(np.float32)
"""(steps, 2): one weight's gradient each; not a number at step `BAD`."""
GRADIENTS[BAD, 0] = np.nan


# Together they have every detector, every clip and every mode; each is seconds of XLA.
COVERING = (
    "default", "self-healing-trl-aggressive", "levanter-skip", "axolotl-watchdog", "observe",
    "adagc", "autoclip", "axlearn-skip", "pretraining",
)  # fmt: skip


def parts(name: str) -> set[str]:
    """The detectors of a policy, its clip and its mode."""
    policy = load(name)
    detectors = {key for key, value in policy.detect._asdict().items() if value is not None}
    return detectors | {policy.clip.kind, policy.mode}


def test_some_policies_have_every_part():
    """`make test` runs these policies alone, and has each detector, clipping rule and mode."""
    assert set().union(*map(parts, COVERING)) == set().union(*map(parts, ALL))


@functools.cache
def in_torch(name: str) -> tuple[list[int], list[float]]:
    """The steps that are skipped, and the weights in the end."""
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=1e-2)
    heal = healcore.torch.attach(optimizer, name)
    skipped = []
    for i, (loss, row) in enumerate(zip(LOSSES, GRADIENTS, strict=True)):
        heal.observe(torch.tensor(loss))
        for weight, value in zip(weights, row, strict=True):
            weight.grad = torch.full((1,), float(value))
        optimizer.step()
        decision: Any = heal.last_decision()
        if decision.skip:
            skipped.append(i)
    return skipped, [float(weight.detach()) for weight in weights]


@pytest.mark.parametrize("name", ALL)
def test_it_is_attached_in_torch(name):
    skipped, weights = in_torch(name)
    observed = load(name).mode == "observe"
    assert (BAD in skipped) is not observed
    assert observed or np.isfinite(weights).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [x if x in COVERING else pytest.param(x, marks=pytest.mark.stress) for x in ALL]
)
def test_it_protects_in_jax_as_in_torch(name):
    tx = healcore.jax.protect(optax.sgd(1e-2), policy=name)
    params: Any = {"a": jnp.ones(1), "b": jnp.ones(1)}
    state = tx.init(params)
    skipped = []
    for i, (loss, row) in enumerate(zip(LOSSES, GRADIENTS, strict=True)):
        made = {"a": jnp.full(1, row[0]), "b": jnp.full(1, row[1])}
        updates, state = tx.update(made, state, params, value=jnp.asarray(loss))
        params = optax.apply_updates(params, updates)
        if healcore.jax.last_decision(state).skip:
            skipped.append(i)
    expected, weights = in_torch(name)
    assert skipped == expected
    ours = [float(params[key][0]) for key in ("a", "b")]
    np.testing.assert_allclose(ours, weights, rtol=1e-6)
