"""A run that was saved and restored decides as one that never stopped."""

# optax types every tree as the union of all trees, so that no leaf has an attribute.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from orbax.checkpoint import v1 as ocp

from healcore.jax import from_dict, last_decision, protect, to_dict
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits

# Few detectors: every detector's state goes through JSON in tests/core/test_state_dict.
POLICY = policies.BOTH
TX = protect(optax.adamw(0.1), POLICY)
PARAMS = {"w": jnp.linspace(-1.0, 1.0, 6)}
GRADS = np.random.default_rng(0).standard_normal((40, 6)).astype(np.float32)
GRADS[::9] *= 50
GRADS[13] = np.nan


@jax.jit
def run(state, grads):
    def step(state, g):
        _, state = TX.update({"w": g}, state, PARAMS, value=jnp.float32(1.0))
        return state, last_decision(state)

    return jax.lax.scan(step, state, grads)


def through_orbax(state, tmp_path):
    ocp.save(tmp_path / "state", state)
    return ocp.load(tmp_path / "state", TX.init(PARAMS))


def through_flax(state, tmp_path):
    return serialization.from_bytes(TX.init(PARAMS), serialization.to_bytes(state))


def through_json(state, tmp_path):
    (tmp_path / "heal.json").write_text(json.dumps(to_dict(state, POLICY)))
    saved = json.loads((tmp_path / "heal.json").read_text())
    others = {"inner_state": state.inner_state, "heal_update_norm": state.heal_update_norm}
    return from_dict(TX.init(PARAMS)._replace(**others), saved, POLICY)


@pytest.mark.parametrize("through", [through_orbax, through_flax, through_json])
def test_saved_and_restored_goes_on_the_same(through, tmp_path):
    half, _ = run(TX.init(PARAMS), jnp.asarray(GRADS[:20]))
    restored = through(half, tmp_path)
    assert_same_bits(restored.heal[:2], half.heal[:2])
    assert_same_bits(restored.inner_state, half.inner_state)
    expected = run(half, jnp.asarray(GRADS[20:]))
    found = run(jax.tree.map(jnp.asarray, restored), jnp.asarray(GRADS[20:]))
    assert_same_bits(_unread(found), _unread(expected))


def _unread(run):
    """The state without the records of single steps: JSON leaves them out, nothing needs them."""
    state, decisions = run
    return state._replace(heal=state.heal._replace(heal_records=None)), decisions
