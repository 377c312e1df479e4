"""Loops in JAX that keep the state in a variable, or pass another state to `update`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from healcore.errors import StateMismatch
from healcore.jax import HealStateError
from healcore.jax.driver import JaxDriver
from healcore.jax.store import OrbaxStore
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
    assert (healer.rollbacks, healer.step) == (1, 39)
    other, expected = healed(from_the_healer, tmp_path / "b")
    assert (other.rollbacks, other.step) == (1, 39)
    assert all(np.array_equal(*pair) for pair in zip(weights, expected, strict=True))


def test_a_stale_state_is_refused_in_the_next_update(tmp_path):
    line = r"state = healer\.update\(step\(healer\.state, batch\)\)"
    with pytest.raises(HealStateError, match=line):
        healed(from_a_variable, tmp_path)
    assert len(events(tmp_path, "rollback")) == 1
    (end,) = events(tmp_path, "end")
    assert end["ending"] == "exception"


def test_without_an_edit_any_variable_will_do(tmp_path):
    healer, _ = healed(from_a_variable, tmp_path, data=range(BAD))
    assert healer.step == BAD


def test_an_announced_change_is_an_edit_too(tmp_path):
    def loop(healer: Any, run: Any, numbers: Any) -> None:
        state = healer.state
        for number in numbers:
            state = healer.update(step(run, state, number))
            if number == 3:
                healer.expect_change()
                state = healer.state
            if number == 5:
                healer.expect_change()

    with pytest.raises(HealStateError, match="expect_change"):
        healed(loop, tmp_path, data=range(10))


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


def test_after_step_tells_of_a_rollback_within_update(tmp_path):
    told = []

    def loop(healer: Any, run: Any, numbers: Any) -> None:
        for number in numbers:
            healer.update(step(run, healer.state, number))
            told.append(healer.after_step())

    healer, _ = healed(loop, tmp_path)
    assert told.count(True) == healer.rollbacks == 1


def test_a_restored_state_of_the_users_own_is_taken(tmp_path):
    """A state with an earlier edit number, at the start or between two steps, is no stale one."""
    kept = []

    def loop(healer: Any, run: Any, numbers: Any) -> None:
        for number in healer.batches(list(numbers)):
            if number == 30:
                healer.update(step(run, jax.tree.map(jnp.copy, kept[0]), number))
                continue
            state = healer.update(step(run, healer.state, number))
            if number == 10:
                kept.append(jax.tree.map(jnp.copy, state))

    healer, _ = healed(loop, tmp_path / "a")
    assert healer.rollbacks == 1
    run = plain(policy=RULES)
    mine = jax.tree.map(jnp.copy, healer.state)
    with Healer(RULES, state=mine, store=tmp_path / "b") as other:
        for number in other.batches([50, 51]):
            mine = other.update(run.step(mine, batch(number)))
        assert other.step == 2


def test_two_updates_for_one_batch(tmp_path):
    """Both steps are of that batch, which a rollback for the second one leaves out."""

    def loop(healer: Any, run: Any, numbers: Any) -> None:
        state = healer.state
        for number in healer.batches(list(numbers)):
            state = healer.update(run.step(state, batch(number)))
            state = healer.update(step(run, state, number))

    healer, _ = healed(loop, tmp_path)
    assert healer.skipped_batch_ids == {(0, BAD)}
    assert healer.rollbacks == 1


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
    "tuple": r"element 0 is the state: write `state, loss = step\(",
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


def train_numpy(convert: Any) -> Any:
    run = plain(policy=RULES)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), run.state["params"])
    state = convert({**run.state, "params": params, "count": np.int64(0)})
    with Healer(RULES, state=state) as healer:
        for number in healer.batches(range(3)):
            healer.update(step(run, healer.state, number))
    return healer


def test_numpy_arrays_in_the_first_state_are_named_and_what_to_write():
    """A compiled step returns float32 for float64, and int32 for int64: no cast helps."""
    with pytest.raises(HealStateError, match=r"jax\.tree\.map\(jnp\.asarray, state\)` before"):
        train_numpy(lambda state: state)
    assert train_numpy(lambda state: jax.tree.map(jnp.asarray, state)).step == 3


def test_a_number_may_become_an_array():
    """As the `step` of a TrainState does in a compiled step."""
    run = plain(policy=RULES)
    with Healer(RULES, state={**run.state, "count": 0}) as healer:
        for number in healer.batches(range(3)):
            state = step(run, {**healer.state, "count": jnp.asarray(number)}, number)
            healer.update(state)


def test_a_restart_never_falls_back_to_an_older_checkpoint_that_fits(tmp_path):
    """Arrays in place of those of the checkpoint, as older releases let `update` take them."""
    run = plain(policy=RULES)
    shapes = {"hidden": (4, 3), "wider": (4, 5)}

    def state_with(extra: str) -> Any:
        return {**plain(policy=RULES).state, "extra": jnp.zeros(shapes[extra])}

    def train(state: Any, steps: int) -> int:
        options = {"store": tmp_path, "save_every": 5, "resume": True}
        with Healer(RULES, state=state, **grouped(options)) as healer:
            start = healer.step
            for number in healer.batches(range(100), epochs=None):
                if healer.step >= steps:
                    break
                healer.update(step(run, healer.state, number + 1000))
        return start

    assert train(state_with("hidden"), 10) == 0
    with pytest.raises(StateMismatch, match=rf"step 10 in {tmp_path} does not fit.*extra"):
        train(state_with("wider"), 20)
    other = OrbaxStore(tmp_path)
    driver = JaxDriver(jax.tree.map(jnp.copy, state_with("wider")), RULES)
    newest = max(each.step for each in other.steps())
    healing = other.restore(newest, JaxDriver(state_with("hidden"), RULES).items()).healing
    other.save(newest + 5, driver.items(), healing=healing)
    other.wait()
    with pytest.raises(StateMismatch, match=f"step {newest + 5} in {tmp_path} does not fit"):
        train(state_with("hidden"), 20)
    assert {each.step for each in OrbaxStore(tmp_path).steps()} >= {newest, newest + 5}
