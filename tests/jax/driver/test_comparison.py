"""A `loss_fn` undoes damage and nothing else: averages stay, and both sides have the same keys."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.core import Tracer

from healcore import Action, Healer, Hooks
from healcore.jax import from_dict, protect, to_dict
from healcore.jax.driver.driver import JaxDriver
from healcore.jax.heal_state import steps_judged
from healcore.jax.opt_state import find
from healcore.policy import engine_of
from healcore.runtime.run.engine_states import limit_rates
from healcore.runtime.run.healthy_ranges import HealthyValues
from tests.healer.run_options import grouped
from tests.jax.bit_comparison import bits
from tests.jax.driver.small_runs import batch as small_batch
from tests.jax.driver.small_runs import in_place, mse
from tests.open_run import run_of

TX = protect(optax.adam(1e-2), "default")


def data(number: int) -> Any:
    x = np.random.default_rng(number).standard_normal((64, 6)).astype(np.float32)
    return x, (x[:, 0] > 0) * 2 + (x[:, 1] > 0)


def loss_of(params: Any, batch: Any) -> Any:
    x, y = batch
    logits = jnp.tanh(x @ params["a"]) @ params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def initial() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    return {
        "a": jax.random.normal(keys[0], (6, 32)) / 2.5,
        "b": jax.random.normal(keys[1], (32, 4)) / 6,
    }


def reversed_layer(params: Any) -> Any:
    return {**params, "b": -4.0 * params["b"]}


def trained(params: Any, opt: Any, *inputs: Any, loss: Any = loss_of, tx: Any = TX) -> Any:
    """Parameters and optimizer state after one step."""
    value, grads = jax.value_and_grad(loss)(params, *inputs)
    updates, opt = tx.update(grads, opt, params, value=value)
    return optax.apply_updates(params, updates), opt


evaluate = jax.jit(loss_of)


def test_steps_of_an_uneven_dispatch_before_a_rollback_are_counted_once():
    def step(state: Any, batch: Any) -> Any:
        return trained(*state, batch), None

    @jax.jit
    def scan(state: Any, batches: Any) -> Any:
        return jax.lax.scan(step, state, batches)[0]

    def hook(incident: Any) -> Action | None:
        return Action.ROLLBACK if not healer.rollbacks else None

    state = (initial(), TX.init(initial()))
    with Healer("default", state=state, hooks=Hooks(on_incident=hook)) as healer:
        for numbers in healer.batches([[1] * 4, [1] * 4, [np.nan, 1, 1, 1], [1] * 2], epochs=3):
            x, y = data(0)
            factors = np.array(numbers, np.float32)
            batches = x * factors[:, None, None], np.stack([y] * len(factors))
            healer.update(scan(healer.state, batches))
        assert healer.rollbacks == 1
        assert healer.step == int(steps_judged(find(healer.state[1]).heal_records))


# -- all batches of a step ------------------------------------------------------------------------


ACCUMULATED: Any = optax.MultiSteps(TX, 4, should_skip_update_fn=optax.skip_not_finite)


@pytest.mark.slow
@pytest.mark.parametrize("tx", [ACCUMULATED, TX], ids=["accumulated", "scanned"])
def test_every_batch_of_a_step_or_of_a_dispatch_of_many_is_compared(tx):
    """The weights are damaged in between."""
    size = 4
    is_damaged = False
    waiting: list[Any] = []

    def step(state: Any, batch: Any) -> Any:
        return trained(*state, batch, tx=tx), None

    @jax.jit
    def scan(state: Any, batches: Any) -> Any:
        return jax.lax.scan(step, state, batches)[0]

    batches = [data(number) for number in range(400)]
    numbers = {batch[0][0, 0]: number for number, batch in enumerate(batches)}
    compared: set[int] = set()

    def number_of(batch: Any) -> int:
        return numbers[batch[0][0, 0]]

    def loss_fn(state: Any, batch: Any) -> Any:
        if not isinstance(batch[0], Tracer):
            compared.add(number_of(batch))
        return evaluate(state[0], batch)

    state = (initial(), tx.init(initial()))
    with Healer("default", state=state, loss_fn=loss_fn) as healer:
        for batch in healer.batches(batches):
            waiting.append(batch)
            if tx is TX and len(waiting) < size:
                continue
            state = healer.state
            if 247 in map(number_of, waiting) and not is_damaged:
                is_damaged = True
                state = (reversed_layer(state[0]), state[1])
            stacked = jax.tree.map(lambda *each: jnp.stack(each), *waiting)
            waiting.clear()
            healer.update(scan(state, stacked))

    compared -= {*range(size)}  # the Healer tries the first step
    assert compared
    for number in compared:
        first = size * (number // size)
        assert {*range(first, first + size)} <= compared, "all batches of the step"
    assert healer.rollbacks == 1 or tx is TX


@pytest.mark.slow
def test_objects_that_are_updated_in_place_keep_their_statistics_and_keys():
    evaluated = nnx.jit(lambda model, x: mse(model(x), x))
    ended = []
    for asks in (False, True):
        run = in_place("default")
        calls = []
        model = run.state["model"]

        def loss_fn(x: Any, model: Any = model, calls: list[Any] = calls) -> Any:
            calls.append(x)
            return evaluated(model, x)

        with Healer("default", state=run.state, loss_fn=loss_fn if asks else None) as healer:
            for x in healer.batches([small_batch(n) * (1 + (n >= 120)) for n in range(160)]):
                healer.update(run.step(healer.state, x))
        assert healer.rollbacks == 0
        assert (len(calls) > 4) is asks
        ended.append(bits(nnx.to_pure_dict(nnx.state(model))))
    assert ended[0] == ended[1]


# -- the limit on the rate ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
def test_a_limit_holds_in_the_step_in_which_an_injected_schedule_jumps(eager):
    """The schedule computes the rate in the update, after the policy has judged the step."""
    schedule = optax.piecewise_constant_schedule(0.1, {20: 30.0})
    tx = protect(optax.inject_hyperparams(optax.sgd)(learning_rate=schedule), "default")
    state = tx.init(jnp.ones(1))
    sizes = []
    engines = {"": to_dict(state, "default")}
    engine = engine_of("default")
    limited_to, *_ = limit_rates(
        engine, engines, {"": 3.0}, {"": 0.1}, healthy=True, learnt=HealthyValues()
    )
    state = from_dict(state, limited_to[""], "default")
    step = tx.update if eager else jax.jit(tx.update)
    for _ in range(40):
        updates, state = step(jnp.ones(1), state, jnp.ones(1), value=jnp.float32(1.0))
        sizes.append(float(-jax.tree.leaves(updates)[0][0]))
    np.testing.assert_allclose(sizes, 0.1, rtol=1e-5)


# -- averages, momentum encoders and teachers -----------------------------------------------------


@jax.jit
def averaged_step(state: Any, batch: Any) -> Any:
    teacher, params, average, opt = state
    params, opt = trained(params, opt, batch)
    return teacher, params, optax.incremental_update(params, average, 0.01), opt


@jax.jit
def averaged_loss(state: Any, batch: Any) -> Any:
    _, params, average, _ = state
    drift = sum(jnp.square(params[name] - average[name]).sum() for name in params)
    return loss_of(params, batch) + 1e-3 * drift


def averaged_run(folder: Path, *, compares: bool, damaged: bool = False) -> tuple[Healer, Any]:
    params = initial()
    state = (params, params, jax.tree.map(jnp.copy, params), TX.init(params))
    options = {"loss_fn": averaged_loss if compares else None, "save_every": 50}
    with Healer("default", state=state, **grouped(options, events=folder / "e.jsonl")) as healer:
        for batch in healer.batches([data(number) for number in range(300)]):
            state = healer.state
            if damaged and healer.step == 200 and not healer.rollbacks:
                state = (state[0], reversed_layer(state[1]), *state[2:])
            healer.update(averaged_step(state, batch))
    return healer, healer.state


def test_a_run_with_an_average_ends_as_without_comparisons(tmp_path):
    _, plain = averaged_run(tmp_path / "plain", compares=False)
    healer, compared = averaged_run(tmp_path / "compared", compares=True)
    assert healer.rollbacks == 0
    jax.tree.map(np.testing.assert_array_equal, plain, compared)
    comparison: Any = run_of(healer).witness
    assert comparison.state.spent > 0, "weights were compared"
    assert {path[:3] for path in comparison.state.anchors[-1].weights} == {"[0]", "[1]", "[2]"}


def test_damage_is_found_next_to_an_average_and_a_teacher(tmp_path):
    assert averaged_run(tmp_path, compares=True, damaged=True)[0].rollbacks == 1


@pytest.mark.parametrize("is_named", [True, False])
def test_an_earlier_copy_replaces_the_trained_parameters(is_named):
    """Where no part is called `params`, it replaces all parts that may be trained, together."""
    params = initial()
    names: Any = ("teacher", "params", "average", "opt") if is_named else range(4)

    def form(parts: Any) -> Any:
        return dict(zip(names, parts, strict=True)) if is_named else parts

    parts: Any = (params, params, jax.tree.map(jnp.copy, params), TX.init(params))
    driver = JaxDriver(form(parts), "default")
    weights = driver.copy_weights()

    def first_value(state: Any, part: int) -> Any:
        return state[names[part]]["a"][0, 0]

    assert driver.losses_of(first_value, [0, 1, 2], weights) == [float(params["a"][0, 0])] * 3
    for number in range(10):
        parts = averaged_step(parts, data(number))
        driver.update(form(parts))
    current = driver.losses_of(first_value, [0, 1, 2])
    earlier = driver.losses_of(first_value, [0, 1, 2], weights)
    assert earlier[1] == float(params["a"][0, 0]) != current[1]
    assert earlier[2] == (current[2] if is_named else earlier[1])


# -- random keys ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_key", "uses_key"),
    [
        (jax.random.key, False),
        (jax.random.key, True),
        pytest.param(jax.random.PRNGKey, True, marks=pytest.mark.slow),
    ],
)
def test_both_sides_have_the_same_key(make_key, uses_key):
    """The loss of the step had another key, so it stands for neither side."""
    seen: list[Any] = []

    @jax.jit
    def noisy(params: Any, key: Any, batch: Any) -> Any:
        return loss_of(params, batch) * (0.5 + uses_key * jax.random.uniform(key))

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        params, opt, key = state
        return *trained(params, opt, key, batch, loss=noisy), jax.random.split(key)[0]

    def loss_fn(state: Any, batch: Any) -> Any:
        if batch[1].tobytes() != data(0)[1].tobytes():  # the Healer tries the first batch alone
            seen.append((batch[1].tobytes(), np.asarray(jax.random.key_data(state[2])).tobytes()))
        return noisy(state[0], state[2], batch)

    params = initial()
    state = (params, TX.init(params), make_key(0))
    with Healer("default", state=state, loss_fn=loss_fn) as healer:
        for batch in healer.batches([data(number) for number in range(310)]):
            healer.update(step(healer.state, batch))
    comparison: Any = run_of(healer).witness
    assert healer.rollbacks == 0
    assert comparison.state.gives_loss is not uses_key
    assert len(seen) >= 3
    assert (seen[::2] == seen[1::2]) is uses_key
