"""Functions of an optimizer state in any nesting, and the errors for a state of another policy."""

import functools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

from healcore import Healer, policy
from healcore.core.engine import Engine, StateError
from healcore.core.engine.state import metrics as engine_metrics
from healcore.core.engine.state import record_numbers
from healcore.jax import (
    HealStateError,
    expect_change,
    from_dict,
    gradient_norms,
    heal,
    heal_zclip,
    last_decision,
    metrics,
    protect,
    to_dict,
    with_heal_state,
    without_heal_state,
)
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits, avals

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 8), "b": jnp.ones(3)}


def drive(tx, norms):
    """The state after steps whose gradients have these norms."""
    state = tx.init(PARAMS)
    update = jax.jit(tx.update)
    for i, norm in enumerate(norms):
        grads = jax.tree.map(functools.partial(jnp.full_like, fill_value=norm / 11**0.5), PARAMS)
        _, state = update(grads, state, PARAMS, value=jnp.float32(1.0 + 0.01 * i))
    return state


def test_the_decision_is_found_in_a_dictionary_of_states_and_neutral_at_first():
    tx = optax.named_chain(("heal", heal(policies.ZCLIP)), ("sgd", optax.sgd(0.1)))
    state = tx.init(PARAMS)
    assert not bool(last_decision(state).skip)
    _, state = jax.jit(tx.update)(PARAMS, state, PARAMS, value=jnp.float32(jnp.nan))
    assert bool(last_decision(state).skip)
    assert last_decision(state).group_scale is None


def test_none_and_several_are_errors_that_name_the_place():
    with pytest.raises(HealStateError, match="tuple"):
        last_decision(optax.adamw(1e-3).init(PARAMS))
    with pytest.raises(HealStateError, match="with_heal_state"):
        protect(optax.adam(0.1), policies.SKIP).update(PARAMS, optax.adam(0.1).init(PARAMS), PARAMS)
    both = optax.chain(heal(policies.ZCLIP), protect(optax.sgd(0.1), policies.SKIP))
    with pytest.raises(HealStateError, match=r"opt_state\[0\]"):
        last_decision(both.init(PARAMS))


def test_a_wrong_structure_is_named_by_its_leaves():
    like = protect(optax.adamw(0.1)).init(PARAMS)
    for wrong in (optax.sgd(0.1, momentum=0.9).init(PARAMS), {"a": 1}, {}):
        with pytest.raises(
            HealStateError, match=r"state\[0\]\.mu.* is missing, expected float32"
        ) as e:
            with_heal_state(wrong, like=like)
        assert "PyTreeDef" not in str(e.value)
    with pytest.raises(HealStateError, match="a list for a tuple"):
        with_heal_state(list(without_heal_state(like)), like=like)


def test_names_in_the_state_collide_with_nothing():
    inner = optax.inject_hyperparams(optax.adam)(0.1)
    for tx in (optax.chain(heal(policies.EVERYTHING), inner), protect(inner, policies.EVERYTHING)):
        state = tx.init(PARAMS)
        for name in ("mu", "nu", "learning_rate", "hyperparams"):
            optax.tree.get(state, name)  # raises when there are two
        assert all(leaf.size for leaf in jax.tree.leaves(state)), "Orbax saves no empty array"


def test_metrics_are_the_cores_own_and_stay_on_the_device():
    tx = protect(optax.sgd(0.1), policies.BOTH)
    norms = 1 + 0.2 * np.random.default_rng(0).standard_normal(30)
    norms[::7] *= 30
    norms[::11] = np.nan
    state = drive(tx, norms)
    engine = Engine(policies.BOTH)
    saved = engine.from_dict(to_dict(state, engine))
    expected = engine_metrics(record_numbers(saved), saved.tally)
    with jax.transfer_guard("disallow"):
        found = metrics(state)
    assert set(found) == set(expected)
    assert all(isinstance(value, jax.Array) and value.shape == () for value in found.values())
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
    assert int(found["heal/skips"]) >= 3
    through_flax = serialization.from_bytes(tx.init(PARAMS), serialization.to_bytes(state))
    assert_same_bits(through_flax, state)


def test_an_announcement_opens_the_grace_window():
    tx = heal(policies.SKIP)
    before = drive(tx, [1.0, 1.1, 0.9, 1.0, 1.0, 1.1])
    expecting = expect_change(before)
    assert avals(expecting) == avals(before)
    grads = jax.tree.map(lambda p: jnp.full_like(p, 1e4), PARAMS)
    for state, announced in ((before, False), (before, True), (expecting, False)):
        _, after = jax.jit(tx.update)(grads, state, change_expected=jnp.bool_(announced))
        assert bool(last_decision(after).skip) is (state is before and not announced)


