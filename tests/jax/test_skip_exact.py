"""A skipped step leaves no trace: not in parameters, moments, counters, keys or accumulators."""

# optax types every tree as the union of all trees, so that no leaf has an attribute.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore.jax import last_decision, protect
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits, differs

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
every_optimizer = pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.stress) if x in ALIKE else x for x in OPTIMIZERS]
)
# -0.0 and a value whose update is tiny: both must come back bit for bit.
PARAMS = {
    "w": jnp.linspace(-1.0, 1.0, 12).reshape(3, 4).at[0, 0].set(-0.0),
    "b": jnp.asarray([0.5, -0.0, 1e-3, 3.0], jnp.bfloat16),
}


def gradients(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray((rng.random(p.shape) + 0.5) * scale, p.dtype), PARAMS)


def one_bad_element(value):
    grads = gradients(99)
    return {**grads, "w": grads["w"].at[1, 2].set(value)}


@functools.cache
def training(name):
    """The optimizer's compiled step; three good steps past warm-up have been made."""
    tx = protect(optax.with_extra_args_support(OPTIMIZERS[name]()), policies.SKIP)

    @jax.jit
    def step(params, state, grads, value):
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state, updates

    params, state = PARAMS, tx.init(PARAMS)
    for i in range(policies.WARMUP + 2):
        params, state, _ = step(params, state, gradients(i), jnp.float32(1.0))
    assert not bool(last_decision(state).skip)
    return step, params, state


BAD = {
    "nan": (one_bad_element(jnp.nan), 1.0),
    "inf": (one_bad_element(-jnp.inf), 1.0),
    "finite_spike": (gradients(7, scale=1e4), 1.0),
    "nan_loss": (gradients(7), float("nan")),
}


@every_optimizer
@pytest.mark.parametrize("kind", BAD)
def test_a_skip_changes_no_bit(name, kind):
    step, params, state = training(name)
    grads, value = BAD[kind]
    new_params, new_state, updates = step(params, state, grads, jnp.float32(value))
    assert bool(last_decision(new_state).skip)
    assert_same_bits(new_params, params)
    assert_same_bits(new_state.inner_state, state.inner_state)
    assert all(np.signbit(np.asarray(u, np.float32)).all() for u in jax.tree.leaves(updates))


@every_optimizer
def test_the_run_continues_as_if_the_bad_step_had_never_been(name):
    step, params, state = training(name)
    p, s = params, state
    for kind in ("nan", "finite_spike"):
        grads, value = BAD[kind]
        p, s, _ = step(p, s, grads, jnp.float32(value))
    good = gradients(5)
    p, s, _ = step(p, s, good, jnp.float32(1.0))
    q, t, _ = step(params, state, good, jnp.float32(1.0))
    assert_same_bits(p, q)
    assert_same_bits(s.inner_state, t.inner_state)
    assert differs(s.inner_state, state.inner_state) or name == "sgd"


@every_optimizer
def test_without_a_skip_the_step_is_the_optimizers_own(name):
    step, params, state = training(name)
    inner = optax.with_extra_args_support(OPTIMIZERS[name]())
    grads = gradients(5)
    _, new, updates = step(params, state, grads, jnp.float32(1.0))
    expected, inner_new = jax.jit(inner.update)(grads, state.inner_state, params)
    # Equal up to the last bits: XLA may contract a product into another sum here than there.
    for a, b in zip(
        jax.tree.leaves((updates, new.inner_state)),
        jax.tree.leaves((expected, inner_new)),
        strict=True,
    ):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            assert_same_bits(a, b)
        else:
            rtol = 2e-2 if a.dtype == jnp.bfloat16 else 1e-5
            np.testing.assert_allclose(
                *(np.asarray(x, np.float64) for x in (a, b)), rtol=rtol, atol=1e-6
            )


def test_eager_steps_are_as_exact():
    tx = protect(optax.adamw(0.1), policies.SKIP)
    state = tx.init(PARAMS)
    _, state = tx.update(gradients(0), state, PARAMS, value=1.0)
    updates, new = tx.update(one_bad_element(jnp.nan), state, PARAMS, value=1.0)
    assert_same_bits(optax.apply_updates(PARAMS, updates), PARAMS)
    assert_same_bits(new.inner_state, state.inner_state)


def test_arguments_reach_an_inner_optimizer_that_needs_them():
    def loss(params):
        return jnp.sum((params - 3.0) ** 2)

    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=5, store_grad=True)
    tx = protect(optax.chain(optax.sgd(1.0), search), policies.SKIP)
    params = jnp.zeros(4)
    state = tx.init(params)

    @jax.jit
    def step(params, state, spoil):
        value, grads = optax.value_and_grad_from_state(loss)(params, state=state)
        grads = jnp.where(spoil, jnp.nan, grads)
        updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=loss)
        return optax.apply_updates(params, updates), state

    start, spoiled = step(params, state, True)
    assert_same_bits((start, spoiled.inner_state), (params, state.inner_state))
    for _ in range(10):
        params, state = step(params, state, False)
    np.testing.assert_allclose(params, 3.0, rtol=1e-2)


def test_the_lr_is_cut_in_the_same_run_and_comes_back_to_exactly_one():
    tx = protect(optax.sgd(1.0), policies.CUT_LR)
    update = jax.jit(tx.update)
    params = jnp.zeros(1)
    state = tx.init(params)
    scales, steps = [], []
    for g in [1.0, jnp.nan] + [1.0] * 40:
        updates, state = update(jnp.asarray([g]), state, params, value=jnp.float32(1.0))
        scales.append(float(last_decision(state).lr_scale))
        steps.append(float(updates[0]))
    assert scales[0] == 1.0
    assert min(scales) == 0.5
    assert scales[-1] == 1.0
    np.testing.assert_array_equal(steps, [-s if i != 1 else 0.0 for i, s in enumerate(scales)])


def test_an_update_spike_is_seen_one_step_later():
    tx = protect(optax.scale_by_learning_rate(1.0), policies.UPDATES)
    update = jax.jit(tx.update)
    state = tx.init(jnp.zeros(2))
    skips = []
    for g in [1.0, 1.1, 0.9, 1.0, 1.0, 1e4, 1.0, 1.0]:
        _, state = update(jnp.full(2, g), state)
        skips.append(bool(last_decision(state).skip))
    assert skips == [False] * 6 + [True, False]


def test_each_tensor_has_its_own_factor_under_adagc():
    tx = protect(optax.sgd(1.0), policies.ADAGC)
    update = jax.jit(tx.update)
    params = {"a": jnp.ones(4), "b": jnp.ones((2, 2), jnp.bfloat16), "n": None}
    state = tx.init(params)
    usual = {"a": jnp.full(4, 0.1), "b": jnp.full((2, 2), 0.1, jnp.bfloat16), "n": None}
    for _ in range(policies.WARMUP + 3):
        _, state = update(usual, state, params, value=jnp.float32(1.0))
    spike = {**usual, "a": usual["a"] * 100}
    updates, state = update(spike, state, params, value=jnp.float32(1.0))
    factors = last_decision(state).group_scale
    assert factors.shape == (2,)
    assert float(factors[0]) < 0.02
    assert float(factors[1]) == 1.0
    np.testing.assert_allclose(updates["a"], -0.104, rtol=0.02)
    assert_same_bits(updates["b"], -usual["b"])
