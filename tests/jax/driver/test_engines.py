"""Healing states in a live state: found, saved, put back; and stale states, which are refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore.core.engine import Engine, StateError
from healcore.jax import (
    HealStateError,
    heal,
    heal_zclip,
    protect,
    scale_by_heal_lr,
    with_heal_state,
    without_heal_state,
)
from healcore.jax.driver.driver import JaxDriver
from healcore.jax.driver.live_state import SideState
from healcore.runtime.healer import Healer
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits, bits
from tests.jax.driver.small_runs import POLICY, RUNS, advance, batch, every_third, plain

PARAMS = {"w": jnp.ones(3), "b": jnp.zeros(2)}


@pytest.mark.parametrize("name", ["protect", "heal"])
def test_the_states_of_many_runs_at_once_are_refused_at_the_start(name):
    tx = {"protect": protect(optax.sgd(0.1), policies.SKIP), "heal": heal(policies.SKIP)}[name]
    states = jax.vmap(lambda p: {"params": p, "opt_state": tx.init(p)})({"w": jnp.ones((4, 3))})
    with pytest.raises(HealStateError, match="4 runs"):
        Healer(policies.SKIP, state=states).__enter__()


def test_a_healing_state_of_another_kind_touches_nothing():
    tx = protect(optax.sgd(0.1), policies.ADAGC)
    driver = JaxDriver({"params": PARAMS, "opt_state": tx.init(PARAMS)}, policies.ADAGC)
    before = bits(driver.live)
    other = tx.init({"w": jnp.ones(3)})
    smaller = JaxDriver((other,), policies.ADAGC).engines()["0"]
    with pytest.raises(StateError, match="other tensors"):
        driver.load(None, {"opt_state": smaller})
    with pytest.raises(StateError, match="'optimizer'"):
        driver.load(None, {"optimizer": smaller})
    foreign = Engine(POLICY)
    with pytest.raises(StateError, match="clip"):
        driver.load(None, {"opt_state": foreign.to_dict(foreign.init())})
    assert bits(driver.live) == before


@pytest.mark.parametrize("kind", RUNS)
def test_an_announcement_does_not_hide_the_step_before_it(kind):
    run = RUNS[kind]()
    driver = JaxDriver(run.state, POLICY)
    advance(driver, run, [batch(2)])  # from weak types, which is compiled apart
    driver.update(run.step(driver.live, batch(0)))
    driver.expect_change()
    (name,) = driver.engines()
    assert driver.engines()[name]["state"]["change_expected"] is True
    assert driver.steps() is not None
    compiled = run.compiled()
    advance(driver, run, [batch(1)])
    assert driver.engines()[name]["state"]["change_expected"] is False
    assert run.compiled() == compiled


def test_engines_of_one_optimizer_have_their_places_as_names():
    tx = optax.multi_transform(
        {"x": protect(optax.sgd(1.0), POLICY), "y": protect(optax.sgd(1.0), POLICY)},
        {"w": "x", "b": "y"},
    )
    driver = JaxDriver({"params": PARAMS, "opt_state": tx.init(PARAMS)}, POLICY)
    names = list(driver.engines())
    assert len(names) == 2
    assert all(name.startswith("['opt_state'].inner_states['") for name in names)


def accumulating(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.MultiSteps(protect(inner, POLICY), 2).gradient_transformation()


@pytest.mark.parametrize(
    ("tx", "parts"),
    [
        (protect(optax.adam(0.1), POLICY), ["'params'"]),
        # A NaN stays in the accumulator: a rollback empties it.
        (accumulating(optax.adam(0.1)), ["'params'", "acc_grads"]),
        # The state does not show which parameters the optimizer trains: all arrays count.
        (optax.masked(protect(optax.adam(0.1), POLICY), {"w": True, "b": False}), ["'"]),
    ],
    ids=["alone", "accumulated", "masked"],
)
def test_the_parameters_have_to_be_finite_and_nothing_else(tx, parts):
    state = {"params": PARAMS, "opt_state": tx.init(PARAMS), "metric": jnp.float32(0)}
    driver = JaxDriver(state, POLICY)
    assert driver.finite()
    for path, leaf in jax.tree_util.tree_leaves_with_path(without_heal_state(state)):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            bad = jnp.full_like(leaf, jnp.nan)
            spoiled = jax.tree.map(
                lambda each, leaf=leaf, bad=bad: bad if each is leaf else each, state
            )
            driver.update(spoiled)
            name = jax.tree_util.keystr(path)
            assert driver.finite() is not any(part in name for part in parts), name


def test_batch_statistics_of_nnx_are_no_parameters():
    run = RUNS["nnx"]()
    driver = JaxDriver(run.state, POLICY)
    model = run.state["model"]
    model.norm.mean[...] = model.norm.mean[...] * jnp.nan + jnp.nan
    assert driver.finite()
    model.first.bias[...] = model.first.bias[...] + jnp.nan
    assert not driver.finite()


@pytest.mark.parametrize(
    ("healed", "plain_one"),
    [
        (protect(optax.adamw(0.1), POLICY), optax.adamw(0.1)),
        (
            optax.chain(heal_zclip(), optax.adamw(0.1)),
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
        ),
        (
            optax.chain(heal(POLICY), optax.sgd(0.1, momentum=0.9), scale_by_heal_lr()),
            optax.chain(optax.identity(), optax.sgd(0.1, momentum=0.9), optax.identity()),
        ),
        (optax.MultiSteps(protect(optax.adam(0.1)), 2), optax.MultiSteps(optax.adam(0.1), 2)),
    ],
)
def test_without_its_healing_part_a_state_is_that_of_plain_optax(healed, plain_one):
    before = plain_one.init(PARAMS)
    like = healed.init(PARAMS)
    assert_same_bits(without_heal_state(like), before)
    old = jax.tree.map(lambda leaf: leaf + 1, before)
    state = with_heal_state(old, like)
    assert jax.tree.structure(state) == jax.tree.structure(like)
    assert_same_bits(without_heal_state(state), old)
    healed.update(PARAMS, state, PARAMS)
    with pytest.raises(HealStateError, match="without_heal_state"):
        with_heal_state(optax.sgd(0.1).init({"q": PARAMS}), like)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_checkpoint_of_a_run_without_healing_restores(where, tmp_path):
    run = plain(epoch=4)
    driver = JaxDriver(run.state, POLICY)
    store = driver.store(tmp_path if where == "disk" else None)
    advance(driver, run, [batch(0)])
    tx = optax.adamw(1e-2)
    params = jax.tree.map(lambda leaf: leaf + 1, driver.live["params"])
    store.save(9, {"params": params, "opt_state": tx.init(params), "epoch": np.int32(7)})
    store.wait()
    restored = store.restore(9, driver.state())
    assert restored.healing is None
    healing = driver.engines()
    driver.load(restored.state)
    assert_same_bits(driver.live["params"], params)
    assert driver.live["epoch"] == 7
    assert int(optax.tree.get(driver.live, "count")) == 0
    assert driver.engines() == healing
    advance(driver, run, [batch(1)])


# -- a loop that continues with a state of its own after an edit ----------------------------------

LINE = r"healer\.update\(step\(healer\.state, batch\)\)"


def went_back(run: Any, *, to: int = 2, steps: int = 5) -> tuple[JaxDriver, Any]:
    """The driver after a rollback, and a copy of the state that it came from."""
    driver = JaxDriver(run.state, POLICY)
    store = driver.store(None)
    advance(driver, run, [batch(i) for i in range(to)])
    store.save(to, driver.state(), healing=driver.engines())
    advance(driver, run, [batch(i) for i in range(to, steps)])
    mine = jax.tree.map(jnp.copy, driver.live)
    restored = store.restore(to, driver.state())
    driver.load(restored.state, restored.healing or {})
    return driver, mine


@pytest.mark.parametrize("kind", ["plain", "linen"])
@pytest.mark.parametrize("to", [0, 2, 4])
def test_the_state_of_before_is_refused_in_the_next_step(kind, to):
    run = RUNS[kind]()
    driver, mine = went_back(run, to=to)
    right = driver.live
    with pytest.raises(HealStateError, match=LINE):
        driver.update(run.step(mine, batch(9)))
    assert driver.live is right
    assert driver.steps() is None
    # The loop may mend that.
    (handle,) = advance(driver, run, [batch(9)])
    assert handle.steps()[-1][0].step == to + 1


def test_accumulated_too():
    run = plain(wrap=every_third)
    driver, mine = went_back(run, to=3, steps=10)
    with pytest.raises(HealStateError, match=LINE):
        driver.update(run.step(mine, batch(9)))
    records = [
        handle.steps()[-1][0] for handle in advance(driver, run, [batch(i) for i in range(4)])
    ]
    assert [each.step for each in records] == [1, 1, 2, 2]


@pytest.mark.parametrize("fresh", [True, False])
def test_a_resumed_run_does_not_start_over(fresh):
    first = plain()
    driver = JaxDriver(first.state, POLICY)
    advance(driver, first, [batch(i) for i in range(3)])
    items, healing = driver.state(), driver.engines()
    items = {
        name: jax.tree.map(jnp.copy, each)
        for name, each in items.items()
        if not isinstance(each, SideState)
    }
    run = plain()
    other = JaxDriver(run.state, POLICY)
    mine = jax.tree.map(jnp.copy, other.live)
    other.load(items, healing)
    new = run.step(mine if fresh else other.live, batch(3))
    if fresh:
        with pytest.raises(HealStateError, match=LINE):
            other.update(new)
    else:
        other.update(new)
        handle = other.steps()
        assert handle is not None
        assert handle.steps()[-1][0].step == 4


def overflows(inner: Any, policy: Any) -> Any:
    tx = protect(inner, policy)

    def update(grads: Any, state: Any, params: Any, *, value: Any) -> Any:
        return tx.update(grads, state, params, value=value, externally_skipped=~jnp.isfinite(value))

    return optax.GradientTransformationExtraArgs(tx.init, update)  # type: ignore[arg-type]


def test_a_step_that_the_loop_has_skipped_is_no_fresh_state():
    """As an overflow with loss scaling, from the first step on: the engine does not count it."""
    run = plain(wrap=overflows)
    driver = JaxDriver(run.state, POLICY)
    handles = advance(driver, run, [batch(i, bad=i in (0, 1, 3)) for i in range(5)])
    assert [handle.steps()[-1][0].step for handle in handles] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("every_step", [True, False])
def test_a_fresh_optimizer_state_in_the_loop_is_noticed(every_step):
    """A call of `tx.init` within the loop; one that keeps the healing state is allowed."""
    run = plain()
    driver = JaxDriver(run.state, POLICY)

    def restarted() -> Any:
        return {**driver.live, "opt_state": jax.tree.map(jnp.copy, run.state["opt_state"])}

    run = run._replace(state=jax.tree.map(jnp.copy, run.state))
    handles = advance(driver, run, [batch(i) for i in range(3)])
    kept = with_heal_state(without_heal_state(restarted()), like=driver.live)
    driver.update(run.step(kept, batch(3)))
    handles.append(driver.steps())
    assert [handle.steps()[-1][0].step for handle in handles] == [1, 2, 3, 4]
    driver.update(run.step(restarted(), batch(4)))
    handle = driver.steps()
    if every_step:
        driver.update(run.step(restarted(), batch(5)))
        handle = driver.steps()
    assert handle is not None
    with pytest.raises(HealStateError, match="opt_state"):
        handle.steps()