TREE = {"dense": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}, "steps": jnp.int32(3)}
GRADS = {
    "dense": {"kernel": jnp.full((2, 2), 3.0), "bias": jnp.asarray([jnp.nan, 1.0])},
    "steps": np.zeros((), jax.dtypes.float0),
}


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("tx", [protect(optax.identity(), policies.ZCLIP), heal_zclip()])
def test_each_gradient_has_its_norm_before_clipping(tx, jit):
    state = tx.init(TREE)
    assert set(map(float, gradient_norms(state, TREE).values())) == {0.0}
    _, state = tx.update(GRADS, state, TREE)
    found = jit(gradient_norms)(state, TREE)
    assert list(found) == ["dense/bias", "dense/kernel"]
    assert float(found["dense/kernel"]) == 6.0
    assert np.isnan(found["dense/bias"])
    with pytest.raises(HealStateError, match="2 gradients"):
        gradient_norms(state, {"w": jnp.ones(2)})


# The default policy with one other number: the same names, the same shapes.
EDITED = policy.from_dict({**policy.to_dict(policy.load("default")), "max_skips": 7})


@pytest.mark.slow
@pytest.mark.parametrize("other", ["observe", "zclip", EDITED], ids=["mode", "names", "number"])
def test_a_state_of_another_policy_is_refused(other):
    state = protect(optax.adam(0.1), "default").init(PARAMS)
    saved = json.loads(json.dumps(to_dict(state, "default")))
    tx = protect(optax.adam(0.1), other)
    for use in (
        lambda: to_dict(state, other),
        lambda: from_dict(state, saved, other),
        lambda: tx.update(PARAMS, state, PARAMS, value=jnp.float32(1.0)),
        lambda: Healer(other, state={"params": PARAMS, "opt": state}).__enter__(),
    ):
        with pytest.raises(HealStateError, match="with_heal_state"):
            use()
    with pytest.raises(StateError, match="policy"):
        from_dict(tx.init(PARAMS), saved, other)


@pytest.mark.slow
def test_an_optimizer_with_a_schedule_continues_with_injected_hyperparameters():
    """The line of docs/jax.md."""
    rate = optax.linear_schedule(0.1, 0.01, 10)
    bare = optax.adamw(rate)
    inner = optax.inject_hyperparams(optax.adamw)(rate)
    tx = protect(inner, "default")
    new = inner.init(PARAMS)
    _, old = bare.update(PARAMS, bare.init(PARAMS), PARAMS)
    counts = jax.tree.map(lambda _: old[-1].count, new.hyperparams_states)
    given = new._replace(inner_state=old[:-1] + new.inner_state[-1:], hyperparams_states=counts)
    state = with_heal_state(given, like=tx.init(PARAMS))
    for _ in range(3):
        wanted, old = bare.update(PARAMS, old, PARAMS)
        found, state = tx.update(PARAMS, state, PARAMS, value=jnp.float32(1.0))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("make", [protect, lambda tx, p: optax.chain(heal(p), tx)])
def test_a_forgotten_loss_is_reported_once_and_is_nan_in_the_metrics(make):
    tx = make(optax.sgd(0.1), "default")
    state = tx.init(PARAMS)
    assert np.isnan(metrics(state)["heal/loss"])
    update = jax.jit(tx.update)
    with warnings.catch_warnings(action="error"):
        for loss in (0.0, np.nan):
            _, given = update(PARAMS, state, PARAMS, value=jnp.float32(loss))
            np.testing.assert_equal(float(metrics(given)["heal/loss"]), loss)
    with pytest.warns(UserWarning, match="value=loss"):
        _, state = update(PARAMS, state, PARAMS)
    with warnings.catch_warnings(action="error"):
        _, state = update(PARAMS, state, PARAMS)
    assert np.isnan(metrics(state)["heal/loss"])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_a_state_that_0_4_0_has_made_is_refused_and_its_moments_can_be_taken():
    """It had three arrays, and the records in the first of them."""
    tx = protect(optax.adamw(1e-3), "default")
    params = {"w": jnp.ones(3)}
    gradients = {"w": jnp.full(3, 0.1)}
    _, state = tx.update(gradients, tx.init(params), params, value=jnp.float32(1.0))
    vector, norms = state.heal.heal_engine, state.heal.heal_leaf_norms
    fields = [jnp.tile(vector, (65, 1)), (), norms, None, None]  # as `pickle` makes it
    old = state._replace(heal=type(state.heal)(*fields))
    for read in (metrics, last_decision, lambda opt_state: to_dict(opt_state, "default")):
        with pytest.raises(HealStateError, match=r"another release.*with_heal_state"):
            read(old)
    with pytest.raises(HealStateError, match=r"policy or release.*with_heal_state"):
        tx.update(gradients, old, params, value=jnp.float32(1.0))
    new = with_heal_state(without_heal_state(old), like=tx.init(params))
    assert new.inner_state[0].count == 1
    assert metrics(new)["heal/steps"] == 0
