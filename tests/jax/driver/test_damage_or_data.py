"""Before the Healer goes back: is the model worse, or are the data different? In JAX."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore import Healer
from healcore.jax import metrics, protect
from healcore.jax.driver import engines as in_state
from healcore.jax.state import HealState, engine_state, map_nodes, with_engine_state
from healcore.policy import load
from healcore.runtime.events import read


def data(number: int, relabelled: bool, bad: bool = False, shuffled: bool = False) -> Any:
    random = np.random.default_rng(number)
    x = random.standard_normal((64, 6)).astype(np.float32)
    y = (x[:, 0] > 0) * 2 + (x[:, 1] > 0)
    if shuffled:
        y = random.permutation(y)
    if bad:
        x[0] = np.nan
    return x, (y + 1) % 4 if relabelled else y


def loss_of(params: Any, batch: Any) -> Any:
    x, y = batch
    logits = jnp.tanh(x @ params["a"]) @ params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@functools.cache  # compiling takes seconds
def program(rate: float) -> tuple[Any, Any]:
    tx = protect(optax.adam(rate), "default")

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        params, opt, *rest = state
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt = tx.update(grads, opt, params, value=loss)
        return optax.apply_updates(params, updates), opt, *rest

    return tx, step


def run(
    folder: Any,
    *,
    change: int = 10**9,
    damage: int = -1,
    mask: bool = False,
    bad: range = range(0),
    shuffled: range = range(0),
    rate: float = 1e-2,
    asks: bool = True,
) -> tuple[Healer, list[Any]]:
    keys = jax.random.split(jax.random.key(0))
    params = {
        "a": jax.random.normal(keys[0], (6, 32)) / 2.5,
        "b": jax.random.normal(keys[1], (32, 4)) / 6,
    }
    tx, step = program(rate)
    batches = [
        data(number, number >= change, number in bad, number in shuffled) for number in range(400)
    ]
    done = False
    with Healer(
        "default",
        state=(params, tx.init(params), *([jnp.full((3,), -jnp.inf)] if mask else [])),
        events=folder / "e.jsonl",
        loss_fn=(lambda state, batch: loss_of(state[0], batch)) if asks else None,
    ) as healer:
        for batch in healer.batches(batches):
            state = healer.state
            if healer.step == damage and not done:
                done = True
                state = ({**state[0], "b": -4.0 * state[0]["b"]}, *state[1:])
            healer.update(step(state, batch))
    return healer, read(folder / "e.jsonl").events


def test_other_data_are_left_alone(tmp_path):
    healer, events = run(tmp_path, change=250)
    assert {e["verdict"] for e in events if e["kind"] == "assessment"} == {"data"}
    assert healer.rollbacks == 0
    assert not [e for e in events if e["kind"] == "lr"]


def test_a_damaged_model_goes_back(tmp_path):
    healer, events = run(tmp_path, damage=250)
    found = [e for e in events if e["kind"] == "assessment" and e["verdict"] == "damage"]
    assert [e["by"] for e in found] == ["remembered_batches"]
    assert healer.rollbacks == 1


def test_a_bad_part_of_the_data_is_left_out_when_it_has_ended(tmp_path):
    """While it lasts it looks like a new task; then the weights from before it are better."""
    healer, events = run(tmp_path, shuffled=range(250, 310), rate=0.1)
    looks = [e for e in events if e["kind"] == "assessment" and e["by"] == "earlier_weights"]
    assert [e["verdict"] for e in looks][-1] == "damage"
    assert healer.rollbacks == 1
    (back,) = [e for e in events if e["kind"] == "rollback"]
    assert {index for _, index in back["batches"]} >= {*range(251, 310)}


def test_looking_at_earlier_weights_changes_nothing(tmp_path):
    asked, events = run(tmp_path, change=250)
    assert "earlier_weights" in {e["by"] for e in events if e["kind"] == "assessment"}
    plain, _ = run(tmp_path / "plain", change=250, asks=False)
    for a, b in zip(jax.tree.leaves(asked.state), jax.tree.leaves(plain.state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_mask_that_is_meant_to_be_infinite_is_no_damage(tmp_path):
    healer, events = run(tmp_path, change=250, mask=True)
    assert {e["verdict"] for e in events if e["kind"] == "assessment"} == {"data"}
    assert healer.rollbacks == 0


@pytest.mark.parametrize("asks", [False, True])
def test_steps_that_are_not_finite_have_changed_nothing(tmp_path, asks):
    """The gradient's norms of such a step are in the state, for the diagnosis."""
    healer, events = run(tmp_path, bad=range(250, 264), asks=asks)
    assert {e["verdict"] for e in events if e["kind"] == "assessment"} == {"data"}
    assert healer.rollbacks == 0
    assert all(np.isfinite(each).all() for each in jax.tree.leaves(healer.state[0]))


def test_the_limit_on_an_injected_rate_is_absolute():
    """After a cut the multiplier is 1 where the schedule has decayed below the limit."""
    tx = protect(optax.inject_hyperparams(optax.sgd)(learning_rate=3.0), "default")
    curvature = jnp.linspace(0.1, 1.0, 8)

    @jax.jit
    def step(params: Any, state: Any, rate: Any) -> Any:
        state = optax.tree.set(state, learning_rate=rate)
        loss, grads = jax.value_and_grad(lambda w: (curvature * w**2).sum() / 2 + 1.0)(params)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    params = jnp.ones(8)
    state, scales = tx.init(params), []
    for number in range(200):
        params, state = step(params, state, jnp.float32(3.0 if number < 100 else 0.3))
        scales.append(float(metrics(state)["heal/lr_scale"]))
    assert 3.0 * scales[99] < 2.0
    assert scales[-1] == 1.0


@pytest.mark.parametrize(("cut", "scale", "left"), [(False, 0.25, 3), (True, 1.0, 4)])
def test_a_rollback_is_declined_with_its_cut_or_without(cut, scale, left):
    engine = load("default").engine()

    def cut_lr(live: HealState) -> HealState:
        state = engine.cut_lr(engine_state(engine, live), None, xp=jnp)
        return with_engine_state(engine, live, state)

    state = protect(optax.sgd(0.1), "default").init({"a": jnp.ones(3)})
    state = in_state.declined(engine, map_nodes(HealState, cut_lr, state), cut=cut)
    found: list[Any] = []
    map_nodes(HealState, lambda live: found.append(engine_state(engine, live)) or live, state)
    assert [(float(each.lr.scale), int(each.budget.lr_cuts)) for each in found] == [(scale, left)]
