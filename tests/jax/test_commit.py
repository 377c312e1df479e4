"""Keeping the old state on a skip: `commit`, and `step_or_keep` for every way of making a state."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore.jax import commit, heal_zclip, protect
from healcore.jax.commit import CommitError, step_or_keep
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits

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


def test_python_numbers_are_taken_too():
    assert commit(jnp.bool_(True), {"step": 3}, {"step": 4})["step"] == 3


def test_float0_and_unchanged_static_leaves_pass():
    old = {"g": np.zeros((2,), jax.dtypes.float0), "name": "relu"}
    assert commit(jnp.bool_(True), old, dict(old))["name"] == "relu"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ({"a": jnp.ones(2)}, {"b": jnp.ones(2)}, "same structure"),
        ({"a": jnp.ones(2)}, {"a": jnp.ones(3)}, r"\['a'\] was float32\[2\].*float32\[3\]"),
        (
            {"a": jnp.ones(2)},
            {"a": jnp.ones(2, jnp.bfloat16)},
            r"bfloat16\[2\](.|\n)*astype\(float32\)",
        ),
        ({"a": "relu"}, {"a": "gelu"}, r"\['a'\] is a str"),
    ],
)
def test_states_that_do_not_match_are_named(old, new, message):
    with pytest.raises(CommitError, match=message):
        jax.eval_shape(functools.partial(commit, old=old, new=new), jnp.bool_(True))


@pytest.mark.parametrize("skip", [jnp.asarray([True, False]), jnp.float32(1.0), 1])
def test_skip_must_be_one_bool(skip):
    with pytest.raises(CommitError, match="skip"):
        commit(skip, {}, {})


GRADS = jnp.asarray([1.0, -2.0])
PARAMS = jnp.asarray([0.5, 0.25])


VECTOR = jnp.asarray([3.0, -0.0])


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


def inside_jit(g, s, p):
    new = jax.jit(lambda s, g: 0.5 * s + g)(s, g)
    return jax.jit(jnp.tanh)(new), new


def inside_cond(g, s, p):
    new = jax.lax.cond(g[0] > 0, lambda s: s + 1, lambda s: s - 1, s)
    return new * 2, new


def inside_scan(g, s, p):
    new, all_of_them = jax.lax.scan(lambda c, x: (c + x, c * x), s, jnp.stack([g, g]))
    return all_of_them.sum(0), new


def random_key(g, s, p):
    key, sub = jax.random.split(s)
    return g + jax.random.normal(sub, (2,)), key


@jax.custom_jvp
def _smooth(x):
    return jnp.where(x > 0, x, 0.0)


_smooth.defjvp(lambda x, t: (_smooth(x[0]), t[0]))


def narrowed(g, s, p):
    new = (0.9 * s.astype(jnp.float32) + g).astype(jnp.bfloat16)
    return new.astype(jnp.float32), new


def twice(update):
    """The new state is the update too."""
    return lambda g, s, p: (update(g, s),) * 2


PAIR = (VECTOR, 2 * VECTOR)
CASES = {
    "momentum": (momentum, VECTOR),
    "the update is the state": (twice(lambda g, s: 0.9 * s + g), VECTOR),
    "passed through": (lambda g, s, p: (g, s), VECTOR),
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
    "counts": (lambda g, s, p: (g / (s + 1), s + 1), jnp.asarray(4, jnp.int32)),
    "chained leaves": (chained_leaves, PAIR),
    "inside jit": (inside_jit, VECTOR),
    "inside cond": (inside_cond, VECTOR),
    "inside scan": (inside_scan, VECTOR),
    "inside while": (
        twice(lambda g, s: jax.lax.while_loop(lambda c: c[0] < 10, lambda c: c + jnp.abs(g), s)),
        VECTOR,
    ),
    "random key": (random_key, jax.random.key(1)),
    "custom rule": (twice(lambda g, s: _smooth(s + g)), VECTOR),
    "precision changes on the way": (narrowed, VECTOR.astype(jnp.bfloat16)),
    "two equal scalars": (
        lambda g, s, p: (g, (s[0] + 1, s[1] + 1)),
        (jnp.asarray(1), jnp.asarray(1)),
    ),
    "no leaves": (lambda g, s, p: (g, s), ()),
    "none": (lambda g, s, p: (g, None), None),
}


@pytest.mark.parametrize(("step", "state"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_skip_keeps_every_bit_and_a_step_is_the_step(step, state, transform):
    run = transform(lambda skip, g, s, p: step_or_keep(step, skip, g, s, p))
    plain = transform(step)

    _, kept = run(jnp.bool_(True), GRADS, state, PARAMS)
    assert_same_bits(kept, state)
    _, kept = run(jnp.bool_(True), GRADS * jnp.nan, state, PARAMS)
    assert_same_bits(kept, state)
    assert_same_bits(
        jax.tree.map(jnp.asarray, run(jnp.bool_(False), GRADS, state, PARAMS)),
        jax.tree.map(jnp.asarray, plain(GRADS, state, PARAMS)),
    )


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_leaf_may_get_a_wider_dtype_and_keeps_its_value(transform):
    wider = twice(lambda g, s: s.astype(jnp.float32) * 0.9 + g)
    state = VECTOR.astype(jnp.bfloat16)
    run = transform(lambda skip, s: step_or_keep(wider, skip, GRADS * jnp.nan, s, PARAMS))
    assert_same_bits(run(jnp.bool_(True), state)[1], VECTOR)


def test_values_from_an_outer_trace_are_seen():
    @jax.jit
    def run(skip, g, s, outer):
        return step_or_keep(lambda g, s, p: (g * outer, s + outer), skip, g, s, None)

    updates, state = run(jnp.bool_(False), GRADS, VECTOR, jnp.float32(3.0))
    assert_same_bits((updates, state), (GRADS * 3, VECTOR + 3))


def test_under_vmap_each_lane_has_its_own_skip():
    skips = jnp.asarray([True, False])
    state = jnp.stack([VECTOR, VECTOR])
    run = jax.jit(jax.vmap(lambda k, s: step_or_keep(momentum, k, GRADS, s, PARAMS)[1]))
    out = run(skips, state)
    assert_same_bits(out[0], VECTOR)
    assert_same_bits(out[1], momentum(GRADS, VECTOR, PARAMS)[1])


def test_gradients_flow_through_a_step_that_is_taken():
    def loss(g, skip):
        return step_or_keep(momentum, skip, g, VECTOR, PARAMS)[1].sum()

    assert jax.grad(loss)(GRADS, jnp.bool_(False)).tolist() == [1.0, 1.0]
    assert jax.grad(loss)(GRADS, jnp.bool_(True)).tolist() == [0.0, 0.0]


N = 1 << 20
LARGE = {f"w{i}": jnp.zeros((N // 1024, 1024)) for i in range(3)} | {"b": jnp.zeros(1024)}
BYTES = 4 * N


def scratch(tx):
    """Temporary bytes of the compiled, donated step."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, LARGE)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(LARGE, state, LARGE).compile()
    memory = compiled.memory_analysis()
    if memory is None:
        pytest.skip("this backend does not report memory")
    return memory.temp_size_in_bytes


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_state_that_changes_its_type_is_an_error(transform):
    for step, message in (
        (lambda g, s, p: (g, (s, s)), "keeps its structure"),
        (lambda g, s, p: (g, s.astype(jnp.bfloat16)), "bfloat16"),
        (lambda g, s, p: (g, s[:1]), "float32"),
    ):
        run = transform(lambda k, s, step=step: step_or_keep(step, k, GRADS, s, PARAMS))
        with pytest.raises(CommitError, match=message):
            run(jnp.bool_(True), VECTOR)


@pytest.mark.parametrize(
    ("policy", "inner"),
    [
        *((name, optax.adamw(1e-3)) for name in ("SKIP", "CUT_LR", "ADAGC", "OBSERVE")),
        ("ZCLIP", optax.sgd(1e-3, momentum=0.9)),
    ],
)
def test_protect_writes_parameters_and_moments_in_place(policy, inner):
    assert scratch(protect(inner, getattr(policies, policy))) < BYTES // 10


def test_heal_zclip_needs_no_copy_of_the_gradients():
    assert scratch(optax.chain(heal_zclip(), optax.adamw(1e-3))) < BYTES // 10
