"""A fixed clip has the bits of `optax.clip_by_global_norm`, which it replaces."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore.jax import heal, metrics, protect
from healcore.policy import load
from tests.jax.bit_comparison import assert_same_bits
from tests.jax.test_norm_limit import limit

CLIP = {"max_norm": 0.1}
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.01),
    "adamw": lambda: optax.adamw(0.01),
    "rmsprop": lambda: optax.rmsprop(0.01),
    "adagrad": lambda: optax.adagrad(0.01),
    "nadam": lambda: optax.nadam(0.01),
}
WAYS = {
    "protect": lambda inner: protect(inner, clip=CLIP),
    "heal": lambda inner: optax.chain(heal(clip=CLIP), inner),
}


def weights(dtype: Any = jnp.float32) -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(40, 30), (30,), (30, 3)]
    arrays = [jax.random.normal(k, s).astype(dtype) for k, s in zip(keys, shapes, strict=True)]
    return {"w": arrays[0], "b": arrays[1], "head": {"w": arrays[2]}}


def gradients_of(params: Any, i: int, scale: float) -> Any:
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(100 + i), len(leaves))
    return structure.unflatten(
        (scale * jax.random.normal(key, leaf.shape)).astype(leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    )


def runs(mine: Any, twin: Any, params: Any, *, count: int = 8) -> tuple[Any, Any]:
    """The parameters of both optimizers after steps of which some are clipped."""

    def stepping(tx: Any) -> Any:
        def step(params: Any, state: Any, grads: Any) -> Any:
            updates, state = tx.update(grads, state, params, value=jnp.float32(1.0))
            return optax.apply_updates(params, updates), state

        return jax.jit(step)

    found = []
    for tx in (mine, optax.with_extra_args_support(twin)):
        now = params
        state = tx.init(params)
        step = stepping(tx)
        for i in range(count):
            grads = gradients_of(params, i, 1.0 if i % 2 else 0.1 / 1350**0.5)
            now, state = step(now, state, grads)
        found.append((now, state))
    assert 0 < int(metrics(found[0][1])["heal/clips"]) < count
    return found[0][0], found[1][0]


CASES = [*((name, "protect") for name in OPTIMIZERS), ("momentum", "heal")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_fixed_clip_has_the_bits_of_optax(name: str, way: str):
    inner = OPTIMIZERS[name]
    twin = optax.chain(optax.clip_by_global_norm(0.1), inner())
    assert_same_bits(*runs(WAYS[way](inner()), twin, weights()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "momentum"])
def test_without_averages_also_the_optimized_program_has_the_bits(name: str):
    """Where XLA optimizes, it computes a moving average in another way in each program."""
    few = jax.config.read("jax_disable_most_optimizations")
    try:
        jax.config.update("jax_disable_most_optimizations", False)
        test_a_fixed_clip_has_the_bits_of_optax(name, "protect")
    finally:
        jax.config.update("jax_disable_most_optimizations", few)


def test_a_half_precision_norm_that_overflows_is_clipped_in_float32():
    """Optax divides by an infinite norm here, and the step is lost."""
    params = {"w": jnp.zeros(4, jnp.float16)}
    tx = protect(optax.sgd(1.0), clip={"max_norm": 1.0})
    grads = {"w": jnp.full(4, 60_000.0, jnp.float16)}
    updates, _ = tx.update(grads, tx.init(params), params, value=jnp.float32(1.0))
    np.testing.assert_allclose(updates["w"], -0.5, rtol=1e-3)


def test_a_limit_of_a_rollback_applies_beside_the_clip():
    """The lower of both limits is in force, and its release restores the bits of the clip."""
    policy = {"clip": {"max_norm": 3.0}}
    tx = protect(optax.sgd(1.0), **policy)
    loaded = load("default", **policy)
    params = weights()
    update = jax.jit(tx.update)
    clip = optax.clip_by_global_norm(3.0)
    expected = jax.jit(clip.update)
    state = tx.init(params)
    for i, norm in enumerate([0.0, 0.5, 10.0, 0.0]):
        state = limit(state, norm, loaded)
        grads = gradients_of(params, i, 1.0)
        updates, state = update(grads, state, params, value=jnp.float32(1.0))
        if norm == 0.0:
            twin, _ = expected(grads, optax.EmptyState())
            assert_same_bits(updates, jax.tree.map(lambda g: -1.0 * g, twin))
        assert float(optax.tree.norm(updates)) == pytest.approx(0.5 if norm == 0.5 else 3.0, 1e-5)


def test_frozen_parameters_do_not_count():
    """Their gradients change no update, and healcore does not judge them."""
    labels = {"w": "train", "b": "train", "head": {"w": "freeze"}}
    kinds = {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()}
    tx = protect(optax.partition(kinds, labels), clip=CLIP)
    params = weights()
    grads = gradients_of(params, 0, 1.0)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params, value=jnp.float32(1.0))
    trained = {name: grads[name] for name in ("w", "b")}
    clipped, _ = jax.jit(optax.clip_by_global_norm(0.1).update)(trained, optax.EmptyState())
    expected = jax.tree.map(lambda g: -0.1 * g, clipped)
    assert_same_bits({name: updates[name] for name in expected}, expected)
    assert not np.any(updates["head"]["w"])
