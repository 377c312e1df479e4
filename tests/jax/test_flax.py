"""Flax: a linen TrainState and nnx objects are reverted whole on a skip."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx, serialization

from healcore.jax import (
    HealStateError,
    expect_change,
    flax_nnx,
    from_dict,
    gradient_norms,
    heal_zclip,
    last_decision,
    metrics,
    protect,
    to_dict,
    with_heal_state,
    without_heal_state,
)
from healcore.jax.flax_linen import HealTrainState
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits, bits
from tests.jax.driver.small_runs import State, batch, in_place, linen


def test_a_bad_batch_is_undone_whole_in_linen():
    def whole() -> Any:
        return bits((state.step, state.params, state.batch_stats, state.opt_state.inner_state))

    run = linen()
    state = run.step(run.state, batch(0))
    assert not bool(state.last_decision.skip)
    before = whole()
    key = bits(state.key)
    statistics = bits(state.batch_stats)
    state = run.step(state, batch(1, bad=True))
    assert bool(state.last_decision.skip)
    assert whole() == before
    assert int(state.step) == 1
    assert bits(state.key) != key, "random keys continue: otherwise a bad draw would repeat"
    state = run.step(state, batch(2))
    assert int(state.step) == 2
    assert bits(state.batch_stats) != statistics


def keys(seed: int) -> dict[str, Any]:
    return {
        "typed": jax.random.split(jax.random.key(seed), 3),
        "raw": jax.random.PRNGKey(seed),
        "raw rbg": jax.random.PRNGKey(seed, impl="rbg"),
        "counters": jnp.full(3, seed, jnp.uint32),
    }


def test_random_keys_go_on_over_a_skip_and_counters_do_not():
    tx = protect(optax.sgd(0.1), policies.ZCLIP)
    params = {"w": jnp.ones(2)}
    state: Any = State.create(apply_fn=None, params=params, tx=tx, batch_stats=None, key=keys(0))
    bad = {"w": jnp.full(2, jnp.nan)}
    step = jax.jit(lambda s, k: s.apply_gradients(grads=bad, value=jnp.float32(1.0), key=k))
    new = step(state, keys(1))
    assert bool(new.last_decision.skip)
    assert int(new.step) == 0
    assert_same_bits(new.key, {**keys(1), "counters": keys(0)["counters"]})


def test_other_keywords_are_fields_and_an_optimizer_that_does_not_heal_is_an_error():
    tx = protect(optax.sgd(0.1), policies.ZCLIP)

    def other(*args, **kwargs):
        return None

    state = HealTrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=tx)
    new = state.apply_gradients(grads=state.params, value=jnp.float32(1.0), apply_fn=other)
    assert new.apply_fn is other
    with pytest.raises(TypeError, match="no_such_field"):
        state.apply_gradients(grads=state.params, no_such_field=1)
    state = HealTrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
    with pytest.raises(HealStateError, match="no healing state"):
        state.apply_gradients(grads=state.params)


def test_a_bad_batch_is_undone_whole_in_nnx():
    def whole() -> Any:
        weights = nnx.state(model, nnx.Not((nnx.RngState, nnx.Intermediate)))
        moments = nnx.to_pure_dict(nnx.state(optimizer))["opt_state"]["inner_state"]
        return bits((nnx.to_pure_dict(weights), moments))

    run = in_place()
    model, optimizer = run.state["model"], run.state["optimizer"]
    run.step(run.state, batch(0))
    assert not bool(flax_nnx.last_decision(optimizer).skip)
    before = whole()
    run.step(run.state, batch(1, bad=True))
    assert bool(flax_nnx.last_decision(optimizer).skip)
    assert whole() == before
    assert int(optimizer.step[...]) == 1
    assert int(model.dropout.rngs.count[...]) == 2, "random streams continue over a skip"
    assert int(flax_nnx.metrics(optimizer)["heal/skips"]) == 1
    run.step(run.state, batch(2))
    assert whole() != before


def nnx_optimizer(tx: Any = None, steps: int = 1) -> Any:
    """An nnx optimizer after steps that were skipped because their loss is NaN, with its model."""
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx or protect(optax.adam(0.1), policies.BOTH), wrt=nnx.Param)
    grads = nnx.grad(lambda m: (m(jnp.ones((4, 2))) ** 2).mean())(model)
    for _ in range(steps):
        optimizer.update(model, grads, value=jnp.float32(jnp.nan))
    return optimizer, model


FORMS = {
    "opt_state": lambda optimizer: optimizer.opt_state,
    "the optimizer": lambda optimizer: optimizer,
    "nnx.state": nnx.state,
    "part of nnx.state": lambda optimizer: nnx.state(optimizer)["opt_state"],
    "nnx.split": lambda optimizer: nnx.split(optimizer)[1],
    "arrays": lambda optimizer: arrays(nnx.state(optimizer)),
    "dictionaries": lambda optimizer: nnx.to_pure_dict(nnx.state(optimizer)),
    "to_state_dict": lambda optimizer: serialization.to_state_dict(arrays(optimizer.opt_state)),
}
"""The forms in which a program has the state of an nnx optimizer."""


def arrays(tree: Any) -> Any:
    """The tree with the array of each Variable, as `nnx.pure` makes it."""
    return jax.tree.map(lambda v: v[...], tree, is_leaf=lambda v: isinstance(v, nnx.Variable))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", ["outside", "in jit"])
def test_each_form_of_an_nnx_optimizer_is_read(form: str, place: str):
    optimizer, model = nnx_optimizer()
    params = nnx.state(model, nnx.Param)

    def read(optimizer: Any) -> Any:
        state = FORMS[form](optimizer)
        norms = gradient_norms(state, params)
        return last_decision(state).skip, metrics(state), norms

    if place == "in jit":
        read = nnx.jit(read)
    skip, numbers, norms = read(optimizer)
    assert bool(skip)
    assert int(numbers["heal/skips"]) == 1
    assert len(norms) == 2
    assert all(norm > 0 for norm in norms.values())


@pytest.mark.parametrize(
    "tx",
    [
        pytest.param(optax.chain(heal_zclip(), optax.adamw(1e-3)), id="chain"),
        pytest.param(optax.chain(optax.chain(protect(optax.adam(0.1)))), id="nested chain"),
        pytest.param(protect(optax.inject_hyperparams(optax.adam)(0.1)), id="numbers"),
        pytest.param(protect(optax.MultiSteps(optax.adam(0.1), 2)), id="MultiSteps"),
    ],
)
def test_a_chain_in_an_nnx_optimizer_is_read_in_each_form(tx: Any):
    optimizer, _ = nnx_optimizer(tx)
    for form in FORMS.values():
        assert bool(last_decision(form(optimizer)).skip)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "policy", [policies.EVERYTHING, policies.ADAGC], ids=["windows", "tensors"]
)
def test_the_engine_of_an_nnx_optimizer_is_replaced_in_each_form(form: str, policy: Any):
    tx = protect(optax.adam(0.1), policy)
    given = FORMS[form](nnx_optimizer(tx, steps=0)[0])
    saved = to_dict(FORMS[form](nnx_optimizer(tx)[0]), policy)
    state = from_dict(given, saved, policy)
    assert jax.tree.structure(state) == jax.tree.structure(given)
    assert to_dict(state, policy) == saved != to_dict(given, policy)
    announced = expect_change(given)
    assert jax.tree.structure(announced) == jax.tree.structure(given)
    assert bits(announced) != bits(given)


def test_an_nnx_optimizer_continues_from_a_replaced_state():
    optimizer, model = nnx_optimizer()
    optimizer.opt_state = expect_change(optimizer.opt_state)
    optimizer.update(model, nnx.state(model, nnx.Param), value=jnp.float32(1.0))
    assert int(metrics(optimizer)["heal/steps"]) == 2
    optimizer.opt_state = with_heal_state(
        without_heal_state(optimizer.opt_state), like=nnx_optimizer(steps=0)[0].opt_state
    )
    optimizer.update(model, nnx.state(model, nnx.Param), value=jnp.float32(1.0))
    assert int(metrics(optimizer)["heal/steps"]) == 1
    with pytest.raises(HealStateError, match=r"pass optimizer\.opt_state"):
        without_heal_state(nnx.state(optimizer))
