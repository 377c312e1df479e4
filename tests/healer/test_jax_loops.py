# flax and optax type every tree as the union of all trees.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
"""Whole runs in JAX that are easy to get wrong: accumulation, a custom state, BatchNorm."""

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
from healcore.jax import protect
from tests.healer.run_directory import events
from tests.healer.run_options import grouped
from tests.healer.training_loops import SKIPS, rules
from tests.jax.driver.small_runs import batch, in_place, linen, mse, plain

RULES = rules()
EVERY = 4


def accumulated(inner: Any, policy: Any) -> Any:
    """`protect` inside: an update is judged, not each micro-batch."""
    steps = optax.MultiSteps(protect(inner, policy), every_k_schedule=EVERY)
    return optax.GradientTransformationExtraArgs(steps.init, steps.update)


def train(run: Any, policy: Any, numbers: Any, bad: Any = lambda _: False, **options: Any) -> Any:
    """A healed run; which batches are bad is asked at each step."""
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
