"""What makes `protect` cheap, held by counts of bytes instead of by a clock."""

import jax
import jax.numpy as jnp
import optax
import pytest

from healcore.jax import heal_zclip, protect
from healcore.jax.commit import step_or_keep
from tests.jax import policies

N = 1 << 20
PARAMS = {f"w{i}": jnp.zeros((N // 1024, 1024)) for i in range(3)} | {"b": jnp.zeros(1024)}
BYTES = 4 * N


def scratch(step, state):
    """Temporary bytes of the compiled, donated step."""
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(PARAMS, state, PARAMS).compile()
    memory = compiled.memory_analysis()
    if memory is None:
        pytest.skip("this backend does not tell")
    return memory.temp_size_in_bytes


def of(tx):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return scratch(step, jax.eval_shape(tx.init, PARAMS))


@pytest.mark.parametrize(
    "inner", [optax.adamw(1e-3), optax.sgd(1e-3, momentum=0.9)], ids=["adamw", "sgd"]
)
@pytest.mark.parametrize("policy", ["ZCLIP", "SKIP", "CUT_LR", "ADAGC", "OBSERVE"])
def test_protect_writes_parameters_and_moments_in_place(inner, policy):
    assert of(protect(inner, getattr(policies, policy))) < BYTES // 10


def test_heal_zclip_needs_no_copy_of_the_gradients():
    assert of(optax.chain(heal_zclip(), optax.adamw(1e-3))) < BYTES // 10


def test_selecting_the_results_would_copy_every_moment():
    """The alternative that looks simpler; if XLA learns to do this in place, use it."""
    tx = optax.adamw(1e-3)

    def skip(grads):
        return ~jnp.isfinite(optax.tree.norm(grads))

    def plain(params, state, grads):
        updates, new = tx.update(grads, state, params)
        bad = skip(grads)
        kept = jax.tree.map(lambda a, b: jnp.where(bad, a, b), state, new)
        updates = jax.tree.map(lambda u: jnp.where(bad, -0.0, u), updates)
        return optax.apply_updates(params, updates), kept

    def here(params, state, grads):
        bad = skip(grads)
        # Not for the in-place update but for another copy: without it the norm and the second
        # moment share one square of the gradients, and XLA writes that out.
        grads = jax.tree.map(lambda g: jnp.where(bad, 0.0, g), grads)
        updates, kept = step_or_keep(tx.update, bad, grads, state, params)
        updates = jax.tree.map(lambda u: jnp.where(bad, -0.0, u), updates)
        return optax.apply_updates(params, updates), kept

    state = jax.eval_shape(tx.init, PARAMS)
    assert scratch(plain, state) > BYTES
    assert scratch(here, state) < BYTES // 10
