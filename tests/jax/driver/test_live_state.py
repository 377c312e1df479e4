# optax and flax type every tree as the union of all trees.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false
"""Saving the live state and putting it back: bit for bit, in place, without compiling again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from healcore.core.engine import RuleConfig
from healcore.core.verdict import Action, Cause
from healcore.jax import HealStateError, protect
from healcore.jax.driver.driver import JaxDriver
from healcore.jax.driver.live_state import SIDE_STATE, live_state_of
from healcore.runtime.driver import WeightsChanged
from healcore.runtime.store.errors import StateMismatch
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits, bits
from tests.jax.driver.small_runs import POLICY, RUNS, advance, batch, every_third, plain

BATCHES = [batch(seed) for seed in range(6)]


def saved(driver: JaxDriver) -> Any:
    """The bits of everything that goes into a checkpoint."""
    items = {name: item for name, item in driver.state().items() if name != SIDE_STATE}
    return bits(items)


@pytest.mark.parametrize(("where", "at"), [("memory", 0), ("memory", 2), ("disk", 2)])
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_replays_bit_for_bit_and_is_not_compiled_again(kind, where, at, tmp_path):
    """Also from the first state: a TrainState's step begins as the number 0, and is an array then.

    A new process continues from the checkpoint as well.
    """
    run = RUNS[kind]()
    driver = JaxDriver(run.state, POLICY)
    store = driver.store(tmp_path if where == "disk" else None)
    advance(driver, run, BATCHES[:at])
    store.save(at, driver.state(), healing=driver.engines())
    store.wait()
    if where == "disk":
        store.ring.forget(at)
    begun = saved(driver)
    first = advance(driver, run, BATCHES[at:])
    after, compiled, engines = saved(driver), run.compiled(), driver.engines()

    for _ in range(2):  # what is restored is donated, too
        restored = store.restore(at, driver.state())
        driver.load(restored.state, restored.healing)
        assert saved(driver) == begun
        assert driver.steps() is None  # no step was taken
        again = advance(driver, run, BATCHES[at:])
        assert saved(driver) == after
        assert [each.steps()[-1] for each in again] == [each.steps()[-1] for each in first]
    assert run.compiled() == compiled

    fresh = RUNS[kind]()
    other = JaxDriver(fresh.state, POLICY)
    restored = store.restore(at, other.state())
    other.load(restored.state, restored.healing)
    advance(other, fresh, BATCHES[at:])
    assert saved(other) == after
    assert other.engines() == engines


def test_nnx_objects_stay_the_users_own():
    run = RUNS["nnx"]()
    model, optimizer = run.state["model"], run.state["optimizer"]
    kernel, moment = model.first.kernel, optimizer.opt_state.inner_state[0].mu["first"]["kernel"]
    driver = JaxDriver(run.state, POLICY)
    before = jax.tree.map(jnp.copy, {"a": kernel[...], "b": moment[...]})
    store = driver.store(None)
    store.save(0, driver.state())
    advance(driver, run, BATCHES)
    assert int(optimizer.step[...]) == 6
    assert int(model.dropout.rngs.count[...]) == 6
    driver.load(store.restore(0, driver.state()).state)
    assert driver.live["model"] is model
    assert model.first.kernel is kernel
    assert_same_bits(before, {"a": kernel[...], "b": moment[...]})
    assert int(optimizer.step[...]) == 0
    assert int(model.dropout.rngs.count[...]) == 0


def test_python_numbers_come_back_as_they_were():
    extra = {"epoch": 3, "mean": 0.1 + 0.2, "done": True, "far": 2**70, "best": float("inf")}
    run = plain(**extra)
    driver = JaxDriver(run.state, POLICY)
    store = driver.store(None)
    store.save(0, driver.state())
    assert store.steps()[0].finite
    driver.update({**run.state, "epoch": 9, "mean": 9.0, "done": False, "far": 9, "best": 0.0})
    driver.load(store.restore(0, driver.state()).state)
    state = driver.live
    assert {name: state[name] for name in extra} == extra
    assert [type(state[name]) for name in extra] == [int, float, bool, int, float]


def test_sharded_and_committed_arrays_stay_so():
    mesh = jax.make_mesh((1,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    run = plain(optax.adamw(1e-3))  # compiled by nobody else
    run = run._replace(state=jax.device_put(run.state, sharding))
    driver = JaxDriver(run.state, POLICY)
    store = driver.store(None)
    advance(driver, run, BATCHES[:1])
    store.save(1, driver.state(), healing=driver.engines())
    advance(driver, run, BATCHES[1:3])
    compiled, live = run.compiled(), jax.tree.leaves(driver.live)
    restored = store.restore(1, driver.state())
    driver.load(restored.state, restored.healing or {})
    driver.expect_change()
    for before, after in zip(live, jax.tree.leaves(driver.live), strict=True):
        assert before.committed
        assert after.committed
        assert after.sharding == before.sharding
    advance(driver, run, BATCHES[1:3])
    assert run.compiled() == compiled


def test_a_state_that_does_not_fit_changes_nothing():
    run = RUNS["nnx"]()
    driver = JaxDriver(run.state, POLICY)
    items, before = driver.state(), saved(driver)
    wrong = jax.tree.map(lambda leaf: leaf, items["model"])
    wrong["first"]["kernel"] = jnp.zeros((9, 9))
    with pytest.raises(StateMismatch, match="kernel"):
        driver.load({**items, "model": wrong})
    with pytest.raises(StateMismatch, match="metric"):
        driver.load({name: item for name, item in items.items() if name != "metric"})
    with pytest.raises(StateMismatch, match="another structure"):
        driver.load({**items, "model": {"first": jnp.zeros(3)}})
    assert saved(driver) == before


def multisteps(inner: Any, policy: Any) -> Any:
    steps = optax.MultiSteps(inner, every_k_schedule=3)
    return protect(optax.GradientTransformationExtraArgs(steps.init, steps.update), policy)


@pytest.mark.parametrize("outside", [True, False])
def test_accumulated_gradients_are_dropped_and_never_saved(outside):
    run = plain(optax.sgd(0.1), wrap=every_third if outside else multisteps)
    driver = JaxDriver(run.state, POLICY)
    assert driver.may_save()
    advance(driver, run, BATCHES[:3])
    assert driver.may_save()
    items = {name: item for name, item in driver.state().items() if name != SIDE_STATE}
    saved = jax.tree.map(jnp.copy, items)
    advance(driver, run, BATCHES[3:4])
    assert not driver.may_save()
    # As one NaN leaves it, in a run that was not protected then: 0 * NaN is NaN.
    poisoned = optax.tree.set(
        saved,
        acc_grads=jax.tree.map(lambda x: x * jnp.nan, saved["params"]),
        mini_step=jnp.int32(2),
    )
    compiled = run.compiled()
    driver.load(poisoned)
    assert driver.may_save()
    after = [driver.state()["params"]["hidden"]]
    advance(driver, run, BATCHES[:3])
    after.append(driver.state()["params"]["hidden"])
    assert jnp.isfinite(after[1]).all()
    assert driver.may_save()
    assert run.compiled() == compiled


def test_the_norm_of_the_last_update_goes_back_with_the_engine():
    run = plain(policy=policies.UPDATES)
    driver = JaxDriver(run.state, policies.UPDATES)
    store = driver.store(None)
    advance(driver, run, BATCHES[:2])
    norm = float(driver.live["opt_state"].heal_update_norm)
    store.save(2, driver.state())
    older = {name: item for name, item in driver.state().items() if name != SIDE_STATE}
    store.save(1, older)  # before healcore saved it
    advance(driver, run, BATCHES[2:4])
    assert float(driver.live["opt_state"].heal_update_norm) != norm
    driver.load(store.restore(2, driver.state()).state)
    assert float(driver.live["opt_state"].heal_update_norm) == norm
    driver.load(store.restore(1, driver.state()).state)
    assert float(driver.live["opt_state"].heal_update_norm) == 0.0


def test_the_moments_are_reset_after_a_restore_of_the_step_that_cut():
    cuts = RuleConfig(int(Cause.GRAD_SPIKE), action=int(Action.CUT_LR))
    policy = policies.SKIP._replace(rules=(cuts,), lr=POLICY.lr._replace(reset_moments=True))
    run = plain(policy=policy)
    driver = JaxDriver(run.state, policy)
    store = driver.store(None)
    advance(driver, run, [*BATCHES, 1e3 * BATCHES[0]])
    store.save(7, driver.state(), healing=driver.engines())
    advance(driver, run, BATCHES[1:2])
    after = saved(driver)
    assert int(optax.tree.get(driver.state(), "count")) == 1  # of new moments
    for _ in range(2):
        restored = store.restore(7, driver.state())
        driver.load(restored.state, restored.healing)
        advance(driver, run, BATCHES[1:2])
        assert saved(driver) == after


def test_a_state_without_its_healing_part_is_refused():
    run = plain()
    driver = JaxDriver(run.state, POLICY)
    with pytest.raises(HealStateError, match="opt_state"):
        driver.update({"params": run.state["params"]})
    assert driver.live is run.state
    with pytest.raises(HealStateError, match="no healing state in this dict"):
        JaxDriver({"params": run.state["params"]}, POLICY)
    with pytest.raises(HealStateError, match="to another policy"):
        JaxDriver(run.state, "default")
    with pytest.raises(HealStateError, match='"optimizer": optimizer'):
        JaxDriver((nnx.Linear(2, 3, rngs=nnx.Rngs(0)), run.state), POLICY)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (jnp.zeros(2, jnp.bfloat16), jnp.full(2, 0.3)),
        (0, jnp.float32(0.3)),
        (jnp.asarray(0.0), jnp.bfloat16(0.3)),  # a weak type
        (jnp.zeros((), jnp.int8), jnp.int32(1000)),
    ],
    ids=["bfloat16", "Python number", "weak", "integer"],
)
def test_a_step_may_widen_a_leaf(before, after, tmp_path):
    healing = protect(optax.sgd(0.1), policies.SKIP).init(jnp.ones(2))
    live = live_state_of({"moment": before, "heal": healing})
    store = JaxDriver(live.state, policies.SKIP).store(tmp_path)
    for step, leaf in enumerate((before, after)):
        live.state = {"moment": leaf, "heal": healing}
        live.check() if step else None
        store.save(step, live.items())
    store.wait()
    for step, leaf in enumerate((before, after)):
        for drop in (False, True):
            if drop:
                store.ring.forget(step)
            for fresh in (live, live_state_of({"moment": before, "heal": healing})):
                restored = fresh.restored(store.restore(step, fresh.items()).state)["moment"]
                assert bool(jnp.all(restored == leaf))
                assert isinstance(leaf, int) or restored.dtype == leaf.dtype
    live.state = {"moment": jnp.asarray(after, jnp.bool_), "heal": healing}
    with pytest.raises(HealStateError, match="moment"):
        live.check()


def test_a_copy_of_weights_is_not_used_after_the_parameters_have_grown():
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, protect(optax.sgd(0.1), POLICY), wrt=nnx.Param)
    driver = JaxDriver({"model": model, "optimizer": optimizer}, POLICY)
    copy = driver.copy_weights()
    assert driver.losses_of(lambda batch: model(batch).sum(), [jnp.zeros((2, 3))], copy) == [0.0]
    model.kernel, model.bias = nnx.Param(jnp.ones((3, 5))), nnx.Param(jnp.ones(5))
    with pytest.raises(WeightsChanged):
        driver.losses_of(lambda batch: pytest.fail("called"), [jnp.zeros((2, 3))], copy)
    copy = driver.copy_weights()
    assert driver.losses_of(lambda batch: model(batch).sum(), [jnp.zeros((2, 3))], copy) == [10.0]
