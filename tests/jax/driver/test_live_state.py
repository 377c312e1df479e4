"""Saving the live state and putting it back: bit for bit, in place, without compiling again."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from healcore.core.decision import Action, Cause
from healcore.core.engine import RuleConfig
from healcore.jax import HealStateError, protect
from healcore.jax.driver.driver import JaxDriver
from healcore.jax.driver.program_state import MARK, program_state_of
from healcore.jax.store import OrbaxStore
from healcore.runtime.driver import WeightsChanged
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits, bits
from tests.jax.driver.small_runs import POLICY, RUNS, advance, batch, driven, every_third, plain

BATCHES = [batch(seed) for seed in range(6)]


def without_mark(driver: JaxDriver) -> dict[str, Any]:
    return {name: item for name, item in driver.state().items() if name != MARK}


def saved(driver: JaxDriver) -> Any:
    """The bits of everything that goes into a checkpoint."""
    return bits(jax.tree.map(jnp.asarray, without_mark(driver)))


def back_to(driver: JaxDriver, store: Any, step: int) -> None:
    """Restores a checkpoint."""
    restored = store.restore(step, driver.state())
    driver.load(restored.state, restored.record)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "where", "at"),
    [("plain", "memory", 2), ("linen", "memory", 0), ("linen", "disk", 2), ("nnx", "disk", 2)],
)
def test_a_run_replays_bit_for_bit_and_is_not_compiled_again(kind, where, at, tmp_path):
    """It also replays in a new process. A TrainState's first step is the number 0, not an array."""
    policy = POLICY._replace(clip=policies.ADAGC.clip)
    run, driver = driven(RUNS[kind](policy=policy), policy)
    store = driver.store(tmp_path if where == "disk" else None)
    advance(driver, run, BATCHES[:at])
    store.save(at, driver.state(), record=driver.engines())
    store.wait()
    if where == "disk":
        store.copies = {each: copy for each, copy in store.copies.items() if each != at}
    begun = saved(driver)
    first = advance(driver, run, BATCHES[at:])
    after = saved(driver)
    compiled = run.compiled()
    engines = driver.engines()

    for _ in range(2):  # what is restored is donated, too
        back_to(driver, store, at)
        assert saved(driver) == begun
        assert driver.take_dispatch() is None  # no step was taken
        again = advance(driver, run, BATCHES[at:])
        assert saved(driver) == after
        assert driver.engines() == engines
        assert [each.read()[-1] for each in again] == [each.read()[-1] for each in first]
    assert 0 <= run.compiled() - compiled <= (kind == "nnx")  # flax 0.12.0: once after nnx.pop

    fresh = RUNS[kind](policy=policy)
    other = JaxDriver(fresh.state, policy)
    back_to(other, store, at)
    advance(other, fresh, BATCHES[at:])
    assert saved(other) == after
    assert other.engines() == engines


@pytest.mark.slow
def test_nnx_objects_stay_the_users_own():
    run, driver = driven(RUNS["nnx"]())
    model, optimizer = run.state["model"], run.state["optimizer"]
    kernel = model.first.kernel
    moment = optimizer.opt_state.inner_state[0].mu["first"]["kernel"]
    store = driver.store(None)
    store.save(0, driver.state())
    before = jax.tree.map(jnp.copy, (kernel[...], moment[...]))
    advance(driver, run, BATCHES)
    driver.load(store.restore(0, driver.state()).state)
    assert driver.live["model"] is model
    assert model.first.kernel is kernel
    assert_same_bits(before, (kernel[...], moment[...]))


def test_a_restored_state_has_the_functions_of_the_state_that_was_given():
    """As of an Equinox module."""
    run, driver = driven(plain(activation=jnp.tanh))
    store = driver.store(None)
    store.save(1, driver.state())
    restored = store.restore(1, run.state).state
    assert restored["activation"] is jnp.tanh
    assert bits(restored["params"]) == bits(driver.live["params"])


@pytest.mark.parametrize("kind", ["plain", pytest.param("linen", marks=pytest.mark.slow), "nnx"])
def test_a_checkpoint_is_restored_with_the_state_that_the_healer_was_given(kind, tmp_path):
    run, driver = driven(RUNS[kind]())
    advance(driver, run, BATCHES[:1])
    store = OrbaxStore(tmp_path)
    store.save(1, driver.state())
    store.wait()
    given = RUNS[kind]().state
    restored = OrbaxStore(tmp_path).restore(1, given).state
    assert jax.tree.structure(restored) == jax.tree.structure(given)
    found = program_state_of(restored).items()
    assert bits({n: x for n, x in found.items() if n != MARK}) == saved(driver)
    if kind == "nnx":
        assert restored["model"] is not given["model"]
        assert bits(nnx.state(given["model"])) == bits(nnx.state(RUNS[kind]().state["model"]))
        part = {"model": given["model"]}
    else:
        part = {"params": given["params"]} if kind == "plain" else given
    found = program_state_of(OrbaxStore(tmp_path).restore(1, part).state).items()
    assert found.keys() - {MARK} == program_state_of(part).items().keys() - {MARK}


def test_python_numbers_come_back_as_they_were():
    extra = {"epoch": 3, "mean": 0.1 + 0.2, "done": True, "far": 2**70, "best": float("inf")}
    extra |= {"phase": 1 + 2j, "large": complex(1e300, 1), "pole": complex(1, float("inf"))}
    run, driver = driven(plain(**extra))
    store = driver.store(None)
    store.save(0, driver.state())
    store.wait()
    assert store.checkpoints()[0].finite
    other = {"epoch": 9, "mean": 9.0, "done": False, "far": 9, "best": 0.0}
    driver.update({**run.state, **other, "phase": 0j, "large": 0j, "pole": 0j})
    driver.load(store.restore(0, driver.state()).state)
    found = {name: driver.live[name] for name in extra}
    assert found == extra
    assert [*map(type, found.values())] == [*map(type, extra.values())]


