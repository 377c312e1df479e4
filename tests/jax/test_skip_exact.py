"""A skipped step leaves no trace: not in parameters, moments, counters, keys or accumulators."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore.jax import commit, heal_zclip, last_decision, protect
from healcore.jax.optimizer_step import CommitError, OptimizerStep
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits, bits

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "sgd_momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 50), weight_decay=0.1),
    "adamw_bf16_moments": lambda: optax.adamw(0.1, mu_dtype=jnp.bfloat16),
    "lion": lambda: optax.lion(0.01),
    "rmsprop": lambda: optax.rmsprop(0.1, momentum=0.9),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "muon": lambda: optax.contrib.muon(0.1),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(0.1),
    "prodigy": lambda: optax.contrib.prodigy(0.1),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=0),
    "multisteps": lambda: optax.MultiSteps(optax.adam(0.1), every_k_schedule=2),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.0, 9)),
    "lookahead_like": lambda: optax.chain(optax.scale_by_adam(), optax.ema(0.9)),
}
ALIKE = ("sgd_momentum", "lion", "rmsprop", "schedule_free", "prodigy", "lookahead_like")
"""Their states have no kind of leaf that the others lack."""
SIMPLE = ("sgd", "adamw")
"""Each of their leaves is in the state of another optimizer too, as a part of more."""


def by_marker(name: str) -> Any:
    """The name as a parameter; `make test` has optimizers whose states differ in kind."""
    if name in ALIKE:
        return pytest.param(name, marks=pytest.mark.stress)
    return pytest.param(name, marks=pytest.mark.slow) if name in SIMPLE else name


# -0.0 and a value whose update is tiny: both must come back bit for bit.
PARAMS = {
    "w": jnp.linspace(-1.0, 1.0, 12).reshape(3, 4).at[0, 0].set(-0.0),
    "b": jnp.asarray([0.5, -0.0, 1e-3, 3.0], jnp.bfloat16),
}
LOSS = jnp.float32(1.0)


def gradients(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray((rng.random(p.shape) + 0.5) * scale, p.dtype), PARAMS)


def one_bad_element(value):
    grads = gradients(99)
    return {**grads, "w": grads["w"].at[1, 2].set(value)}


BAD = {
    "nan": (one_bad_element(jnp.nan), 1.0),
    "inf": (one_bad_element(-jnp.inf), 1.0),
    "finite_spike": (gradients(7, scale=1e4), 1.0),
    "nan_loss": (gradients(7), float("nan")),
}


@pytest.mark.parametrize("name", map(by_marker, OPTIMIZERS))
def test_a_skip_changes_no_bit(name):
    """The run continues as if there had been no bad step."""
    inner = optax.with_extra_args_support(OPTIMIZERS[name]())
    tx = protect(inner, policies.SKIP)

    @jax.jit
    def step(params, state, grads, value):
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state, updates

    params = PARAMS
    state = tx.init(PARAMS)
    for i in range(policies.WARMUP + 2):
        params, state, _ = step(params, state, gradients(i), LOSS)
    assert not bool(last_decision(state).skip)
    p, s = params, state
    for kind, (grads, value) in BAD.items():
        p, s, updates = step(p, s, grads, jnp.float32(value))
        assert bool(last_decision(s).skip), kind
        assert_same_bits(p, params)
        assert_same_bits(s.inner_state, state.inner_state)
        assert all(np.signbit(np.asarray(u, np.float32)).all() for u in jax.tree.leaves(updates))
    good = gradients(5)
    p, s, _ = step(p, s, good, LOSS)
    q, t, updates = step(params, state, good, LOSS)
    assert_same_bits(p, q)
    assert_same_bits(s.inner_state, t.inner_state)
    assert bits(s.inner_state) != bits(state.inner_state) or name == "sgd"

    # That step is the optimizer's own, up to the last bits: XLA may contract a product into another
    # sum here than there.
    own = jax.jit(inner.update)(good, state.inner_state, params)
    for a, b in zip(*map(jax.tree.leaves, ((updates, t.inner_state), own)), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            assert_same_bits(a, b)
            continue
        rtol = 2e-2 if a.dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=rtol, atol=1e-6)


def test_arguments_reach_an_inner_optimizer_that_needs_them():
    def loss(params):
        return jnp.sum((params - 3.0) ** 2)

    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=5, store_grad=True)
    tx = protect(optax.chain(optax.sgd(1.0), search), policies.SKIP)

    @jax.jit
    def step(params, state, factor):
        value, grads = optax.value_and_grad_from_state(loss)(params, state=state)
        given = {"value": value, "grad": grads * factor, "value_fn": loss}
        updates, state = tx.update(grads * factor, state, params, **given)
        return optax.apply_updates(params, updates), state

    params = jnp.zeros(4)
    state = tx.init(params)
    start, spoiled = step(params, state, jnp.nan)
    assert_same_bits((start, spoiled.inner_state), (params, state.inner_state))
    for _ in range(10):
        params, state = step(params, state, 1.0)
    np.testing.assert_allclose(params, 3.0, rtol=1e-2)


def test_the_lr_is_cut_in_the_same_run_and_comes_back_to_exactly_one():
    tx = protect(optax.sgd(1.0), policies.CUT_LR)
    update = jax.jit(tx.update)
    params = jnp.zeros(1)
    state = tx.init(params)
    scales = []
    steps = []
    for g in [1.0, jnp.nan] + [1.0] * 40:
        updates, state = update(jnp.asarray([g]), state, params, value=LOSS)
        scales.append(float(last_decision(state).lr_scale))
        steps.append(float(updates[0]))
    assert (scales[0], min(scales), scales[-1]) == (1.0, 0.5, 1.0)
    np.testing.assert_array_equal(steps, [-s if i != 1 else 0.0 for i, s in enumerate(scales)])


def test_each_tensor_has_its_own_factor_under_adagc():
    tx = protect(optax.sgd(1.0), policies.ADAGC)
    update = jax.jit(tx.update)
    params = {"a": jnp.ones(4), "b": jnp.ones((2, 2), jnp.bfloat16), "n": None}
    usual = {"a": jnp.full(4, 0.1), "b": jnp.full((2, 2), 0.1, jnp.bfloat16), "n": None}
    state = tx.init(params)
    for _ in range(policies.WARMUP + 3):
        _, state = update(usual, state, params, value=LOSS)
    updates, state = update({**usual, "a": usual["a"] * 100}, state, params, value=LOSS)
    first, second = last_decision(state).group_scale
    assert float(first) < 0.02
    assert float(second) == 1.0
    np.testing.assert_allclose(updates["a"], -0.104, rtol=0.02)
    assert_same_bits(updates["b"], -usual["b"])


STATE = {
    "mean": jnp.asarray([-0.0, 1e-40, jnp.nan]),
    "half": jax.lax.bitcast_convert_type(jnp.arange(65536).astype(jnp.uint16), jnp.bfloat16),
    "count": jnp.asarray(3, jnp.int32),
    "key": jax.random.key(0),
    "none": None,
    "nested": (jnp.ones((2, 2), jnp.float16),),
}


def changed(state):
    new = jax.tree.map(lambda x: x, state)
    new["mean"] = state["mean"] * 3 + 1
    new["half"] = jnp.zeros_like(state["half"])
    new["count"] = state["count"] + 1
    new["key"] = jax.random.split(state["key"])[0]
    new["nested"] = (state["nested"][0] * jnp.inf,)
    return new


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_takes_one_state_or_the_other_bit_for_bit(transform):
    run = transform(commit)
    assert_same_bits(run(jnp.bool_(True), STATE, changed(STATE)), STATE)
    assert_same_bits(run(jnp.bool_(False), STATE, changed(STATE)), changed(STATE))


def test_python_numbers_float0_and_unchanged_static_leaves_pass():
    old = {"g": np.zeros((2,), jax.dtypes.float0), "name": "relu", "step": 3}
    found = commit(jnp.bool_(True), old, {**old, "step": 4})
    assert (found["name"], found["step"]) == ("relu", 3)


FLOAT = {"a": jnp.ones(2)}


@pytest.mark.parametrize(
    ("skip", "old", "new", "message"),
    [
        pytest.param(True, FLOAT, {"b": jnp.ones(2)}, "same structure", id="other keys"),
        pytest.param(
            True,
            FLOAT,
            {"a": jnp.ones(3)},
            r"\['a'\] was float32\[2\].*float32\[3\]",
            id="another shape",
        ),
        pytest.param(True, {"a": "relu"}, {"a": "gelu"}, r"\['a'\] is a str", id="static leaves"),
        pytest.param([True, False], {}, {}, "skip", id="skip is a list"),
    ],
)
def test_states_that_do_not_match_are_named(skip, old, new, message):
    with pytest.raises(CommitError, match=message):
        jax.eval_shape(functools.partial(commit, old=old, new=new), jnp.asarray(skip))


GRADS = jnp.asarray([1.0, -2.0])
WEIGHTS = jnp.asarray([0.5, 0.25])
VECTOR = jnp.asarray([3.0, -0.0])
PAIR = (VECTOR, 2 * VECTOR)


def momentum(g, s, p):
    new = 0.9 * s + g
    return -0.1 * new + 0.0 * p, new


def one_value_twice(g, s, p):
    new = s[0] + g
    return new, (new, new)


def chained_leaves(g, s, p):
    first = s[0] + g
    second = s[1] * first
    return first * second, (first, second)


def inside_control_flow(g, s, p):
    new = jax.lax.cond(g[0] > 0, lambda s: s + 1, lambda s: s - 1, s)
    new = jax.lax.while_loop(lambda c: c[0] < 10, lambda c: c + jnp.abs(g), new)
    new, every = jax.lax.scan(lambda c, x: (c + x, c * x), new, jnp.stack([g, g]))
    return every.sum(0), new


def random_key(g, s, p):
    key, sub = jax.random.split(s)
    return g + jax.random.normal(sub, (2,)), key


@jax.custom_jvp
def _smooth(x):
    return jnp.where(x > 0, x, 0.0)


_smooth.defjvp(lambda x, t: (_smooth(x[0]), t[0]))


def custom_rule_inside_jit(g, s, p):
    new = jax.jit(lambda s, g: _smooth(s + g))(s, g)
    return new, new


def narrowed(g, s, p):
    new = (0.9 * s.astype(jnp.float32) + g).astype(jnp.bfloat16)
    return new.astype(jnp.float32), new


def step_or_keep(step, skip, g, s, p):
    return OptimizerStep(step, g, s, p).take_or_skip(skip, s, g, s, p, lr_scale=None, fills=False)


CASES = {
    "momentum": (momentum, VECTOR),
    "partly passed through": (
        lambda g, s, p: (g, {"kept": s["kept"], "moved": s["moved"] + g}),
        {"kept": VECTOR, "moved": VECTOR},
    ),
    "swapped": (lambda g, s, p: (g, (s[1], s[0])), PAIR),
    "takes a gradient or parameter": (lambda g, s, p: (g, (g, p)), PAIR),
    "one value twice": (one_value_twice, PAIR),
    "constants": (
        lambda g, s, p: (g, (jnp.zeros(2), jnp.asarray([7.0, 8.0]), 3)),
        (VECTOR, VECTOR, jnp.asarray(5)),
    ),
    "two equal counts": (
        lambda g, s, p: (g / (s[0] + 1), (s[0] + 1, s[1] + 1)),
        (jnp.asarray(1), jnp.asarray(1)),
    ),
    "chained leaves": (chained_leaves, PAIR),
    "inside control flow": (inside_control_flow, VECTOR),
    "random key": (random_key, jax.random.key(1)),
    "custom rule inside jit": (custom_rule_inside_jit, VECTOR),
    "precision changes on the way": (narrowed, VECTOR.astype(jnp.bfloat16)),
    "no leaves": (lambda g, s, p: (g, None), None),
}


@pytest.mark.parametrize(("step", "state"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_skip_keeps_every_bit_and_a_step_is_the_step(step, state, transform):
    run = transform(lambda skip, g, s, p: step_or_keep(step, skip, g, s, p))
    for grads in (GRADS, GRADS * jnp.nan):
        assert_same_bits(run(jnp.bool_(True), grads, state, WEIGHTS)[1], state)
    assert_same_bits(
        jax.tree.map(jnp.asarray, run(jnp.bool_(False), GRADS, state, WEIGHTS)),
        jax.tree.map(jnp.asarray, transform(step)(GRADS, state, WEIGHTS)),
    )


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_leaf_may_get_a_wider_dtype_and_nothing_else_may_change(transform):
    def run(step, state):
        kept = transform(lambda skip, s: step_or_keep(step, skip, GRADS * jnp.nan, s, WEIGHTS)[1])
        return kept(jnp.bool_(True), state)

    wider = run(lambda g, s, p: (g, s.astype(jnp.float32) * 0.9 + g), VECTOR.astype(jnp.bfloat16))
    assert_same_bits(wider, VECTOR)
    for step, message in (
        (lambda g, s, p: (g, (s, s)), "every field of its state in init"),
        (lambda g, s, p: (g, s.astype(jnp.bfloat16)), "bfloat16"),
        (lambda g, s, p: (g, s[:1]), "float32"),
    ):
        with pytest.raises(CommitError, match=message):
            run(step, VECTOR)


def test_under_vmap_each_lane_has_its_own_skip_and_sees_an_outer_trace():
    @jax.jit
    def run(skips, states, outer):
        def step(g, s, p):
            return g, s + outer * g

        return jax.vmap(lambda k, s: step_or_keep(step, k, GRADS, s, WEIGHTS)[1])(skips, states)

    out = run(jnp.asarray([True, False]), jnp.stack([VECTOR, VECTOR]), jnp.float32(3.0))
    assert_same_bits(out, jnp.stack([VECTOR, VECTOR + 3 * GRADS]))


def test_gradients_flow_through_a_step_that_is_taken():
    def loss(g, skip):
        return step_or_keep(momentum, skip, g, VECTOR, WEIGHTS)[1].sum()

    assert jax.grad(loss)(GRADS, jnp.bool_(False)).tolist() == [1.0, 1.0]
    assert jax.grad(loss)(GRADS, jnp.bool_(True)).tolist() == [0.0, 0.0]


LARGE = {f"w{i}": jnp.zeros((1024, 1024)) for i in range(3)} | {"b": jnp.zeros(1024)}


@pytest.mark.parametrize(
    "tx",
    [
        protect(optax.adamw(1e-3), policies.CUT_LR),
        protect(optax.adamw(1e-3), policies.ADAGC),
        protect(optax.sgd(1e-3, momentum=0.9), policies.ZCLIP),
        optax.chain(heal_zclip(), optax.adamw(1e-3)),
    ],
    ids=["cut_lr", "adagc", "zclip", "heal_zclip"],
)
def test_parameters_and_moments_are_written_in_place(tx):
    """The compiled, donated step has no temporary copy of a tensor."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, LARGE)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(LARGE, state, LARGE).compile()
    memory = compiled.memory_analysis()
    if memory is None:
        pytest.skip("this backend does not report memory")
    assert memory.temp_size_in_bytes < LARGE["w0"].nbytes // 10
