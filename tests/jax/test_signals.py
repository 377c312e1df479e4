"""Signals are checked while tracing, and are the same on every device of a mesh."""

# optax types every state as the union of all, so that none has an attribute.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore.core.detectors import NonFiniteConfig
from healcore.core.engine import Engine, EngineConfig
from healcore.errors import SignalError
from healcore.jax import heal, heal_zclip, last_decision, metrics, protect
from healcore.jax.opt_state import without_heal_state
from healcore.jax.signals import Axes, make_signals
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits
from tests.jax.processes import Program

PARAMS = {"w": jnp.ones(3)}
TRANSFORMATIONS = {
    "heal": lambda: heal(policies.ZCLIP),
    "heal_zclip": heal_zclip,
    "protect": lambda: protect(optax.sgd(0.1), policies.ZCLIP),
}
every_transformation = pytest.mark.parametrize("name", TRANSFORMATIONS)


@every_transformation
@pytest.mark.parametrize(
    ("signal", "message"),
    [
        ({"value": np.ones(3, np.float32)}, "mean"),
        ({"value": np.ones(1, np.float32)}, "shape"),
        ({"value": 3}, "int32"),
        ({"value": True}, "bool"),
        ({"value": np.complex64(1j)}, "complex64"),
        ({"value": "1.0"}, "str"),
        ({"value": {"loss": 1.0}}, "dict"),
        ({"eval_loss": np.ones((2, 2), np.float32)}, "eval_loss"),
        ({"grad_norm": np.int32(1)}, "grad_norm"),
        ({"update_norm": np.ones(2, np.float32)}, "update_norm"),
        ({"change_expected": np.float32(1)}, "change_expected"),
        ({"externally_skipped": np.ones(2, bool)}, "externally_skipped"),
    ],
)
def test_a_bad_signal_is_named_while_tracing(name, signal, message):
    tx = TRANSFORMATIONS[name]()
    state = tx.init(PARAMS)
    before = jax.tree.map(np.asarray, state)
    with pytest.raises(SignalError, match=message):
        jax.eval_shape(lambda g, s, p: tx.update(g, s, p, **signal), PARAMS, state, PARAMS)
    assert_same_bits(before, jax.tree.map(np.asarray, state))


@pytest.mark.filterwarnings("error")
def test_a_loss_that_float32_cannot_hold_is_infinite():
    engine = Engine(EngineConfig(detectors=(("nonfinite", NonFiniteConfig()),)))
    signals, _ = make_signals(engine, PARAMS, {"value": np.float64(1e300)}, Axes())
    assert np.isinf(signals.loss)


@every_transformation
def test_a_given_norm_replaces_the_own_one(name):
    tx = TRANSFORMATIONS[name]()
    _, state = jax.jit(tx.update)(PARAMS, tx.init(PARAMS), PARAMS, grad_norm=jnp.float32(10.0))
    assert float(metrics(state)["heal/grad_norm"]) == 10.0
    np.testing.assert_allclose(last_decision(state).grad_scale, 0.1, rtol=1e-5)
    _, state = jax.jit(tx.update)(PARAMS, tx.init(PARAMS), PARAMS, grad_norm=jnp.float32(jnp.inf))
    assert bool(last_decision(state).skip)


@every_transformation
def test_an_externally_skipped_step_is_not_applied_learnt_or_counted(name):
    """`externally_skipped=~finite` is what an fp16 user writes."""
    tx = TRANSFORMATIONS[name]()
    update = jax.jit(tx.update)
    good, bad = jnp.bool_(False), jnp.bool_(True)
    one = jnp.float32(1.0)
    _, state = update(PARAMS, tx.init(PARAMS), PARAMS, value=one, externally_skipped=good)
    for factor in (np.nan, np.inf, 7.0):
        grads = {"w": jnp.full(3, factor)}
        updates, new = update(grads, state, PARAMS, value=one, externally_skipped=bad)
        assert not jnp.any(updates["w"])
        assert bool(last_decision(new).skip)
        assert int(metrics(new)["heal/skips"]) == 0
        assert int(metrics(new)["heal/steps"]) == 1
        for before, after in zip(
            jax.tree.leaves(without_heal_state(state)),
            jax.tree.leaves(without_heal_state(new)),
            strict=True,
        ):
            np.testing.assert_array_equal(before, after)


