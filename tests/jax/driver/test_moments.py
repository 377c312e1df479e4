"""`[rollback] reset_moments`: after it an optax optimizer has the moments of a new one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.tree_util import GetAttrKey, SequenceKey
from optax import contrib

from healcore.jax import heal, optax_states, protect, scale_by_heal_lr
from healcore.jax.driver import JaxDriver
from tests.jax.driver.small_runs import POLICY, advance, batch, plain

WARM = optax.warmup_cosine_decay_schedule(0.0, 1e-2, warmup_steps=6, decay_steps=40)
KNOWN: dict[str, Any] = {
    "sgd": optax.sgd(1e-2),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "adamw": optax.adamw(1e-2),
    "amsgrad": optax.amsgrad(1e-2),
    "lion": optax.lion(1e-2),
    "adafactor": optax.adafactor(1e-2),
    "adabelief": optax.adabelief(1e-2),
    "adan": optax.adan(1e-2),
    "muon": contrib.muon(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "injected": optax.inject_hyperparams(optax.adamw)(1e-2),
    "accumulated": optax.MultiSteps(optax.adamw(1e-2), every_k_schedule=2),
}
UNKNOWN: dict[str, Any] = {
    "rmsprop, whose second moment may begin anywhere": optax.rmsprop(1e-2),
    "schedule-free, whose state has parameters": contrib.schedule_free(
        optax.chain(optax.adamw(1e-2, b1=0.0), scale_by_heal_lr()), 1e-2
    ),
    "prodigy": contrib.prodigy(1e-2),
}


def in_a_chain(inner: Any, policy: Any) -> Any:
    return optax.chain(heal(policy), inner)


@pytest.mark.parametrize("name", KNOWN)
def test_it_goes_on_as_a_new_optimizer(name):
    tx = KNOWN[name]
    params = {"w": jnp.linspace(-1.0, 1.0, 12).reshape(4, 3), "b": jnp.ones(3)}
    update = jax.jit(tx.update)

    def go(state: Any, seeds: range) -> tuple[Any, Any]:
        updates = None
        for seed in seeds:
            key = jax.random.key(seed)
            grads = jax.tree.map(lambda p, key=key: jax.random.normal(key, p.shape), params)
            updates, state = update(grads, state, params)
        return updates, state

    _, used = go(tx.init(params), range(4))
    assert optax_states.moments_obstacle((used,), [(SequenceKey(0), SequenceKey(0))]) == ""
    ours, _ = go(optax_states.reset_moments(used, jnp.zeros_like), range(10, 14))
    theirs, _ = go(tx.init(params), range(10, 14))
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("wrap", [protect, in_a_chain])
def test_the_schedule_goes_on_and_nothing_is_compiled_again(wrap):
    run = plain(optax.adamw(WARM), wrap=wrap)
    driver = JaxDriver(run.state, POLICY)
    advance(driver, run, [batch(seed) for seed in range(4)])
    assert driver.moments_obstacle() == ""
    compiled = run.compiled()
    driver.reset_moments()
    state = driver.state["opt_state"]
    adam, *_, schedule = state.inner_state if wrap is protect else state[1]
    assert int(adam.count) == 0
    assert int(schedule.count) == 4
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves((adam.mu, adam.nu)))
    advance(driver, run, [batch(9)])
    assert run.compiled() == compiled


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_refused(name):
    state = protect(UNKNOWN[name], POLICY).init({"w": jnp.ones((4, 3))})
    assert "inner_state" in optax_states.moments_obstacle(state, [(GetAttrKey("heal"),)])
