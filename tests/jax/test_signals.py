"""Signals are checked while tracing, and the same on every device; norms of gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore.core.decision import Cause
from healcore.core.detectors import NonFiniteConfig, OverfitConfig
from healcore.core.engine import Engine, EngineConfig
from healcore.errors import SignalError
from healcore.jax import gradients, heal, heal_zclip, last_decision, metrics, protect
from healcore.jax.gradients import checked
from healcore.jax.opt_state import find
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits
from tests.jax.processes import Program

PARAMS = {"w": jnp.ones(3)}
TRANSFORMATIONS = [heal_zclip(), protect(optax.sgd(0.1), policies.ZCLIP)]
every_transformation = pytest.mark.parametrize("tx", TRANSFORMATIONS, ids=["heal_zclip", "protect"])


@every_transformation
@pytest.mark.parametrize(
    ("signal", "message"),
    [
        pytest.param(
            {"value": np.ones(3, np.float32)}, r"shape \(3,\).*mean", id="loss of each sample"
        ),
        pytest.param({"value": 3}, "int32", id="integer loss"),
        pytest.param({"value": {"loss": 1.0}}, "dict", id="dictionary as loss"),
        pytest.param({"grad_norm": np.ones(1, np.float32)}, "grad_norm", id="norm of a shape"),
        pytest.param({"change_expected": np.float32(1)}, "change_expected", id="float as flag"),
        pytest.param(
            {"externally_skipped": np.ones(2, bool)}, "externally_skipped", id="flag of a shape"
        ),
    ],
)
def test_a_bad_signal_is_named_while_tracing(tx, signal, message):
    state = tx.init(PARAMS)
    before = jax.tree.map(np.asarray, state)
    with pytest.raises(SignalError, match=message):
        jax.eval_shape(lambda g, s, p: tx.update(g, s, p, **signal), PARAMS, state, PARAMS)
    assert_same_bits(before, jax.tree.map(np.asarray, state))


@pytest.mark.filterwarnings("error")
def test_a_loss_that_float32_cannot_hold_is_infinite():
    engine = Engine(EngineConfig(detectors=(("nonfinite", NonFiniteConfig()),)))
    assert np.isinf(checked({"value": np.float64(1e300)}, engine)["value"])


@every_transformation
def test_a_given_norm_replaces_the_own_one(tx):
    """Norms of each tensor are not reported, because in shard_map they differ between devices."""
    _, state = jax.jit(tx.update)(PARAMS, tx.init(PARAMS), PARAMS, grad_norm=jnp.float32(10.0))
    assert float(metrics(state)["heal/grad_norm"]) == 10.0
    np.testing.assert_allclose(last_decision(state).grad_scale, 0.1, rtol=1e-5)
    _, state = jax.jit(tx.update)(PARAMS, tx.init(PARAMS), PARAMS, grad_norm=jnp.float32(jnp.inf))
    assert bool(last_decision(state).skip)
    assert find(state).heal_leaf_norms.tolist() == [0.0]


@pytest.mark.parametrize("tx", [protect(optax.sgd(1.0), "observe"), heal("observe")])
def test_observe_withholds_only_steps_that_the_caller_skips(tx):
    bad = {"w": jnp.full(3, jnp.nan)}
    update = jax.jit(lambda flag: tx.update(bad, tx.init(PARAMS), PARAMS, externally_skipped=flag))
    for flag in (False, True):
        updates, _ = update(jnp.bool_(flag))
        assert (updates["w"] == 0).all() if flag else jnp.isnan(updates["w"]).all()


@pytest.mark.parametrize("policy", ["default", policies.OBSERVE], ids=["heal", "observe"])
def test_an_overflow_of_a_dynamic_loss_scale_costs_one_step(policy):
    tx = protect(optax.adam(1e-2), policy)

    @jax.jit
    def step(params, state, scale):
        def scaled(w):
            half = w.astype(jnp.float16)
            loss = jnp.mean(half * half)
            return loss * scale.astype(jnp.float16), loss

        grads, loss = jax.grad(scaled, has_aux=True)(params)
        finite = jnp.isfinite(grads).all()
        updates, state = tx.update(
            grads / scale, state, params, value=loss, externally_skipped=~finite
        )
        return optax.apply_updates(params, updates), state, jnp.where(finite, scale, scale / 2)

    params = jnp.ones(4)
    scale = jnp.float32(2.0**20)
    state = tx.init(params)
    for _ in range(60):
        params, state, scale = step(params, state, scale)
    overflows = 20 - round(float(np.log2(scale)))
    assert 2 <= overflows < 10
    assert jnp.sum(params**2) < 3.0, "it has learnt"
    assert int(optax.tree.get(state, "count")) == 60 - overflows == metrics(state)["heal/steps"]
    assert int(metrics(state)["heal/skips"]) == int(metrics(state)["heal/incidents"]) == 0


@pytest.mark.parametrize("make", [heal, lambda policy: protect(optax.sgd(0.1), policy)])
def test_one_time_signals_of_an_overflow_are_kept_for_the_next_step(make):
    """`change_expected` and `eval_loss` come once; the caller skips this very step."""
    overfit = ("overfit", OverfitConfig(max_gap=1.0, patience=1))
    tx = make(policies.SKIP._replace(detectors=(*policies.SKIP.detectors, overfit)))

    @jax.jit
    def update(state, norm, changed, evaluation, skipped):
        signals = {"change_expected": changed, "eval_loss": evaluation}
        grads = {"w": norm * jnp.ones(3)}
        loss = jnp.float32(1)
        return tx.update(grads, state, PARAMS, value=loss, externally_skipped=skipped, **signals)[1]

    state = tx.init(PARAMS)
    for _ in range(6):
        state = update(state, 1.0, False, jnp.nan, False)
    for changed in (False, True):
        dropped = update(state, jnp.inf, changed, jnp.nan, True)
        after = update(dropped, 1e4, False, jnp.nan, False)
        assert bool(last_decision(after).skip) is not changed
    for evaluation, overfits in ((1.5, False), (9.0, True)):
        dropped = update(state, jnp.inf, False, evaluation, True)
        assert last_decision(dropped).cause == 0
        after = update(dropped, 1.0, False, jnp.nan, False)
        assert bool(last_decision(after).cause & Cause.OVERFIT) is overfits


@every_transformation
@pytest.mark.parametrize("tree", [{}, {"a": None}])
def test_no_parameters_are_a_step_of_norm_zero(tx, tree):
    updates, state = jax.jit(tx.update)(tree, tx.init(tree), tree, value=jnp.float32(1.0))
    assert updates == tree
    assert float(metrics(state)["heal/grad_norm"]) == 0.0
    assert not bool(last_decision(state).skip)


@pytest.mark.slow
def test_shard_map_on_four_devices_has_the_signals_of_one():
    scenario = "four_devices:check"
    assert Program("", scenario, world=1, devices=4).of(scenario) == [None]


def test_parameters_that_are_sharded_over_an_explicit_mesh():
    scenario = "four_devices:explicit"
    assert Program("", scenario, world=1, devices=4).of(scenario) == [None]


def test_signals_are_reduced_over_a_named_vmap():
    tx = protect(optax.sgd(0.1), policies.SKIP, axis_name="lane")
    params = grads = jnp.ones(2)
    state = tx.init(params)
    yes = jnp.asarray([False, True, False])
    no = jnp.zeros(3, bool)

    def step(loss, skipped, changed):
        signals = {"externally_skipped": skipped, "change_expected": changed, "eval_loss": loss}
        return tx.update(grads, state, params, value=loss, **signals)

    run = jax.jit(jax.vmap(step, axis_name="lane"))
    losses = jnp.asarray([1.0, 2.0, 6.0])
    _, new = run(losses, no, yes)
    assert float(metrics(jax.tree.map(lambda x: x[0], new))["heal/loss"]) == 3.0
    _, skipped = run(losses, yes, no)
    assert last_decision(skipped).skip.all()


@pytest.mark.parametrize("make", [heal_zclip, lambda **o: protect(optax.sgd(0.1), "zclip", **o)])
@pytest.mark.parametrize("name", ["axis_name", "shard_axis_name"])
def test_an_axis_is_named_by_a_string(name, make):
    with pytest.raises(TypeError):
        make(**{name: 0})
    make(**{name: ("data", "model")})
    with pytest.raises(TypeError, match="shard_axis_name"):
        make(axis_name=("data", "model"), shard_axis_name="data")


DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def all_values(dtype):
    """All 16-bit values, 2**17 of the 32-bit ones: zeros of both signs, subnormals, Inf; no NaN."""
    patterns = np.arange(65536, dtype=np.uint32)
    if dtype == jnp.complex64:
        return jnp.asarray([complex(-0.0, -0.0), 1 - 1j], dtype)
    if jnp.dtype(dtype).itemsize == 2:
        raw = jnp.asarray(patterns.astype(np.uint16))
    else:
        raw = jnp.asarray(np.concatenate([patterns * 65537, patterns]))
    values = jax.lax.bitcast_convert_type(raw, dtype)
    exact = np.asarray(values, np.float64)
    kept = ~np.isnan(exact)
    if dtype == jnp.bfloat16:
        # XLA's own bfloat16 addition flushes subnormals in some programs; `commit` keeps them.
        kept &= (exact == 0) | (np.abs(exact) >= float(jnp.finfo(dtype).tiny))
    return values[kept]


@pytest.mark.parametrize("dtype", [*DTYPES, jnp.complex64])
def test_a_held_update_leaves_every_value_bit_identical(dtype):
    params = all_values(dtype)

    @jax.jit
    def step(params, skip):
        update = gradients.fill_where(jnp.full_like(params, jnp.nan), skip, -0.0)
        return optax.apply_updates(params, update)

    assert_same_bits(step(params, True), params)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaling_rounds_once_and_each_leaf_has_its_factor(dtype):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(1000), dtype)
    exact = jnp.asarray(np.asarray(x, np.float32) * np.float32(0.3)).astype(dtype)
    assert_same_bits(gradients.scale({"w": x}, jnp.float32(0.3)), {"w": exact})
    tree = {"a": jnp.ones(2), "b": jnp.asarray([5], jnp.int32), "c": x}
    out = gradients.scale_each(tree, jnp.asarray([0.5, 0.3]))
    assert_same_bits(out, {"a": jnp.full(2, 0.5), "b": tree["b"], "c": exact})


@pytest.mark.parametrize("dtype", [*DTYPES, jnp.complex64])
def test_norms_are_those_of_the_float64_values_for_any_dtype(dtype):
    factor = 300 - 300j if dtype == jnp.complex64 else 300
    x = factor * jnp.asarray(np.random.default_rng(0).standard_normal(4096), dtype)
    ints = jnp.asarray([1000], jnp.int32)
    float0 = np.zeros((2,), jax.dtypes.float0)
    tree = {"a": x, "b": (x[:7], ints, float0, optax.MaskedNode()), "c": jnp.zeros((0,))}
    norm, each = jax.jit(gradients.both_norms)(tree)
    exact = [np.linalg.norm(np.asarray(v, np.complex128)) for v in (x, x[:7], [0.0])]
    assert norm.dtype == each.dtype == jnp.float32
    np.testing.assert_allclose(each, exact, rtol=1e-6)
    np.testing.assert_allclose(norm, np.linalg.norm(exact), rtol=1e-6)


LAYERS = {"base": jnp.ones(4), "head": jnp.full((4,), 0.5)}
LABELS = {"base": "frozen", "head": "trained"}
IS_FROZEN = {"base": True, "head": False}


def partition(rate=0.1):
    return optax.partition({"trained": optax.adam(rate), "frozen": optax.set_to_zero()}, LABELS)


FREEZING = optax.masked(optax.set_to_zero(), IS_FROZEN)
FROZEN = {
    "partition": protect(partition(), policies.BOTH),
    "masked before": protect(optax.chain(FREEZING, optax.adam(0.1)), policies.BOTH),
    "masked after": protect(optax.chain(optax.adam(0.1), FREEZING), policies.BOTH),
    "accumulation": protect(optax.MultiSteps(partition(), 2), policies.BOTH),
    "injected outside": optax.inject_hyperparams(
        lambda rate: protect(partition(rate), policies.BOTH)
    )(rate=0.1),
    "per tensor": protect(partition(), policies.ADAGC),
}
EAGER = ("masked after", "accumulation", "injected outside")


def in_scan(tx, grads, state) -> tuple[Any, Any]:
    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params, value=1.0)
        return (optax.apply_updates(params, updates), state), None

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads)
    return jax.jit(lambda state: jax.lax.scan(step, (LAYERS, state), stacked)[0])(state)


def in_loop(tx, grads, state) -> tuple[Any, Any]:
    params = LAYERS
    for each in grads:
        updates, state = tx.update(each, state, params, value=1.0)
        params = optax.apply_updates(params, updates)
    return params, state


def head_gradients(*bases, bad=None):
    """Ordinary gradients of the head, one for each gradient of the base."""
    heads = np.random.default_rng(0).normal(0.1, 0.001, (len(bases), 4)).astype(np.float32)
    heads[[] if bad is None else [bad]] = np.nan
    pairs = zip(bases, heads, strict=True)
    return [{"base": jnp.full(4, x, jnp.float32), "head": jnp.asarray(y)} for x, y in pairs]


@pytest.mark.slow
@pytest.mark.parametrize("name", FROZEN)
def test_a_gradient_of_a_frozen_parameter_does_not_count(name):
    run = in_loop if name in EAGER else in_scan
    tx = FROZEN[name]
    params, state = run(tx, head_gradients(1.0, 1.0, np.nan, 1.0, 1e8, 1.0), tx.init(LAYERS))
    expected, healthy = run(tx, head_gradients(*6 * [1.0]), tx.init(LAYERS))
    assert_same_bits(params, expected)
    assert_same_bits(params["base"], LAYERS["base"])
    assert np.all(params["head"] != LAYERS["head"])
    assert metrics(state)["heal/skips"] == 0
    assert metrics(state)["heal/clips"] == metrics(healthy)["heal/clips"]
    assert find(state).heal_leaf_norms[0] == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.inner_state))


def test_all_gradients_of_an_optimizer_that_reads_them_count():
    zero_rate = optax.partition({"trained": optax.sgd(1.0), "frozen": optax.sgd(0.0)}, LABELS)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), partition())
    by_schedule = optax.sgd(lambda count: jnp.where(jnp.asarray(count) < 100, 0.0, 0.1))
    bad_head = head_gradients(1.0, 1e8, 1.0, bad=2)
    found = [(FROZEN[name], bad_head) for name in ("partition", "injected outside")]
    for inner in (zero_rate, clipped, by_schedule):
        found.append((protect(inner, policies.SKIP), head_gradients(1.0, np.nan)))
    for tx, grads in found:
        params, state = in_scan(tx, grads, tx.init(LAYERS))
        assert metrics(state)["heal/skips"] == 1
        assert np.isfinite(params["head"]).all()
