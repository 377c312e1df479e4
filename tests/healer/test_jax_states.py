# flax and optax type every tree as the union of all trees.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
"""Whole runs in JAX that are easy to get wrong: a state in a variable, accumulation, BatchNorm."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from healcore import Healer
from healcore.jax import HealStateError, protect
from tests.healer.run_directory import events
from tests.healer.run_options import grouped
from tests.healer.training_loops import EVERY_5, SKIPS, rules
from tests.jax.driver.small_runs import batch, in_place, linen, mse, plain

RULES = rules()


def healed(loop: Any, folder: Any, numbers: Any = range(40)) -> Any:
    """The Healer of a run under `loop(healer, run, numbers)`."""
    run = plain(policy=RULES)
    with Healer(RULES, state=run.state, store=folder, checkpoints=EVERY_5) as healer:
        loop(healer, run, numbers)
    return healer


def step(run: Any, state: Any, number: int, bad: int = 23) -> Any:
    return run.step(state, batch(number, bad=number == bad))


def weights(healer: Any) -> list[Any]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(healer.state["params"])]


@pytest.mark.parametrize("bad", [23, 39])
def test_a_loop_continues_with_what_update_returns(bad, tmp_path):
    """Also if the last batch is the bad one: its rollback comes before the data end."""

    def returned(healer: Any, run: Any, numbers: Any) -> None:
        state = healer.state
        for number in healer.batches(numbers):
            state = healer.update(step(run, state, number, bad))

    def asked_for(healer: Any, run: Any, numbers: Any) -> None:
        for number in healer.batches(numbers):
            healer.update(step(run, healer.state, number, bad))

    both = healed(returned, tmp_path / "a"), healed(asked_for, tmp_path / "b")
    assert [(each.rollbacks, each.step) for each in both] == [(1, 39)] * 2
    assert all(np.array_equal(*pair) for pair in zip(*map(weights, both), strict=True))


def test_a_stale_state_is_refused_in_the_next_update(tmp_path):
    def loop(healer: Any, run: Any, numbers: Any) -> None:
        state = healer.state
        for number in healer.batches(numbers):
            state = step(run, state, number)
            healer.update(state)

    with pytest.raises(HealStateError, match=r"state = healer\.update\(step\(healer\.state, batch"):
        healed(loop, tmp_path)
    assert len(events(tmp_path, "rollback")) == 1
    assert [each["ending"] for each in events(tmp_path, "end")] == ["exception"]


def test_a_loop_without_batches_is_healed(tmp_path):
    """`update` does all that `batches` and `after_step` do between two steps."""

    def loop(healer: Any, run: Any, numbers: Any) -> None:
        state = healer.state
        for number in numbers:
            state = healer.update(step(run, state, number))

    healer = healed(loop, tmp_path)
    assert healer.rollbacks == 1
    assert healer.step < 40, "the steps of the rollback are not repeated"
    assert len(events(tmp_path, "save")) > 5
    assert all(np.isfinite(each).all() for each in weights(healer))


def changed(state: Any, how: str) -> Any:
    params = state["params"]
    if how == "dtype and shape":
        params = {**params, "hidden": params["hidden"][:, :2] > 0}
    if how == "missing and more":
        params = {"hidden": params["hidden"], "ema": jnp.zeros(3)}
    return (state, 0.5) if how == "tuple" else {**state, "params": params}


FOUND = {
    "dtype and shape": r"state\['params'\]\['hidden'\] is bool\(4, 2\), and was float32\(4, 3\)",
    "missing and more": r"state\['params'\]\['ema'\] is float32\(3,\), and was not present",
    "tuple": "and nothing else",
    "none": r"update takes the state that the step returns, got None: does the step `return`",
}


def test_another_state_is_refused_before_it_is_taken(tmp_path):
    def loop(healer: Any, run: Any, numbers: Any) -> None:
        for how, number in zip(FOUND, healer.batches(numbers), strict=True):
            new = step(run, healer.state, number)
            with pytest.raises(HealStateError, match=FOUND[how]):
                healer.update(None if how == "none" else changed(new, how))
            healer.update(new)

    assert healed(loop, tmp_path, range(len(FOUND))).step == len(FOUND)


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


# -- accumulation and batch statistics ------------------------------------------------------------

EVERY = 4


def accumulated(inner: Any, policy: Any) -> Any:
    """`protect` inside: an update is judged, not each micro-batch."""
    steps = optax.MultiSteps(protect(inner, policy), every_k_schedule=EVERY)
    return optax.GradientTransformationExtraArgs(steps.init, steps.update)


def train(run: Any, policy: Any, numbers: Any, bad: Any = lambda _: False, **options: Any) -> Any:
    with Healer(policy, state=run.state, **grouped(options)) as healer:
        for number in healer.batches(list(numbers)):
            healer.update(run.step(healer.state, batch(number, bad=bad(number))))
    return healer


def loss_of(state: Any) -> float:
    """Evaluates with the running statistics."""
    inputs = batch(1000)
    if isinstance(state, dict):
        model = nnx.clone(state["model"])
        model.eval()
        return float(mse(model(inputs), inputs))
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    return float(mse(state.apply_fn(variables, inputs, train=False), inputs))


def test_one_bad_micro_batch_costs_one_rollback(tmp_path):
    asked: Counter[int] = Counter()

    def bad(number: int) -> bool:
        asked[number] += 1
        return number == 29 and asked[number] == 1

    run = plain(policy=RULES, wrap=accumulated)
    healer = train(run, RULES, range(60), bad, store=tmp_path, save_every=5)
    (rollback,) = events(tmp_path, "rollback")
    assert rollback["onset"] == 31
    assert rollback["checkpoint"] % EVERY == 0
    (alarm,) = events(tmp_path, "alarm")  # and not at each of the micro-steps
    assert alarm["step"] == 31
    (order,) = events(tmp_path, "order")
    assert order["action"] == ["ROLLBACK", "CUT_LR"]
    assert healer.rollbacks == 1
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(healer.state["params"]))


def test_a_nan_that_stays_in_the_accumulator_is_left_out_with_its_whole_accumulation(tmp_path):
    run = plain(policy="default", wrap=accumulated)
    train(run, "default", range(100), lambda number: number == 9, store=tmp_path)
    (rollback,) = events(tmp_path, "rollback")  # at the tenth skipped update in a row
    assert rollback["onset"] == 11
    assert rollback["batches"] == [[0, number] for number in range(8, 48)]
    assert {each["incident"] for each in events(tmp_path, "alarm")} == {1}


@pytest.mark.parametrize("kind", [linen, in_place])
def test_batch_statistics_of_a_skipped_batch_are_taken_back(kind, tmp_path):
    """As in docs/jax.md: `HealTrainState`, or `update(..., before=snapshot(model))`."""
    run = kind(SKIPS)
    losses = [loss_of(run.state)]
    options = {"store": tmp_path, "save_every": 20}
    healer = train(run, SKIPS, range(120), lambda number: number == 60, **options)
    assert healer.rollbacks == 0
    (alarm,) = events(tmp_path, "alarm")
    assert (alarm["step"], alarm["skip"]) == (60, True)
    leaves = jax.tree.leaves(healer._loop.driver.state()["state" if kind is linen else "model"])
    assert all(np.isfinite(leaf).all() for leaf in leaves if jnp.issubdtype(leaf.dtype, float))
    assert all(each.finite for each in healer._loop.saver.store.steps())
    losses.append(loss_of(healer.state))
    assert losses[1] < 0.5 * losses[0]
