"""Whole runs in JAX that are easy to get wrong: a state in a variable, accumulation."""

import os
import re
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from healcore import Healer
from healcore.errors import Terminated
from healcore.jax import HealStateError, protect
from tests.healer.run_directory import events
from tests.healer.training_loops import EVERY_5, rules
from tests.jax.driver.small_runs import batch, plain

RULES = rules()


def healed(loop: Any, folder: Any, numbers: Any = range(40)) -> Any:
    """The Healer of a run under `loop(healer, run, numbers)`."""
    run = plain(policy=RULES)
    with Healer(RULES, state=run.state, store=folder, checkpoints=EVERY_5) as healer:
        loop(healer, run, numbers)
    return healer


@jax.transfer_guard("allow")
def step(run: Any, state: Any, number: int, bad: int = 23) -> Any:
    return run.step(state, batch(number, bad=number == bad))


def weights(healer: Any) -> list[Any]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(healer.state["params"])]


@pytest.mark.slow
@pytest.mark.parametrize("bad", [23, 39])
def test_a_loop_continues_with_what_update_returns(bad, tmp_path):
    """Also if the last batch is the bad one: its rollback comes before the data end."""

    @jax.transfer_guard("disallow")
    def loop(healer: Any, run: Any, numbers: Any) -> None:
        state = healer.state
        for number in healer.batches(numbers):
            state = healer.update(step(run, state, number, bad))
            assert state is healer.state

    healer = healed(loop, tmp_path)
    assert (healer.rollbacks, healer.step) == (1, 39)
    assert all(np.isfinite(each).all() for each in weights(healer))


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


@pytest.mark.parametrize("taken", [4, 5], ids=["at the end", "one step later"])
def test_a_step_from_an_older_state_is_not_saved(taken, tmp_path):
    """The host reads a step later: as an exception of the loop, or after the loop has ended."""

    def loop(healer: Any, run: Any, numbers: Any) -> None:
        older = None
        for number in numbers:
            before = healer.state
            if number == 3:
                before = older
            older = jax.tree.map(jnp.copy, before)
            healer.update(step(run, before, number))

    with pytest.raises(HealStateError, match=r"does not continue.*from healer\.state"):
        healed(loop, tmp_path, range(taken))
    assert [each["step"] for each in events(tmp_path, "save")] == [0]
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


def test_another_state_is_refused_before_it_is_taken(tmp_path):
    def loop(healer: Any, run: Any, numbers: Any) -> None:
        for number in healer.batches(numbers):
            new = step(run, healer.state, number)
            hidden = new["params"]["hidden"]
            other_type = {**new["params"], "hidden": hidden[:, :2] > 0}
            other_names = {"hidden": hidden, "ema": jnp.zeros(3)}
            for wrong, message in (
                ({**new, "params": other_type}, "hidden'] is bool(4, 2), expected float32(4, 3)"),
                ({**new, "params": other_names}, "ema'] is float32(3,), expected no leaf"),
                ((new, 0.5), "and nothing else"),
                (None, ".heal_engine is missing, expected int32"),
            ):
                with pytest.raises(HealStateError, match=re.escape(message)):
                    healer.update(wrong)
            healer.update(new)

    assert healed(loop, tmp_path, range(2)).step == 2


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


def test_a_request_to_end_does_not_save_a_step_from_an_older_state(tmp_path):
    def loop(healer: Any, run: Any, numbers: Any) -> None:
        older = jax.tree.map(jnp.copy, healer.state)
        healer.update(step(run, healer.state, 0))
        os.kill(os.getpid(), signal.SIGTERM)
        healer.update(step(run, older, 1))

    with pytest.raises(Terminated):
        healed(loop, tmp_path)
    assert [each["step"] for each in events(tmp_path, "save")] == [0]
    problem, *_ = events(tmp_path, "problem")
    assert "does not continue the state of the step before" in problem["problem"]


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: nnx.Rngs(7), lambda: nnx.Rngs(7)["default"]])
def test_generators_of_nnx_resume_exactly(make, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        nnx_run(make(), tmp_path / "killed", 3)
    expected = nnx_run(make(), tmp_path / "whole", -1)
    assert nnx_run(make(), tmp_path / "killed", -1) == expected


def accumulated(inner: Any, policy: Any) -> Any:
    """`protect` inside: an update is judged, not each micro-batch."""
    return optax.MultiSteps(protect(inner, policy), every_k_schedule=4).gradient_transformation()


@pytest.mark.slow
@pytest.mark.parametrize("bad", [[9], [9, 10, 11]], ids=["one", "three in a row"])
def test_each_batch_whose_nan_stays_in_the_accumulator_is_left_out(bad, tmp_path):
    run = plain(policy="default", wrap=accumulated)
    with Healer(state=run.state, store=tmp_path) as healer:
        for number, state in healer.batches(range(100)).with_state():
            healer.update(run.step(state, batch(number, bad=number in bad)))
    # The first one is at the tenth skipped update in a row. Its repeat finds the batches.
    first, *others = events(tmp_path, "rollback")
    assert first["onset"] == 11
    assert "batches" not in first or not first["batches"]
    assert [each["batches"] for each in others] == [[[0, number]] for number in bad]
    assert {each["incident"] for each in events(tmp_path, "alarm")} == {1}
