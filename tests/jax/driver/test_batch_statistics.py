"""Batch statistics belong to a copy of the weights: a frozen layer reads them as it reads weights.

Damage in them would otherwise be on both sides of a comparison, and nothing would find it.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from healcore import Healer
from healcore.jax import protect
from healcore.jax.driver.driver import JaxDriver
from healcore.jax.flax_linen import HealTrainState
from tests.jax.bit_comparison import assert_same_bits

FREEZE, DAMAGE, END = 150, 300, 500


def data(number: int) -> Any:
    x = np.random.default_rng(number).standard_normal((32, 6)).astype(np.float32)
    return x, np.tanh(x[:, :1] - x[:, 1:2])


# -- real programs --------------------------------------------------------------------------------


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any, *, train: bool) -> Any:
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(16)(x))
        return nn.Dense(1)(jnp.tanh(x))


NET = Net()


class State(HealTrainState):
    batch_stats: Any


def loss_of(params: Any, stats: Any, batch: Any, *, train: bool) -> Any:
    """Loss, and the statistics after the batch."""
    variables = {"params": params, "batch_stats": stats}
    out, changed = NET.apply(variables, batch[0], train=train, mutable=["batch_stats"])
    return jnp.mean((out - batch[1]) ** 2), changed.get("batch_stats", stats)


value_and_grad = jax.value_and_grad(loss_of, has_aux=True)
INNER = optax.sgd(0.05)
TX = protect(INNER, "default")


@functools.partial(jax.jit, static_argnames=("train", "tx"))
def dict_step(state: Any, batch: Any, *, train: bool, tx: Any = TX) -> Any:
    """With `tx=INNER` a step without healcore."""
    (loss, stats), grads = value_and_grad(state["params"], state["batch_stats"], batch, train=train)
    keywords = {"value": loss} if tx is TX else {}
    updates, opt = tx.update(grads, state["opt_state"], state["params"], **keywords)
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "batch_stats": stats, "opt_state": opt}


@functools.partial(jax.jit, static_argnames="train")
def train_state_step(state: Any, batch: Any, *, train: bool) -> Any:
    (loss, stats), grads = value_and_grad(state.params, state.batch_stats, batch, train=train)
    return state.apply_gradients(grads=grads, value=loss, batch_stats=stats)


def variables() -> Any:
    return NET.init(jax.random.key(0), data(0)[0], train=True)


def as_dict(tx: Any = TX) -> Any:
    return {**variables(), "opt_state": tx.init(variables()["params"])}


def as_train_state() -> Any:
    return State.create(apply_fn=NET.apply, tx=TX, **variables())


def part(state: Any, name: str) -> Any:
    return state[name] if isinstance(state, dict) else getattr(state, name)


@jax.jit
def evaluate(state: Any, batch: Any) -> Any:
    """The loss as in the frozen part of the run."""
    return loss_of(part(state, "params"), part(state, "batch_stats"), batch, train=False)[0]


def damaged(state: Any) -> Any:
    norm = part(state, "batch_stats")["BatchNorm_0"]
    stats = {"BatchNorm_0": {**norm, "var": norm["var"] * 1e-3}}
    if isinstance(state, dict):
        return {**state, "batch_stats": stats}
    return state.replace(batch_stats=stats)


PROGRAMS: Any = {
    "dict": (as_dict, dict_step),
    "TrainState": (as_train_state, train_state_step),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_destroyed_variances_of_a_frozen_layer_are_rolled_back(name: str):
    start, step = PROGRAMS[name]
    was_damaged = False
    with Healer("default", state=start(), loss_fn=evaluate) as healer:
        for batch in healer.batches([data(number) for number in range(END)]):
            state = healer.state
            if healer.step == DAMAGE and not was_damaged:
                was_damaged = True
                state = damaged(state)
            healer.update(step(state, batch, train=healer.step < FREEZE))
    assert healer.rollbacks == 1
    plain = start()
    for number in range(END):
        plain = step(plain, data(number), train=number < FREEZE)
    final, expected = (float(evaluate(each, data(END))) for each in (healer.state, plain))
    assert final == pytest.approx(expected)


@pytest.mark.slow
def test_a_healthy_run_with_batch_statistics_ends_with_the_bits_of_a_run_without_healcore():
    plain = as_dict(INNER)
    for number in range(END):
        plain = dict_step(plain, data(number), train=number < FREEZE, tx=INNER)
    calls = []

    def asked(state: Any, batch: Any) -> Any:
        calls.append(batch)
        return evaluate(state, batch)

    with Healer("default", state=as_dict(), loss_fn=asked) as healer:
        for batch in healer.batches([data(number) for number in range(END)]):
            healer.update(dict_step(healer.state, batch, train=healer.step < FREEZE))
    assert healer.rollbacks == 0
    assert len(calls) > 4
    for name in ("params", "batch_stats"):
        assert_same_bits(plain[name], healer.state[name])


# -- what belongs to a copy -----------------------------------------------------------------------


class Model(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(6, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, use_bias=False, use_scale=False, rngs=rngs)
        self.temperature = nnx.Variable(jnp.ones(()))


@pytest.mark.parametrize("kind", [nnx.Optimizer, nnx.ModelAndOptimizer])
def test_batch_stats_of_nnx_objects_belong_to_the_earlier_weights(kind: Any):
    """And other variables stay: the program sets them. Nothing is changed afterwards."""
    model = Model()
    driver = JaxDriver({"model": model, "optimizer": kind(model, TX, wrt=nnx.Param)}, "default")
    weights = driver.copy_weights()
    for part in (model.first.kernel, model.norm.var, model.norm.mean, model.temperature):
        part[...] = part[...] * 3.0 + 1.0

    def seen(batch: Any) -> Any:
        parts: Any = {"var": model.norm.var, "mean": model.norm.mean, "set": model.temperature}
        return parts[batch][...].sum()

    assert driver.losses_of(seen, ["var", "mean", "set"], weights) == [3.0, 0.0, 4.0]
    assert driver.losses_of(seen, ["var", "mean", "set"]) == [12.0, 3.0, 4.0]
    assert float(model.norm.var[...].sum()) == 12.0


def test_counts_and_moments_of_batch_statistics_do_not_belong_to_a_copy():
    """Integers count for the program, and moments belong to the optimizer."""
    tx = protect(optax.sgd(0.1, momentum=0.9), "default")
    stats = {"mean": jnp.zeros(3), "count": jnp.zeros((), jnp.int32)}
    params = {"w": jnp.ones(3)}
    state = {"params": params, "batch_stats": stats, "opt": tx.init(params)}
    assert set(JaxDriver(state, "default").copy_weights()) == {
        "['params']['w']",
        "['batch_stats']['mean']",
    }