def test_observe_withholds_only_steps_that_the_caller_skips():
    tx = protect(optax.sgd(1.0), "observe")
    bad = {"w": jnp.full(3, jnp.nan)}
    for flag in (False, True):
        updates, _ = jax.jit(tx.update)(
            bad, tx.init(PARAMS), PARAMS, externally_skipped=jnp.bool_(flag)
        )
        assert jnp.isnan(updates["w"]).all() != flag


@pytest.mark.parametrize("policy", ["default", policies.OBSERVE], ids=["heal", "observe"])
def test_an_overflow_of_a_dynamic_loss_scale_costs_one_step(policy):
    """A loop with loss scaling: the scale is halved after an overflow, nothing else happens."""
    tx = protect(optax.adam(1e-2), policy)

    @jax.jit
    def step(params, state, scale):
        def scaled(w):
            half = w.astype(jnp.float16)
            loss = jnp.mean(half * half)
            return loss * scale.astype(jnp.float16), loss

        grads, loss = jax.grad(scaled, has_aux=True)(params)
        grads = jax.tree.map(lambda g: g / scale, grads)
        finite = jnp.isfinite(optax.tree.norm(grads))
        updates, state = tx.update(grads, state, params, value=loss, externally_skipped=~finite)
        scale = jnp.where(finite, scale, scale / 2)
        return optax.apply_updates(params, updates), state, scale, finite

    params, scale, overflows = jnp.ones(4), jnp.float32(2.0**20), 0
    state = tx.init(params)
    for _ in range(60):
        params, state, scale, finite = step(params, state, scale)
        overflows += not finite
    assert 2 <= overflows < 10
    assert jnp.isfinite(params).all()
    assert jnp.sum(params**2) < 3.0, "it has learnt"
    assert int(optax.tree.get(state, "count")) == 60 - overflows
    assert int(metrics(state)["heal/skips"]) == int(metrics(state)["heal/incidents"]) == 0


@pytest.mark.parametrize("name", ["heal_zclip", "protect"])
@pytest.mark.parametrize("tree", [{}, {"a": None}])
def test_no_parameters_are_a_step_of_norm_zero(name, tree):
    tx = TRANSFORMATIONS[name]()
    updates, state = jax.jit(tx.update)(tree, tx.init(tree), tree, value=jnp.float32(1.0))
    assert updates == tree
    assert float(metrics(state)["heal/grad_norm"]) == 0.0
    assert not bool(last_decision(state).skip)


def test_inside_shard_map_on_four_devices():
    scenario = "four_devices:check"
    assert Program("", scenario, world=1, devices=4).of(scenario) == [None]


def test_signals_are_reduced_over_a_named_vmap():
    tx = protect(optax.sgd(0.1), policies.UPDATES, axis_name="lane")

    def step(state, grads, loss, skipped, change_expected, evaluated):
        return tx.update(
            grads, state, jnp.ones(2),
            value=loss, externally_skipped=skipped,
            change_expected=change_expected, eval_loss=evaluated,
        )  # fmt: skip

    run = jax.jit(jax.vmap(step, in_axes=(None, None, 0, 0, 0, 0), axis_name="lane"))
    yes, no = jnp.asarray([False, True, False]), jnp.zeros(3, bool)
    losses = jnp.asarray([1.0, 2.0, 6.0])
    state, grads = tx.init(jnp.ones(2)), jnp.ones(2)
    _, new = run(state, grads, losses, no, yes, losses)
    found = metrics(jax.tree.map(lambda x: x[0], new))
    assert float(found["heal/loss"]) == 3.0
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
    with pytest.raises(TypeError, match="shard_axis_name"):
        heal_zclip(axis_name=("data", "model"), shard_axis_name="data")
