"""A limit of the gradient norm in the state: dynamic, because a traced state has no known value."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore.core.engine import Engine
from healcore.jax import from_dict, heal, last_decision, metrics, protect, to_dict
from healcore.policy import engine_of
from healcore.runtime.run.engine_states import limit_norms
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits

LIMIT, LARGE = 0.5, 4096.0
DEFAULT = engine_of("default")
WITHOUT = Engine(DEFAULT.config, limits_norm=False)
"""The same policy, whose step has none of the operations of a limit."""
LOSS = jnp.float32(1.0)
WEIGHTS = {"w": jnp.zeros(2), "b": jnp.zeros((1, 2), jnp.bfloat16)}
GRADS = {"w": jnp.asarray([3.0, -0.0]), "b": jnp.asarray([[0.0, 4.0]], jnp.bfloat16)}


def limit(state: Any, norm: float, policy: Any = "default") -> Any:
    """The state with a limit as a rollback sets it; 0 releases it."""
    engine = engine_of(policy)
    limited = limit_norms(engine, {"tx": to_dict(state, policy)}, {"tx": norm})
    return from_dict(state, limited["tx"], policy)


CHAINS = {
    "protect": protect(optax.sgd(1.0)),
    "heal": optax.chain(heal("default"), optax.sgd(1.0)),
}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(("protect", how) for how in ("eager", "jit", "donated", "scan")),
        ("heal", "jit"),
        *(
            pytest.param("heal", how, marks=pytest.mark.slow)
            for how in ("eager", "donated", "scan")
        ),
    ],
)
def test_a_large_gradient_is_scaled_to_the_limit(name: str, how: str):
    tx = CHAINS[name]

    def step(carry: Any, factor: Any) -> Any:
        params, state = carry
        grads = jax.tree.map(lambda g: (g * factor).astype(g.dtype), GRADS)
        updates, state = tx.update(grads, state, params, value=LOSS)
        return (optax.apply_updates(params, updates), state), updates

    if how in ("jit", "donated"):
        step = jax.jit(step, donate_argnums=(0,) if how == "donated" else ())
    start = jax.tree.map(jnp.copy, WEIGHTS)
    carry, updates = step((start, tx.init(start)), jnp.float32(1))
    assert float(optax.tree.norm(updates)) == 5.0
    carry = carry[0], limit(carry[1], LIMIT)
    factors = jnp.asarray([1.0, LARGE, 0.01, jnp.nan, LARGE])
    if how == "scan":
        carry, found = jax.jit(lambda c: jax.lax.scan(step, c, factors))(carry)
        found = [jax.tree.map(lambda x, i=i: x[i], found) for i in range(len(factors))]
    else:
        found = []
        for factor in factors:
            carry, updates = step(carry, factor)
            found.append(updates)
    norms = [float(optax.tree.norm(updates)) for updates in found]
    np.testing.assert_allclose(norms, [LIMIT, LIMIT, 0.05, 0, LIMIT], rtol=5e-3)
    numbers = metrics(carry[1])
    assert (int(numbers["heal/clips"]), int(numbers["heal/skips"])) == (3, 1)
    assert float(last_decision(carry[1]).grad_scale) == pytest.approx(LIMIT / (5 * LARGE))
    carry, updates = step((carry[0], limit(carry[1], 0.0)), jnp.float32(1))
    assert float(optax.tree.norm(updates)) == 5.0


def bare(inner: Any) -> Any:
    """An optimizer without healcore."""
    return optax.with_extra_args_support(inner)


def protected(inner: Any) -> Any:
    return protect(inner, DEFAULT)


def protected_without_limit(inner: Any) -> Any:
    return protect(inner, WITHOUT)


def after_heal(inner: Any) -> Any:
    return optax.chain(heal(DEFAULT), inner)


def trained(tx: Any, how: str) -> Any:
    """Weights and state after 50 steps of a small network."""
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(32, 8)), jnp.float32)
    params = [jnp.asarray(random.normal(0, 0.3, s), jnp.float32) for s in ((8, 16), (16,), (16, 1))]
    params.append(jnp.zeros(3))

    def loss(params: Any, i: Any) -> Any:
        w, b, v, odd = params
        error = jnp.tanh(x * (1 + 0.1 * i) @ w + b) @ v - x[:, :1]
        return jnp.mean(error**2) + jnp.sum(odd * jnp.asarray([-0.0, 1e-30, 1.0]))

    value_and_grad = jax.value_and_grad(loss)

    def update(carry: Any, value: Any, grads: Any) -> Any:
        params, state = carry
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    def step(carry: Any, i: Any) -> Any:
        return update(carry, *value_and_grad(carry[0], i)), None

    carry = params, tx.init(params)
    if how == "scan":
        carry, _ = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(50.0)))(carry)
    else:
        step = jax.jit(step, donate_argnums=(0,) if how == "donated" else ())
        for i in range(50):
            carry, _ = step(carry, jnp.float32(i))
    return carry


EXACT = {
    "sgd": optax.sgd(1e-2),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "nesterov": optax.sgd(1e-2, momentum=0.9, nesterov=True),
}
COVERING = [("sgd", "jit"), ("momentum", "donated"), ("nesterov", "scan")]
"""Each optimizer and each way to run it once. Each pair needs four programs of its own."""


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *COVERING,
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in itertools.product(EXACT, ("jit", "donated", "scan"))
            if pair not in COVERING
        ),
    ],
)
def test_without_a_limit_nothing_changes_a_bit(name: str, how: str):
    """Also -0.0. LLVM contracts no product of healcore into a sum of the optimizer."""
    inner = EXACT[name]
    expected, state = trained(bare(inner), how)
    weights, protected_state = trained(protected(inner), how)
    assert_same_bits((weights, protected_state.inner_state), (expected, state))
    weights, (_, state_after_heal) = trained(after_heal(inner), how)
    assert_same_bits((weights, state_after_heal), (expected, state))


@pytest.mark.parametrize(
    "inner",
    [
        pytest.param(optax.adamw(1e-2), id="adamw"),
        pytest.param(optax.lion(1e-3), id="lion", marks=pytest.mark.slow),
    ],
)
def test_without_a_limit_moving_averages_may_differ_in_the_last_bits_only(inner: Any):
    """LLVM chooses which product of `a * b + c * d` it contracts into the sum."""
    wraps = (protected, after_heal, protected_without_limit)
    expected, _ = trained(bare(inner), "donated")
    for wrap in wraps:
        weights, _ = trained(wrap(inner), "donated")
        for one, other in zip(weights, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_per_tensor_factors_are_at_most_that_of_the_limit():
    tx = protect(optax.sgd(1.0), policies.ADAGC)
    params = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    state = tx.init(params)
    update = jax.jit(tx.update)
    usual = {"a": jnp.asarray([0.3, 0.0]), "b": jnp.asarray([0.4, 0.0])}
    for _ in range(policies.WARMUP + 2):
        _, state = update(usual, state, params, value=LOSS)
    state = limit(state, 0.1, policies.ADAGC)
    updates, state = update(usual, state, params, value=LOSS)
    np.testing.assert_allclose(float(optax.tree.norm(updates)), 0.1, rtol=1e-4)
    np.testing.assert_allclose(last_decision(state).group_scale, [0.2, 0.2], rtol=1e-4)


def test_in_observe_mode_and_in_a_lane_without_a_limit_nothing_changes():
    tx = protect(optax.sgd(1.0), "default", mode="observe")
    engine = engine_of("default", {"mode": "observe"})
    state = limit(tx.init(WEIGHTS), LIMIT, engine)
    updates, state = jax.jit(tx.update)(GRADS, state, WEIGHTS, value=LOSS)
    assert float(optax.tree.norm(updates)) == 5.0

    tx = CHAINS["protect"]
    fresh = tx.init(WEIGHTS)
    lanes = jax.tree.map(lambda a, b: jnp.stack([a, b]), fresh, limit(fresh, LIMIT))
    update = jax.vmap(lambda state: tx.update(GRADS, state, WEIGHTS, value=LOSS)[0])
    norms = jax.vmap(optax.tree.norm)(jax.jit(update)(lanes))
    np.testing.assert_allclose(norms, [5.0, LIMIT], rtol=5e-3)