def multisteps(inner: Any, policy: Any) -> Any:
    steps: Any = optax.MultiSteps(inner, every_k_schedule=3)
    return protect(optax.GradientTransformationExtraArgs(steps.init, steps.update), policy)


@pytest.mark.parametrize("wrap", [every_third, pytest.param(multisteps, marks=pytest.mark.slow)])
def test_accumulated_gradients_are_dropped_and_never_saved(wrap):
    run, driver = driven(plain(optax.sgd(0.1), wrap=wrap))
    assert driver.may_save()
    advance(driver, run, BATCHES[:3])
    assert driver.may_save()
    items = jax.tree.map(jnp.copy, without_mark(driver))
    advance(driver, run, BATCHES[3:4])
    assert not driver.may_save()
    compiled = run.compiled()
    driver.load(items)
    assert driver.may_save()
    advance(driver, run, BATCHES[:3])
    assert jnp.isfinite(driver.state()["params"]["hidden"]).all()
    assert driver.may_save()
    assert run.compiled() == compiled


@pytest.mark.slow
def test_the_moments_are_reset_after_a_restore_of_the_step_that_cut():
    cuts = RuleConfig(int(Cause.GRAD_SPIKE), action=int(Action.CUT_LR))
    policy = policies.SKIP._replace(rules=(cuts,), lr=POLICY.lr._replace(reset_moments=True))
    run, driver = driven(plain(policy=policy), policy)
    store = driver.store(None)
    advance(driver, run, [*BATCHES, 1e3 * BATCHES[0]])
    store.save(7, driver.state(), record=driver.engines())
    advance(driver, run, BATCHES[1:2])
    after = saved(driver)
    assert int(optax.tree.get(driver.state(), "count")) == 1  # of new moments
    for _ in range(2):
        back_to(driver, store, 7)
        advance(driver, run, BATCHES[1:2])
        assert saved(driver) == after


def test_a_state_without_its_healing_part_is_refused():
    run, driver = driven(plain())
    params = {"params": run.state["params"]}
    with pytest.raises(HealStateError, match="opt_state"):
        driver.update(params)
    assert driver.live is run.state
    for state, policy, message in (
        (params, POLICY, "no healing state in this dict"),
        (run.state, "default", "to another policy"),
        ((nnx.Linear(2, 3, rngs=nnx.Rngs(0)), run.state), POLICY, '"optimizer": optimizer'),
    ):
        with pytest.raises(HealStateError, match=message):
            JaxDriver(state, policy)


def test_a_state_without_the_parameters_is_warned_of():
    run = plain()
    for state, is_warned in (
        ({"opt_state": run.state["opt_state"]}, True),
        ({"opt_state": run.state["opt_state"], "key": jax.random.key(0), "epoch": 1.0}, True),
        (run.state, False),
        ((run.state["params"], run.state["opt_state"]), False),
    ):
        warnings = JaxDriver(state, POLICY).warnings
        assert any("no parameters" in line for line in warnings) is is_warned
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, protect(optax.adam(0.1), POLICY), wrt=nnx.Param)
    assert "no parameters" in JaxDriver({"optimizer": optimizer}, POLICY).warnings[0]
    assert not JaxDriver({"model": model, "optimizer": optimizer}, POLICY).warnings


@pytest.mark.parametrize("before", [0, jnp.bfloat16(0)], ids=["Python number", "bfloat16"])
def test_a_step_may_widen_a_number_and_no_other_leaf(before, tmp_path):
    healing = protect(optax.sgd(0.1), policies.SKIP).init(jnp.ones(2))
    first = {"mean": before, "mask": jnp.zeros(2, jnp.bfloat16), "heal": healing}
    live = program_state_of(first)
    store = JaxDriver(live.state, policies.SKIP).store(tmp_path)
    store.save(0, live.items())
    live.state = {**first, "mean": jnp.float32(0.3)}
    live.check()
    store.save(1, live.items())
    store.wait()
    for _ in ("memory", "disk"):
        for step, number in enumerate((before, jnp.float32(0.3))):
            for fresh in (live, program_state_of(first)):
                restored = fresh.restored(store.restore(step, fresh.items()).state)["mean"]
                assert restored == number
            store.copies = {each: copy for each, copy in store.copies.items() if each != step}
    live.state = {**first, "mask": jnp.zeros(2)}
    with pytest.raises(HealStateError, match="mask"):
        live.check()


def test_a_copy_of_weights_is_not_used_after_the_parameters_have_grown():
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    batches = [jnp.zeros((2, 3))]
    optimizer = nnx.Optimizer(model, protect(optax.sgd(0.1), POLICY), wrt=nnx.Param)
    driver = JaxDriver({"model": model, "optimizer": optimizer}, POLICY)
    copy = driver.copy_weights()
    assert driver.losses_of(lambda batch: model(batch).sum(), batches, copy) == [0.0]
    model.kernel, model.bias = nnx.Param(jnp.ones((3, 5))), nnx.Param(jnp.ones(5))
    with pytest.raises(WeightsChanged):
        driver.losses_of(lambda batch: pytest.fail("called"), batches, copy)
    copy = driver.copy_weights()
    assert driver.losses_of(lambda batch: model(batch).sum(), batches, copy) == [10.0]
