"""Healing states in a live state: found, saved, put back; and stale states, which are refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from healcore import policy
from healcore.core.engine import Engine, StateError
from healcore.jax import (
    HealStateError,
    heal,
    protect,
    scale_by_heal_lr,
    with_heal_state,
    without_heal_state,
)
from healcore.jax.driver.driver import JaxDriver
from healcore.runtime.healer import Healer
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits, bits
from tests.jax.driver.small_runs import POLICY, RUNS, Model, advance, batch, driven, plain

PARAMS = {"w": jnp.ones(3), "b": jnp.zeros(2)}
ADAM: Any = optax.adam(0.1)
HEALED = protect(ADAM, POLICY)
NONE = optax.identity()


def test_the_states_of_many_runs_at_once_are_refused_at_the_start():
    tx = protect(optax.sgd(0.1), policies.SKIP)
    states = jax.vmap(lambda p: {"params": p, "opt_state": tx.init(p)})({"w": jnp.ones((4, 3))})
    with pytest.raises(HealStateError, match="4 runs"):
        Healer(policies.SKIP, state=states).__enter__()


def test_a_healing_state_of_another_kind_touches_nothing():
    tx = protect(optax.sgd(0.1), policies.ADAGC)
    driver = JaxDriver({"params": PARAMS, "opt_state": tx.init(PARAMS)}, policies.ADAGC)
    before = bits(driver.live)
    foreign = Engine(POLICY)
    smaller = JaxDriver((tx.init({"w": jnp.ones(3)}),), policies.ADAGC).engines()["0"]
    for engines, message in (
        ({"opt_state": smaller}, "other tensors"),
        ({"optimizer": smaller}, "'optimizer'"),
        ({"opt_state": foreign.to_dict(foreign.init())}, "another policy"),
    ):
        with pytest.raises(StateError, match=message):
            driver.load(None, engines)
    assert bits(driver.live) == before


def test_a_class_that_is_registered_without_keys_is_a_state():
    made = type("State", (SimpleNamespace,), {})
    jax.tree_util.register_pytree_node(made, lambda s: ([s.opt], 0), lambda _, s: made(opt=s[0]))
    driver = JaxDriver(made(opt=optax.chain(heal(POLICY), ADAM).init(PARAMS)), POLICY)
    driver.update(jax.tree.map(jnp.array, driver.live))
    assert driver.take_dispatch() is not None


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_an_announcement_does_not_hide_the_step_before_it(kind):
    run, driver = driven(RUNS[kind]())
    advance(driver, run, [batch(2)])  # from weak types, which is compiled apart
    driver.update(run.step(driver.live, batch(0)))
    driver.expect_change()
    (name,) = driver.engines()
    assert driver.engines()[name]["state"]["change_expected"] is True
    assert driver.take_dispatch() is not None
    driver.expect_change()
    assert driver.take_dispatch() is None  # which is no step
    compiled = run.compiled()
    advance(driver, run, [batch(1)])
    assert driver.engines()[name]["state"]["change_expected"] is False
    assert run.compiled() == compiled


def test_engines_of_one_optimizer_have_their_places_as_names():
    tx = optax.multi_transform({"x": HEALED, "y": HEALED}, {"w": "x", "b": "y"})
    driver = JaxDriver({"params": PARAMS, "opt_state": tx.init(PARAMS)}, POLICY)
    names = list(driver.engines())
    assert len(names) == 2
    assert all(name.startswith("['opt_state'].inner_states['") for name in names)


@pytest.mark.parametrize(
    ("tx", "parts"),
    [
        (HEALED, ["'params'"]),
        (optax.chain(HEALED, optax.ema(0.9)), ["'params'"]),
        # A NaN stays in the accumulator: a rollback empties it.
        (optax.MultiSteps(HEALED, 2), ["'params'", "acc_grads"]),
        # The state does not show which parameters the optimizer trains.
        (optax.masked(HEALED, {"w": True, "b": False}), ["'params'", "'metric'"]),
    ],
    ids=["alone", "averaged", "accumulated", "masked"],
)
def test_the_parameters_have_to_be_finite_and_nothing_else(tx, parts):
    state = {"params": PARAMS, "opt_state": tx.init(PARAMS), "metric": jnp.float32(0)}
    driver = JaxDriver(state, POLICY)
    assert driver.has_finite_weights()
    for path, leaf in jax.tree_util.tree_leaves_with_path(without_heal_state(state)):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            name = jax.tree_util.keystr(path)
            driver.update(jax.tree.map(lambda x, bad=leaf: x * jnp.nan if x is bad else x, state))
            assert driver.has_finite_weights() is not any(part in name for part in parts), name


def test_batch_statistics_of_nnx_are_no_parameters():
    run, driver = driven(RUNS["nnx"]())
    model = run.state["model"]
    for leaf, finite in ((model.norm.mean, True), (model.first.bias, False)):
        leaf[...] = leaf[...] + jnp.nan
        assert driver.has_finite_weights() is finite


def test_each_parameter_of_nnx_counts_once_whichever_optimizer_trains_it():
    model = Model(nnx.Rngs(0))

    def trains(part: Any) -> Any:
        return nnx.Optimizer(model, HEALED, wrt=nnx.All(nnx.Param, part))

    rest = nnx.PathContains("rest")
    for state in (
        {"model": model, "one": trains(nnx.Not(rest)), "two": trains(rest)},
        {"model": model, "both": nnx.ModelAndOptimizer(model, HEALED)},
    ):
        driver = JaxDriver(state, POLICY)
        weights = {"model": nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat))}
        leaves = jax.tree_util.tree_leaves_with_path(weights)
        names = sorted(jax.tree_util.keystr(path[:-1]) for path, _ in leaves)
        assert sorted(driver.copy_weights()) == names


@pytest.mark.parametrize(
    ("healed", "bare"),
    [
        (optax.chain(heal(POLICY), ADAM, scale_by_heal_lr()), optax.chain(NONE, ADAM, NONE)),
        (optax.MultiSteps(HEALED, 2), optax.MultiSteps(ADAM, 2)),
    ],
)
def test_without_its_healing_part_a_state_is_that_of_plain_optax(healed, bare):
    like, before = healed.init(PARAMS), bare.init(PARAMS)
    assert_same_bits(without_heal_state(like), before)
    old = jax.tree.map(lambda leaf: leaf + 1, before)
    state = with_heal_state(old, like)
    assert jax.tree.structure(state) == jax.tree.structure(like)
    assert_same_bits(without_heal_state(state), old)
    healed.update(PARAMS, state, PARAMS)
    with pytest.raises(HealStateError, match="without_heal_state"):
        with_heal_state(optax.sgd(0.1).init({"q": PARAMS}), like)


def test_a_checkpoint_of_a_run_without_healing_restores(tmp_path):
    run, driver = driven(plain(epoch=4))
    store = driver.store(tmp_path)
    advance(driver, run, [batch(0)])
    tx = optax.adamw(1e-2)
    params = jax.tree.map(lambda leaf: leaf + 1, driver.live["params"])
    store.save(9, {"params": params, "opt_state": tx.init(params), "epoch": np.int32(7)})
    store.wait()
    restored = store.restore(9, driver.state())
    assert restored.record is None
    healing = driver.engines()
    driver.load(restored.state)
    assert_same_bits(driver.live["params"], params)
    assert driver.live["epoch"] == 7
    assert int(optax.tree.get(driver.live, "count")) == 0
    assert driver.engines() == healing
    advance(driver, run, [batch(1)])


def test_a_learning_rate_is_of_the_optimizer_that_protect_wraps():
    """A limit in the units of another rate would be a wrong multiplier."""

    def injected(rate: float) -> Any:
        return optax.inject_hyperparams(optax.sgd)(rate)

    optimizers = {
        "generator": protect(injected(0.1)),
        "critic": protect(injected(0.4)),
        "plain": protect(optax.sgd(0.2)),
        "chain": optax.chain(heal(), injected(0.3)),  # `heal` does not see the rate
        "other": injected(0.7),
    }
    states = {name: tx.init(PARAMS) for name, tx in optimizers.items()}
    rates = JaxDriver({**states, "params": PARAMS}).learning_rates()
    known = {"generator": 0.1, "critic": 0.4}
    assert rates == pytest.approx({**known, "plain": None, "chain": None})


@pytest.mark.parametrize(
    ("policy", "passed", "known"),
    [
        ("default", 0.0, 0.0),
        ("default", 0.3, 0.3),
        ("default", 1.0, 1.0),
        ("default", None, None),
        ("zclip", 0.0, None),
    ],
)
def test_a_passed_learning_rate_of_zero_or_one_is_known(policy, passed, known):
    """Unless the engine does not read the rate."""
    tx = protect(optax.sgd(0.2), policy=policy)
    given = {} if passed is None else {"learning_rate": passed}
    opt_state = tx.init(PARAMS)
    before = JaxDriver({"opt_state": opt_state, "params": PARAMS}, policy).learning_rates()
    _, opt_state = tx.update(PARAMS, opt_state, PARAMS, value=jnp.float32(1), **given)
    after = JaxDriver({"opt_state": opt_state, "params": PARAMS}, policy).learning_rates()
    assert (before, after) == ({"opt_state": None}, pytest.approx({"opt_state": known}))


def test_a_received_rate_is_read_from_the_states_that_are_given():
    """After a rollback the live state has the rate of the last undone step."""
    tx = protect(optax.sgd(0.2), policy="default")
    opt_state = tx.init(PARAMS)
    states = []
    for rate in (0.3, 0.1):
        _, opt_state = tx.update(
            PARAMS, opt_state, PARAMS, value=jnp.float32(1), learning_rate=rate
        )
        driver = JaxDriver({"opt_state": opt_state, "params": PARAMS}, "default")
        states.append(driver.engines())
    assert driver.learning_rates() == pytest.approx({"opt_state": 0.1})
    assert driver.learning_rates(states[0]) == pytest.approx({"opt_state": 0.3})
    assert driver.learning_rates({}) == {"opt_state": None}


def overflows(inner: Any, policy: Any) -> Any:
    tx = protect(inner, policy)

    def update(grads: Any, state: Any, params: Any, *, value: Any) -> Any:
        return tx.update(grads, state, params, value=value, externally_skipped=~jnp.isfinite(value))

    return optax.GradientTransformationExtraArgs(tx.init, update)  # type: ignore[arg-type]


def test_an_overflow_which_the_engine_does_not_count_is_no_fresh_state():
    run, driver = driven(plain(wrap=overflows))
    handles = advance(driver, run, [batch(i, bad=i in (0, 1, 3)) for i in range(6)])
    assert [handle.read()[-1][0].step for handle in handles] == [0, 0, 1, 1, 2, 3]


@pytest.mark.parametrize("every_step", [True, False])
def test_a_fresh_optimizer_state_in_the_loop_is_noticed(every_step):
    """A call of `tx.init` within the loop; one that keeps the healing state is allowed."""
    run, driver = driven(plain())
    fresh = jax.tree.map(np.array, run.state["opt_state"])
    advance(driver, run, [batch(i) for i in range(3)])

    def restarted(number: int, *, keeps_healing: bool = False) -> Any:
        state = {**driver.live, "opt_state": jax.tree.map(jnp.asarray, fresh)}
        if keeps_healing:
            state = with_heal_state(without_heal_state(state), like=driver.live)
        driver.update(run.step(state, batch(number)))
        return driver.take_dispatch()

    assert restarted(3, keeps_healing=True).read()[-1][0].step == 4
    handle = restarted(4)
    if every_step:
        handle = restarted(5)
    with pytest.raises(HealStateError, match="opt_state"):
        handle.read()


def test_a_state_of_pmap_is_refused_as_the_page_says():
    given = jax.pmap(lambda p: {"params": p, "opt_state": HEALED.init(p)})(
        jax.tree.map(lambda leaf: leaf[None], PARAMS)
    )
    with pytest.raises(HealStateError, match="vmap or pmap"):
        JaxDriver(given, POLICY)
    JaxDriver(jax.tree.map(lambda leaf: leaf[0], given), POLICY)
    page = (Path(__file__).parents[3] / "docs" / "jax.md").read_text()
    assert "so a Healer raises an error" in page


PLATEAU = policy.load("default", detect={"plateau": {}})


@pytest.mark.parametrize(
    ("made", "passed"),
    [
        pytest.param("default", PLATEAU, id="a state of another size"),
        pytest.param(policy.load("default", max_skips=7), "default", id="a number"),
        pytest.param("default", "zclip", id="names of presets"),
    ],
)
def test_the_error_for_another_policy_names_both(made, passed):
    state = {"params": PARAMS, "opt_state": protect(ADAM, policy=made).init(PARAMS)}
    named = r"made it .* fingerprint (\w+), the policy passed here .* fingerprint (?!\1)\w"
    with pytest.raises(HealStateError, match=named):
        JaxDriver(state, passed).engines()


def test_python_numbers_may_stand_next_to_a_single_parameter():
    """The rate `0.1` is a floating leaf, as the only parameter is, so it may be a parameter too."""
    tx = protect(optax.sgd(0.1))

    @jax.jit
    def step(state: Any, target: Any) -> Any:
        w, opt, count, settings = state
        loss, grads = jax.value_and_grad(lambda w: ((w - target) ** 2).mean())(w)
        updates, opt = tx.update(grads, opt, w, value=loss, learning_rate=settings["lr"])
        return optax.apply_updates(w, updates), opt, count, settings

    def loss_fn(state: Any, target: Any) -> Any:
        return ((state[0] - target) ** 2).mean()

    w = jnp.ones(4)
    state = w, tx.init(w), 3, {"lr": 0.1}
    with Healer(state=state, loss_fn=loss_fn) as healer:
        for target in healer.batches([jnp.zeros(4)] * 30):
            healer.update(step(healer.state, target))
    np.testing.assert_allclose(healer.state[0], 0.95**30 * np.ones(4), rtol=1e-5)
    assert float(healer.state[3]["lr"]) == pytest.approx(0.1)
