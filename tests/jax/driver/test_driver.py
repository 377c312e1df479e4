"""A loop that continues with a state of its own after an edit gets an error, no other loop does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from healcore.jax import HealStateError, protect, with_heal_state, without_heal_state
from healcore.jax.driver.driver import JaxDriver
from healcore.jax.driver.live_state import SideState
from tests.jax.driver.small_runs import POLICY, RUNS, advance, batch, every_third, plain

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
