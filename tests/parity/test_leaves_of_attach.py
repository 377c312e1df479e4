"""The leaves of the state that `attach` and `protect` keep differently are those of the page."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import healcore.jax
import healcore.torch

PAGE = (Path(__file__).parents[2] / "docs" / "parity.md").read_text()


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of each number of a saved state."""
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, each in items:
            yield from leaves(each, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree


@pytest.mark.parametrize("policy", ["default", "zclip"])
def test_only_the_named_leaves_differ(policy):
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.01)
    healing = healcore.torch.attach(optimizer, policy=policy)
    tx = healcore.jax.protect(optax.inject_hyperparams(optax.sgd)(0.01), policy)
    params = jnp.ones(1)
    state = tx.init(params)
    update = jax.jit(tx.update)
    generator = np.random.default_rng(0)
    for step in range(60):
        # One gradient, whose norm has the same bits in both frameworks.
        value = np.nan if step == 40 else 1 + generator.integers(100) / 64
        grad = np.array([value], np.float32)
        loss = np.float32(1 + generator.integers(100) / 1024)
        healing.observe(torch.tensor(loss))
        weight.grad = torch.tensor(grad)
        optimizer.step()
        _, state = update(jnp.asarray(grad), state, params, value=loss)
    of_torch = dict(leaves(healing.state_dict()["state"]))
    of_jax = dict(leaves(healcore.jax.to_dict(state, policy)["state"]))
    differ = {path for path, value in of_torch.items() if of_jax[path] != value}
    (sentence,) = re.findall(r"^\*\*Three leaves differ.*$", PAGE, re.MULTILINE)
    named = {"budget.healthy_steps", "lr.peak", "lr.rate"}
    assert all(f"`{name}`" in sentence for name in named)
    assert differ == (named if policy == "default" else set())
