"""`axis_name` and `shard_axis_name`: every device of a mesh takes the same decision."""

# optax types every state as the union of all, so that none has an attribute.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore.jax import heal_zclip, last_decision, metrics, protect
from tests.jax import policies


def test_inside_shard_map_on_four_devices():
    done = subprocess.run(
        [sys.executable, "-m", "tests.jax.four_devices"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "fine"


def test_signals_are_reduced_over_a_named_vmap():
    tx = protect(optax.sgd(0.1), policies.UPDATES, axis_name="lane")

    def step(state, grads, loss, skipped, change_expected, evaluated):
        return tx.update(
            grads, state, jnp.ones(2),
            value=loss, externally_skipped=skipped,
            change_expected=change_expected, eval_loss=evaluated,
        )  # fmt: skip

    run = jax.vmap(step, in_axes=(None, None, 0, 0, 0, 0), axis_name="lane")
    yes, no = jnp.asarray([False, True, False]), jnp.zeros(3, bool)
    losses = jnp.asarray([1.0, 2.0, 6.0])
    state, grads = tx.init(jnp.ones(2)), jnp.ones(2)
    _, new = run(state, grads, losses, no, yes, losses)
    told = metrics(jax.tree.map(lambda x: x[0], new))
    assert float(told["heal/loss"]) == 3.0
    np.testing.assert_allclose(new.heal_update_norm, np.full(3, 0.1 * 2**0.5), rtol=1e-6)
    _, skipped = run(state, grads, losses, yes, no, losses)
    assert last_decision(skipped).skip.all()


@pytest.mark.parametrize("name", ["axis_name", "shard_axis_name"])
def test_an_axis_is_named_by_a_string(name):
    makes: list[Any] = [heal_zclip, lambda **o: protect(optax.sgd(0.1), policies.ZCLIP, **o)]
    for make in makes:
        for wrong in (0, True, ("data", 1)):
            with pytest.raises(TypeError, match=f'{name}="data"'):
                make(**{name: wrong})
        make(**{name: ("data", "model")})


def test_an_axis_has_one_meaning():
    with pytest.raises(TypeError, match="'data' is in axis_name and in shard_axis_name"):
        heal_zclip(axis_name=("data", "model"), shard_axis_name="data")
