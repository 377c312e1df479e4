"""Loops in JAX that keep the state in a variable, pass another state to `update`, or use Rngs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from healcore.jax import HealStateError, protect
from healcore.runtime.healer import Healer
from tests.healer.run_directory import events
from tests.healer.run_options import grouped
from tests.healer.training_loops import rules
from tests.jax.driver.small_runs import batch, plain

RULES = rules()
BAD = 23


def healed(loop: Any, tmp_path: Any, policy: Any = RULES, data: Any = range(40), **options: Any):
    """A run with one bad batch under `loop(healer, run, numbers)`, and its final weights."""
    run = plain(policy=policy)
    options = {"store": tmp_path, "save_every": 5, **options}
    with Healer(policy, state=run.state, **grouped(options)) as healer:
        loop(healer, run, data)
    weights = [np.asarray(leaf) for leaf in jax.tree.leaves(healer.state["params"])]
    return healer, weights


def step(run: Any, state: Any, number: int) -> Any:
    return run.step(state, batch(number, bad=number == BAD))


def from_the_healer(healer: Any, run: Any, numbers: Any) -> None:
    for number in healer.batches(list(numbers)):
        healer.update(step(run, healer.state, number))


def from_what_update_returns(healer: Any, run: Any, numbers: Any) -> None:
    state = healer.state
    for number in healer.batches(list(numbers)):
        state = healer.update(step(run, state, number))


def from_a_variable(healer: Any, run: Any, numbers: Any) -> None:
    state = healer.state
    for number in healer.batches(list(numbers)):
        state = step(run, state, number)
        healer.update(state)


@pytest.mark.parametrize("bad", [BAD, 39])
def test_a_loop_continues_with_what_update_returns(bad, tmp_path, monkeypatch):
    """Also if the last batch is the bad one: its rollback comes before the data end."""
    monkeypatch.setitem(globals(), "BAD", bad)
    healer, weights = healed(from_what_update_returns, tmp_path / "a")
    other, expected = healed(from_the_healer, tmp_path / "b")
    for each in (healer, other):
        assert (each.rollbacks, each.step) == (1, 39)
    assert all(np.array_equal(*pair) for pair in zip(weights, expected, strict=True))


def test_a_stale_state_is_refused_in_the_next_update(tmp_path):
    line = r"state = healer\.update\(step\(healer\.state, batch\)\)"
    with pytest.raises(HealStateError, match=line):
        healed(from_a_variable, tmp_path)
    assert len(events(tmp_path, "rollback")) == 1
    (end,) = events(tmp_path, "end")
    assert end["ending"] == "exception"


def test_a_loop_without_batches_is_healed(tmp_path):
    """`update` does all that `batches` and `after_step` do between two steps."""

    def loop(healer: Any, run: Any, numbers: Any) -> None:
        state = healer.state
        for number in numbers:
            state = healer.update(step(run, state, number))

    healer, weights = healed(loop, tmp_path)
    assert healer.rollbacks == 1
    assert healer.step < 40, "the steps of the rollback are not repeated"
    assert len(events(tmp_path, "save")) > 5
    assert all(np.isfinite(each).all() for each in weights)


def changed(state: Any, how: str) -> Any:
    params = state["params"]
    if how == "dtype":
        params = {**params, "hidden": params["hidden"] > 0}
    if how == "shape":
        params = {**params, "hidden": jnp.zeros((4, 5))}
    if how == "missing":
        params = {"hidden": params["hidden"]}
    if how == "more":
        params = {**params, "ema": jnp.zeros(3)}
    return (state, 0.5) if how == "tuple" else {**state, "params": params}


FOUND = {
    "dtype": r"state\['params'\]\['hidden'\] is bool\(4, 3\), and was float32\(4, 3\)",
    "shape": r"state\['params'\]\['hidden'\] is float32\(4, 5\), and was float32\(4, 3\)",
    "missing": r"state\['params'\]\['out'\]\['w'\] is missing, and was float32\(3, 1\)",
    "more": r"state\['params'\]\['ema'\] is float32\(3,\), and was not present",
    "tuple": "and nothing else",
    "none": r"update takes the state that the step returns, got None: does the step `return`",
}


def test_another_state_is_refused_before_it_is_taken(tmp_path):
    def loop(healer: Any, run: Any, numbers: Any) -> None:
        for how, number in zip(FOUND, healer.batches(list(numbers)), strict=True):
            new = step(run, healer.state, number)
            with pytest.raises(HealStateError, match=FOUND[how]):
                healer.update(None if how == "none" else changed(new, how))
            healer.update(new)

    healer, _ = healed(loop, tmp_path, data=range(len(FOUND)))
    assert healer.step == len(FOUND)


def nnx_run(rngs: Any, store: Any, steps: int) -> float:
    """A run with noise from `rngs`, which ends with an exception after `steps` steps."""
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, protect(optax.sgd(0.1)), wrt=nnx.Param)
    state = {"model": model, "optimizer": optimizer, "rngs": rngs}
    with Healer("default", state=state, store=store) as healer:
        for x in healer.batches([jnp.full((4, 2), 0.1 * i) for i in range(6)]):
            if healer.step == steps:
                raise KeyboardInterrupt
            x = x + jax.random.normal(rngs(), x.shape)
            grads = nnx.grad(lambda model, x=x: (model(x) ** 2).mean())(model)
            optimizer.update(model, grads, value=jnp.float32(1.0))
    return float(model.kernel[...].sum())


@pytest.mark.parametrize("make", [lambda: nnx.Rngs(7), lambda: nnx.Rngs(7)["default"]])
def test_generators_of_nnx_resume_exactly(make, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        nnx_run(make(), tmp_path / "killed", 3)
    expected = nnx_run(make(), tmp_path / "whole", -1)
    assert nnx_run(make(), tmp_path / "killed", -1) == expected
