"""Injected numbers: their ranges are in the state, and a held number is replaced in one step."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from healcore.jax import HealStateError, heal, protect, with_heal_state, without_heal_state
from healcore.jax.driver.driver import JaxDriver
from healcore.jax.flax_nnx import update
from healcore.runtime.driver import NumberRange
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits, avals, bits
from tests.jax.driver.small_runs import POLICY, advance, batch, driven, every_third, plain

INJECTED: Any = optax.inject_hyperparams(optax.adamw)(1e-2, b2=0.99)
CYCLE: Any = optax.inject_hyperparams(optax.sgd)(
    lambda count: 0.1, momentum=lambda count: 0.9 - 0.1 * (count % 2)
)
HELD = NumberRange(0.99, 0.99, 0.99)


def with_number(state: Any, name: str, value: Any) -> Any:
    """The state in which the program has set a hyperparameter, in the type that it has."""

    def one(path: Any, leaf: Any) -> Any:
        is_number = jax.tree_util.keystr(path).endswith(f".hyperparams['{name}']")
        return jnp.full_like(leaf, value) if is_number else leaf

    return jax.tree_util.tree_map_with_path(one, state)


def set_number(driver: JaxDriver, name: str, value: Any) -> None:
    driver.update(with_number(driver.live, name, value))


def own(state: Any, name: str) -> Any:
    return optax.tree.get(state["opt_state"].inner_state, name)


def exact(numbers: dict[str, NumberRange], name: str) -> NumberRange:
    return NumberRange(*map(float, np.float32(numbers[name])))


def test_the_ranges_are_of_the_steps_so_far():
    run, driver = driven(plain(INJECTED))
    assert driver.numbers() == {}
    advance(driver, run, [batch(0)])
    assert driver.numbers() == {
        "b1": (0.9, 0.9, 0.9),
        "b2": HELD,
        "eps": (1e-8, 1e-8, 1e-8),
        "eps_root": (0.0, 0.0, 0.0),
        "weight_decay": (1e-4, 1e-4, 1e-4),
    }
    set_number(driver, "b2", 0.25)
    set_number(driver, "b1", math.nan)
    advance(driver, run, [batch(1)])
    set_number(driver, "b2", 0.99)
    set_number(driver, "b1", 0.9)
    advance(driver, run, [batch(2)])
    assert driver.numbers()["b2"] == (0.25, 0.99, 0.99), "one step only"
    assert driver.numbers()["b1"] == (-math.inf, math.inf, 0.9), "NaN is in no range"
    driver.hold_numbers({})
    assert driver.numbers() == {}
    advance(driver, run, [batch(3)])
    assert driver.numbers()["b2"] == HELD, "the ranges begin anew"


def test_a_compiled_loop_sees_every_step():
    tx = protect(INJECTED, POLICY)
    params = {"w": jnp.ones(3)}

    def one(state: Any, decay: Any) -> Any:
        state = with_number(state, "weight_decay", decay)
        grads = jax.tree.map(jnp.ones_like, params)
        _, opt_state = tx.update(grads, state["opt_state"], params, value=jnp.float32(1.0))
        return {**state, "opt_state": opt_state}, own({"opt_state": opt_state}, "weight_decay")

    state = {"params": params, "opt_state": tx.init(params)}
    driver = JaxDriver(state, POLICY)
    driver.hold_numbers({"weight_decay": NumberRange(0.0, 0.5, 0.25)})
    state, values = jax.jit(lambda s: jax.lax.scan(one, s, jnp.float32([0.5, 7.0, 0.125])))(
        driver.live
    )
    driver.update(state)
    assert values.tolist() == [0.5, 7.0, 0.125], "the program's own value is back"
    assert driver.numbers()["weight_decay"] == (0.125, 7.0, 0.125)


@pytest.mark.parametrize("name", ["b2", "weight_decay", "eps"])
@pytest.mark.parametrize("damaged", [0.25, 100.0, math.nan])
def test_a_step_with_a_held_number_moves_as_the_healthy_step(name: str, damaged: float):
    run, driver = driven(plain(INJECTED))
    twin, healthy = driven(plain(INJECTED))
    for each, its_run in ((driver, run), (healthy, twin)):
        advance(each, its_run, [batch(1), batch(2)])  # from weak types, which is compiled apart
    types = avals(driver.live)
    compiled = run.compiled()
    value = own(driver.live, name)
    driver.hold_numbers({name: exact(driver.numbers(), name), "unknown": HELD})
    set_number(driver, name, damaged)
    advance(driver, run, [batch(3), batch(4)])
    advance(healthy, twin, [batch(3), batch(4)])
    assert avals(driver.live) == types
    assert run.compiled() == compiled
    assert_same_bits(own(driver.live, name), jnp.float32(damaged))
    assert_same_bits(driver.live["params"], healthy.live["params"])
    assert_same_bits(
        without_heal_state(with_number(driver.live, name, value)), without_heal_state(healthy.live)
    )
    if not math.isnan(damaged):
        assert driver.numbers()[name] == pytest.approx((damaged,) * 3), "not the held value"
    driver.hold_numbers({})
    advance(driver, run, [batch(5)])
    advance(healthy, twin, [batch(5)])
    assert bits(driver.live["params"]) != bits(healthy.live["params"]), "released"


def test_a_value_within_its_range_is_used():
    run, driver = driven(plain(INJECTED))
    twin, free = driven(plain(INJECTED))
    driver.hold_numbers({"b2": NumberRange(0.5, 0.99, 0.99)})
    for each in (driver, free):
        set_number(each, "b2", 0.75)
    advance(driver, run, [batch(0), batch(1, bad=True), batch(2)])
    advance(free, twin, [batch(0), batch(1, bad=True), batch(2)])
    assert_same_bits(without_heal_state(driver.live), without_heal_state(free.live))


def test_a_skipped_step_keeps_the_bits_of_the_inner_state():
    run, driver = driven(plain(INJECTED))
    driver.hold_numbers({"b2": HELD})
    set_number(driver, "b2", 0.25)
    before = bits(without_heal_state(driver.live))
    advance(driver, run, [batch(0, bad=True)])
    assert bits(without_heal_state(driver.live)) == before
    assert driver.numbers()["b2"] == (0.25, 0.25, 0.25)


def test_observe_mode_reads_and_never_holds():
    run, driver = driven(plain(INJECTED, policies.OBSERVE), policies.OBSERVE)
    twin, free = driven(plain(INJECTED, policies.OBSERVE), policies.OBSERVE)
    driver.hold_numbers({"b2": HELD})
    for each in (driver, free):
        set_number(each, "b2", 0.25)
    advance(driver, run, [batch(0)])
    advance(free, twin, [batch(0)])
    assert_same_bits(without_heal_state(driver.live), without_heal_state(free.live))
    assert driver.numbers()["b2"] == (0.25, 0.25, 0.25)


def test_a_rollback_loads_and_then_holds():
    run, driver = driven(plain(INJECTED))
    store = driver.store(None)
    advance(driver, run, [batch(0)])
    store.save(1, driver.state())
    healthy = driver.numbers()
    set_number(driver, "b2", 0.25)
    advance(driver, run, [batch(1)])
    driver.load(store.restore(1, driver.state()).state)
    stale = run.step(jax.tree.map(jnp.copy, driver.live), batch(1))  # before the second edit
    assert driver.numbers()["b2"].low == 0.25, "the ranges belong to the engine, not to the state"
    driver.hold_numbers({"b2": healthy["b2"]})
    assert driver.numbers() == {}
    assert driver.take_dispatch() is None, "an edit is no step"
    with pytest.raises(HealStateError, match="older state"):
        driver.update(stale)
    assert own(driver.live, "b2") == np.float32(0.99)
    compiled = run.compiled()
    set_number(driver, "b2", 0.25)
    (handle,) = advance(driver, run, [batch(1)])
    assert run.compiled() == compiled
    assert handle.read()[-1][0].step == 3
    assert driver.numbers()["b2"] == (0.25, 0.25, 0.25)
    driver.load(None, driver.engines())
    assert driver.numbers()["b2"] == (0.25, 0.25, 0.25), "also after a new engine state"


def test_no_checkpoint_has_the_ranges(tmp_path):
    """So checkpoints of earlier releases and of runs without healcore fit."""
    run, driver = driven(plain(INJECTED))
    advance(driver, run, [batch(0)])
    store = driver.store(tmp_path)
    store.save(1, driver.state())
    store.wait()
    assert "heal_numbers" not in str(jax.tree_util.tree_structure(driver.state()))
    fresh, other = driven(plain(INJECTED))
    other.load(store.restore(1, other.state()).state)
    assert other.numbers() == {}
    advance(other, fresh, [batch(1)])
    advance(driver, run, [batch(1)])
    assert_same_bits(other.live["params"], driver.live["params"])


def test_scheduled_numbers_and_rates_are_left_out():
    """Optax computes a scheduled number within its update, and ignores the one in the state."""
    run, driver = driven(plain(CYCLE))
    assert optax.tree.get(driver.live, "heal_numbers") is None
    advance(driver, run, [batch(0)])
    assert driver.numbers() == {}
    driver.hold_numbers({"momentum": NumberRange(0.0, 0.0, 0.0)})


@pytest.mark.parametrize(
    "tx",
    [
        protect(optax.adamw(1e-3)),
        protect(optax.inject_hyperparams(optax.sgd)(0.1)),
        optax.chain(heal(), INJECTED),
    ],
    ids=["plain", "rate", "heal"],
)
def test_other_states_have_no_such_array(tx: Any):
    state = tx.init({"w": jnp.ones(3)})
    assert optax.tree.get(state, "heal_numbers") is None
    driver = JaxDriver({"params": {"w": jnp.ones(3)}, "opt_state": state})
    driver.hold_numbers({"b2": HELD})
    assert driver.numbers() == {}


def test_the_names_tell_optimizers_apart():
    params = {"w": jnp.ones(3), "b": jnp.zeros(2)}
    parts: Any = optax.partition(
        {"one": INJECTED, "two": optax.inject_hyperparams(optax.lion)(1e-3, b2=0.5)},
        {"w": "one", "b": "two"},
    )
    txs = {"generator": protect(parts, POLICY), "critic": protect(INJECTED, POLICY)}
    updates = {name: jax.jit(tx.update) for name, tx in txs.items()}
    states = {name: tx.init(params) for name, tx in txs.items()}
    driver = JaxDriver({**states, "params": params}, POLICY)

    def step(held: dict[str, NumberRange]) -> Any:
        driver.hold_numbers(held)
        state = with_number(driver.live, "b2", 0.25)
        moved = {}
        for name, update_one in updates.items():
            grads = jax.tree.map(jnp.ones_like, params)
            _, state[name] = update_one(grads, state[name], params, value=jnp.float32(1.0))
            moved[name] = state[name].inner_state
        driver.update(state)
        return moved

    step({})
    names = [name for name in driver.numbers() if name.endswith("['b2']")]
    assert [name.split("'")[1] for name in names] == ["critic", "generator", "generator"]
    free = step({})
    held = step({names[0]: HELD})
    assert bits(held["critic"]) != bits(free["critic"])
    for name in names:
        assert driver.numbers()[name] == (0.25, 0.25, 0.25)


def test_accumulated_steps_hold_too():
    run, driver = driven(plain(INJECTED, wrap=every_third))
    twin, healthy = driven(plain(INJECTED, wrap=every_third))
    driver.hold_numbers({"b2": HELD})
    set_number(driver, "b2", 0.25)
    batches = [batch(i) for i in range(7)]
    advance(driver, run, batches)
    advance(healthy, twin, batches)
    assert_same_bits(driver.live["params"], healthy.live["params"])


def test_nnx_objects_are_held_in_place():
    def run() -> tuple[Any, JaxDriver]:
        model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, protect(INJECTED, POLICY), wrt=nnx.Param)
        return optimizer, JaxDriver({"model": model, "optimizer": optimizer}, POLICY)

    @nnx.jit
    def compiled(model: Any, optimizer: Any, x: Any) -> None:
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        update(optimizer, model, grads, value=loss)

    (held, driver), (_, healthy) = run(), run()
    driver.hold_numbers({"b2": HELD})
    number = held.opt_state.inner_state.hyperparams["b2"]
    number[...] = jnp.full_like(number[...], 0.25)
    for i in range(3):
        for each in (driver, healthy):
            compiled(each.live["model"], each.live["optimizer"], batch(i))
            each.update()
            assert each.take_dispatch() is not None
    assert_same_bits(nnx.state(driver.live["model"]), nnx.state(healthy.live["model"]))
    assert number[...] == 0.25
    assert driver.numbers()["b2"] == (0.25, 0.25, 0.25)
    driver.hold_numbers({})
    assert driver.numbers() == {}


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        pytest.param(jnp.float32, 0.5, id="number"),
        pytest.param(jnp.float32, np.float64(0.5), id="float64", marks=pytest.mark.slow),
        pytest.param(
            jnp.bfloat16, np.asarray(0.5, jnp.bfloat16), id="bfloat16", marks=pytest.mark.slow
        ),
    ],
)
def test_a_held_number_has_the_type_of_the_program_s_number(dtype: Any, value: Any):
    params = {"w": jnp.ones(3, dtype)}
    grads = {"w": jnp.full(3, 0.1, dtype)}
    tx: Any = protect(INJECTED, policies.SKIP)
    bare = with_value = tx.init(params)
    driver = JaxDriver({"opt_state": tx.init(params)}, policies.SKIP)
    driver.hold_numbers({"b2": NumberRange(0.0, 0.25, 0.25)})
    with_value = driver.live["opt_state"]
    expected = bare
    with_value.inner_state.hyperparams["b2"] = value
    expected.inner_state.hyperparams["b2"] = (
        type(value)(0.25) if dtype == jnp.float32 else (np.asarray(0.25, dtype))
    )
    for compiled in (False, True):
        step = jax.jit(tx.update) if compiled else tx.update
        got, new = step(grads, with_value, params, value=jnp.float32(1.0))
        wanted, other = step(grads, expected, params, value=jnp.float32(1.0))
        assert_same_bits(got, wanted)
        assert avals(new.inner_state) == avals(other.inner_state)
        assert new.inner_state.hyperparams["b2"] == value


def test_whole_numbers_stay_whole():
    def factory(learning_rate: float, power: int) -> Any:
        return optax.chain(optax.sgd(learning_rate), optax.stateless(lambda u, _: scaled(u, power)))

    def scaled(updates: Any, power: Any) -> Any:
        assert jnp.issubdtype(jnp.result_type(power), jnp.integer)
        return jax.tree.map(lambda u: u * power, updates)

    tx: Any = protect(optax.inject_hyperparams(factory)(1.0, power=2), policies.SKIP)
    params = {"w": jnp.ones(3)}
    driver = JaxDriver({"opt_state": tx.init(params)}, policies.SKIP)
    driver.hold_numbers({"power": NumberRange(2.0, 2.0, 2.0)})
    state = with_number(driver.live, "power", 5)["opt_state"]
    updates, state = jax.jit(tx.update)(params, state, params)
    assert updates["w"].tolist() == [-2.0] * 3
    assert state.inner_state.hyperparams["power"] == 5


class Adapting:
    """An optimizer that changes its own injected number within its step."""

    init = staticmethod(INJECTED.init)

    @staticmethod
    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        updates, state = INJECTED.update(updates, state, params, **extra)
        return updates, with_number(state, "eps", state.hyperparams["eps"] * 2)


def test_what_the_optimizer_writes_is_kept():
    params = {"w": jnp.ones(3)}
    tx: Any = protect(Adapting(), policies.SKIP)
    driver = JaxDriver({"opt_state": tx.init(params)}, policies.SKIP)
    driver.hold_numbers({"eps": NumberRange(1.0, 1.0, 1.0)})
    _, state = tx.update(params, driver.live["opt_state"], params)
    assert state.inner_state.hyperparams["eps"] == 2.0


def test_the_array_goes_wherever_the_healing_state_goes():
    params = {"w": jnp.ones(3)}
    tx: Any = protect(INJECTED, POLICY)
    driver = JaxDriver({"params": params, "opt_state": tx.init(params)}, POLICY)
    driver.hold_numbers({"b2": HELD})
    state = driver.live["opt_state"]
    again = with_heal_state(without_heal_state(state), like=state)
    assert_same_bits(again, state)
    assert "heal_numbers" not in str(jax.tree.structure(without_heal_state(state)))
    assert jax.eval_shape(tx.init, params).heal.heal_numbers.shape == (6, 5)
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    placed = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    assert isinstance(tx.init(placed).heal.heal_numbers.sharding, NamedSharding)
