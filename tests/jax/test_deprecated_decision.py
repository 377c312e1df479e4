"""`HealState.heal_decision` of 0.3.0 warns, and is no part of the state as a pytree."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore.jax import heal, last_decision
from healcore.jax.heal_state import HealState
from healcore.jax.nested_states import find

KEYS = {
    "heal_skip", "heal_grad_scale", "heal_lr_scale", "heal_action", "heal_cause",
    "heal_rollback_depth",
}  # fmt: skip
"""Keys of the field in 0.3.0, for a policy that does not clip per tensor."""


def test_the_dictionary_of_0_3_0_has_the_last_decision():
    tx = optax.chain(heal("zclip"), optax.adam(0.1))
    params = {"w": jnp.ones(3)}
    updates = {"w": jnp.full(3, 100.0)}
    _, state = tx.update(updates, tx.init(params), params, value=jnp.float32(1.0))
    with pytest.warns(DeprecationWarning, match="last_decision"):
        found = find(state).heal_decision
    made = last_decision(state)
    assert made.grad_scale < 0.1  # not a neutral decision
    assert set(found) == KEYS
    for name in KEYS:
        value = getattr(made, name.removeprefix("heal_"))
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)


def test_a_policy_per_tensor_has_the_factor_of_each_tensor():
    params = {"a": jnp.ones(3), "b": jnp.ones(2)}
    state = heal("adagc").init(params)
    with pytest.warns(DeprecationWarning, match="last_decision"):
        found = state.heal_decision
    assert set(found) == KEYS | {"heal_group_scale"}
    np.testing.assert_array_equal(found["heal_group_scale"], [1, 1])


def test_the_state_as_a_pytree_does_not_read_it():
    """Otherwise each step would warn, and the count of the optimizer would be ambiguous."""
    tx = optax.chain(heal("zclip"), optax.adam(0.1))
    state = tx.init({"w": jnp.ones(3)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "heal_decision" not in HealState._fields
        leaves, structure = jax.tree.flatten(state)
        again = structure.unflatten(leaves)
        assert all(old is new for old, new in zip(leaves, jax.tree.leaves(again), strict=True))
        assert not any("decision" in jax.tree_util.keystr(path)
                       for path, _ in jax.tree_util.tree_leaves_with_path(state))  # fmt: skip
        assert optax.tree.get(state, "count") == 0
        assert optax.tree.get(state, "heal_decision") is None
        jax.jit(lambda state: state)(state)
