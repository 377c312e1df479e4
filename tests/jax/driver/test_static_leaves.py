"""A state with leaves that are no arrays, as an Equinox module has: functions, names, numbers."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore import Healer
from healcore.jax import HealStateError, heal, protect
from healcore.jax.driver.driver import JaxDriver
from tests.healer.run_directory import events, new_process
from tests.healer.training_loops import EVERY_5, rules
from tests.jax.bit_comparison import assert_same_bits
from tests.jax.driver.small_runs import batch, mse

RULES = rules()


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "out", "activation", "name", "dtype", "bias", "rate", "inference"],
    meta_fields=[],
)
@dataclass
class Module:
    """A model whose functions and names are leaves, as those of `equinox.Module` are."""

    weight: Any
    out: Any
    activation: Any
    name: Any = "mlp"
    dtype: Any = jnp.float32
    bias: Any = None
    rate: Any = 0.5
    inference: Any = False

    def __call__(self, x: Any) -> Any:
        assert self.inference is False, "a number is what the program has written"
        return self.activation(x @ self.weight) @ self.out


def make(activation: Any = jnp.tanh) -> Module:
    return Module(jnp.full((4, 3), 0.1), jnp.full((3, 1), 0.2), activation)


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def arrays_of(tree: Any) -> Any:
    """As `equinox.filter(tree, equinox.is_array)`."""
    return jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, tree)


def combined(arrays: Any, others: Any) -> Any:
    """As `equinox.combine`."""
    return jax.tree.map(
        lambda one, other: other if one is None else one,
        arrays,
        others,
        is_leaf=lambda leaf: leaf is None,
    )


TX = protect(optax.adamw(1e-2), RULES)


def others_of(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: None if is_array(leaf) else leaf, tree)


@functools.cache
def compiled() -> Any:
    """As `equinox.filter_jit`: arrays are traced, and everything else is a constant."""

    def step(arrays: Any, x: Any, others: Any) -> Any:
        params, opt_state = arrays

        def loss_of(params: Any) -> Any:
            return mse(combined(params, others)(x), x)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = TX.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    traced: dict[Any, Any] = {}

    def call(state: Any, x: Any) -> Any:
        model, opt_state = state
        others = others_of(model)
        key = tuple(map(id, jax.tree.leaves(others)))
        if key not in traced:
            traced[key] = jax.jit(functools.partial(step, others=others), donate_argnums=0)
        params, opt_state = traced[key]((arrays_of(model), opt_state), x)
        return combined(params, others), opt_state

    return call


def evaluate(state: Any, number: int) -> Any:
    model, _ = state
    return mse(model(batch(number)), batch(number))


def run(folder: Any, *, kill_at: int = -1, bad: Any = (), model: Any = None) -> Any:
    """The final model of a run, and its Healer."""
    new_process()
    model = model or make()
    state = model, TX.init(arrays_of(model))
    with Healer(RULES, state=state, store=folder, loss_fn=evaluate, checkpoints=EVERY_5) as healer:
        for number, state in healer.batches(range(30)).with_state():
            if number == kill_at:
                raise KeyboardInterrupt
            healer.update(compiled()(state, batch(number, bad=number in bad)))
    return healer.state[0], healer


@pytest.mark.slow
def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(tmp_path):
    expected, _ = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", kill_at=13)
    found, healer = run(tmp_path / "killed")
    assert healer.step == 30
    assert_same_bits(arrays_of(expected), arrays_of(found))
    assert (found.activation, found.name, found.rate) == (jnp.tanh, "mlp", 0.5)
    assert (found.dtype, found.bias, found.inference) == (jnp.float32, None, False)


@pytest.mark.slow
def test_a_rollback_keeps_the_programs_own_functions(tmp_path):
    def own(x):  # another object in each process
        return jnp.tanh(x)

    found, healer = run(tmp_path, bad={17}, model=make(own))
    assert (healer.rollbacks, healer.step) == (1, 29)
    assert found.activation is own
    assert np.isfinite(found.weight).all()
    assert events(tmp_path, "rollback")


def test_a_state_given_by_name(tmp_path):
    """Each part is an item of the checkpoint, also one without arrays."""
    model = make()
    state = {"model": model, "opt": TX.init(arrays_of(model)), "mode": "train", "hook": len}
    driver = JaxDriver(state, RULES)
    store = driver.store(tmp_path)
    store.save(0, driver.state(), record=driver.engines())
    store.wait()
    moved = {**state, "model": make(jnp.sin)}
    moved["model"].weight = model.weight + 1
    driver.update(moved)
    restored = store.restore(0, driver.state())
    driver.load(restored.state, restored.record)
    live = driver.live
    assert_same_bits(arrays_of(live["model"]), arrays_of(model))
    assert live["model"].activation is jnp.sin, "the program's newest function"
    assert (live["mode"], live["hook"]) == ("train", len)
    copy = driver.copy_weights()
    assert len(copy) == 2
    losses = driver.losses_of(lambda state, i: evaluate((state["model"], None), i), [0], copy)
    assert np.isfinite(losses).all()


def test_an_array_in_the_place_of_a_function_is_refused():
    model = make()
    driver = JaxDriver((model, TX.init(arrays_of(model))), RULES)
    other = make(jnp.zeros(3))
    with pytest.raises(HealStateError, match=r"activation is float32\(3,\), expected no leaf"):
        driver.update((other, driver.live[1]))


@pytest.mark.parametrize("wrap", [lambda inner: optax.chain(heal("zclip"), inner), protect])
def test_optimizers_take_a_whole_model_where_optax_does(wrap):
    """Adam does not use the parameters: `optim.update(grads, state, model)` is a common line."""
    model = make()
    grads = jax.tree.map(jnp.ones_like, arrays_of(model))
    ended = []
    for tx in (optax.adam(1e-2), wrap(optax.adam(1e-2))):
        tx = optax.with_extra_args_support(tx)
        state = tx.init(arrays_of(model))
        updates, state = tx.update(grads, state, model, value=jnp.float32(1.0))
        assert (updates.activation, updates.bias) == (None, None)
        ended.append((updates.weight, updates.out))
        optax.sgd(0.1).init(model)
        wrap(optax.sgd(0.1)).init(model)
    for mine, theirs in zip(*ended, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
