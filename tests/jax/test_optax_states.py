"""States of optax: the LR multiplier, second iterates, and moments that are reset."""

# optax types every tree as the union of all trees, so that no leaf has an attribute.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.tree_util import GetAttrKey, SequenceKey
from optax import contrib

from healcore.core.detectors import GradSpikeConfig
from healcore.core.engine import EngineConfig, LrConfig, RuleConfig
from healcore.core.verdict import Action, Cause
from healcore.jax import (
    HealStateError,
    heal,
    last_decision,
    optax_states,
    protect,
    scale_by_heal_lr,
)
from healcore.jax.driver.driver import JaxDriver
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits
from tests.jax.driver.small_runs import POLICY, advance, batch, plain

PARAMS = {"w": jnp.ones(2), "b": jnp.ones(2, jnp.bfloat16)}


def test_the_host_cuts_the_rate_of_a_chain_without_a_new_compilation():
    tx = optax.chain(optax.sgd(lambda count: 1.0), scale_by_heal_lr())
    update = jax.jit(tx.update)
    state = tx.init(PARAMS)
    updates, state = update(PARAMS, state, PARAMS)
    assert updates["w"].tolist() == [-1.0, -1.0]
    state = optax.tree.set(state, heal_lr_scale=jnp.float32(0.5))
    updates, state = update(PARAMS, state, PARAMS)
    assert updates["w"].tolist() == [-0.5, -0.5]
    assert updates["b"].dtype == jnp.bfloat16
    assert update._cache_size() == 1


def schedule_free(base):
    return contrib.schedule_free(base, 0.1)


def sam(base):
    return contrib.sam(base, optax.chain(contrib.normalize(), optax.sgd(0.05)))


@pytest.mark.parametrize(("wrapper", "period"), [(schedule_free, 1), (sam, 2)])
def test_a_cut_reaches_the_second_iterate(wrapper, period):
    """It is what the same rates give as a schedule of the base optimizer."""
    tx = protect(wrapper(optax.chain(optax.sgd(0.1), scale_by_heal_lr())), policies.CUT_LR)
    update, params, gradient = jax.jit(tx.update), jnp.ones(2), jnp.array([1.0, -3.0])
    state, scales = tx.init(params), []
    for number in range(12):
        bad = number == 2
        updates, state = update(gradient * (jnp.nan if bad else 1.0), state, params)
        params = optax.apply_updates(params, updates)
        if not bad:
            scales.append(float(last_decision(state).lr_scale))
    assert min(scales) == 0.5
    rates = 0.1 * jnp.array(scales[period - 1 :: period])
    reference = wrapper(optax.sgd(lambda count: rates[count]))
    expected, base = jnp.ones(2), reference.init(jnp.ones(2))
    for _ in scales:
        updates, base = reference.update(gradient, base, expected)
        expected = optax.apply_updates(expected, updates)
    np.testing.assert_allclose(np.asarray(params), np.asarray(expected), rtol=1e-6)
    second = "z" if wrapper is schedule_free else "cache"
    found: list[Any] = [optax.tree.get(each, second) for each in (state, base)]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)


@pytest.mark.parametrize("wrapper", [schedule_free, sam, lambda base: contrib.madgrad(0.1)])
def test_a_cut_that_would_not_reach_the_second_iterate_is_refused(wrapper):
    inner = wrapper(optax.sgd(0.1))
    with pytest.raises(HealStateError, match="second iterate"):
        protect(inner, policies.CUT_LR).init(PARAMS["w"])
    protect(inner, "zclip").init(PARAMS["w"])  # cuts nothing
    protect(inner, "observe").init(PARAMS["w"])


# -- moments --------------------------------------------------------------------------------------

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
def test_it_continues_as_a_new_optimizer(name):
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
def test_the_schedule_continues_and_nothing_is_compiled_again(wrap):
    run = plain(optax.adamw(WARM), wrap=wrap)
    driver = JaxDriver(run.state, POLICY)
    advance(driver, run, [batch(seed) for seed in range(4)])
    assert driver.moments_obstacle() == ""
    compiled = run.compiled()
    driver.load(None, reset_moments=True)
    state = driver.live["opt_state"]
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


# -- `[lr] reset_moments`: the step after a cut begins with new moments ---------------------------

SPIKE, MANY = 12, 20
_RULE = RuleConfig(int(Cause.GRAD_SPIKE), action=int(Action.CUT_LR))
CUTS = EngineConfig(
    detectors=(("grad_spike", GradSpikeConfig(window=5)),),
    rules=(_RULE,),
    lr=LrConfig(factor=0.5, hold_steps=30, reset_moments=True),
)
KEEPS = CUTS._replace(lr=CUTS.lr._replace(reset_moments=False))
OBSERVES = CUTS._replace(mode="observe")
SKIPS_TOO = CUTS._replace(rules=(_RULE._replace(skip=True),))


ZEROS = {"w": jnp.zeros((2, 3))}


def spiked(policy: EngineConfig, inner: Any = None, *, jit: bool = True) -> Any:
    """The state of an optimizer after steps of which one has a gradient 1,000 times as large."""
    return states(policy, inner or optax.adamw(1e-2), jit=jit)[-1].inner_state


def states(policy: EngineConfig, inner: Any, *, jit: bool = True, bad: int = -1) -> list[Any]:
    """The state after each step; the gradient of the step `bad` is NaN."""
    tx = protect(inner, policy)
    found: list[Any] = [tx.init(ZEROS)]
    update = jax.jit(tx.update) if jit else tx.update
    for i in range(MANY):
        size = {SPIKE: 1000.0, bad: jnp.nan}.get(i, 1.0)
        grad = jax.random.normal(jax.random.key(i), (2, 3)) * size
        found.append(update({"w": grad}, found[-1], ZEROS, value=jnp.float32(1.0))[1])
    return found[1:]


@pytest.mark.parametrize("jit", [True, False])
def test_the_step_after_the_cut_is_the_first_of_new_moments(jit: bool):
    state = spiked(CUTS, jit=jit)
    assert int(optax.tree.get(state, "count")) == MANY - SPIKE - 1
    assert float(jnp.max(optax.tree.get(state, "nu")["w"])) < 100.0


def test_a_skipped_step_after_the_cut_changes_nothing_and_the_reset_waits():
    found = states(CUTS, optax.adamw(1e-2), bad=SPIKE + 1)
    cut, skipped, after = found[SPIKE : SPIKE + 3]
    assert bool(last_decision(skipped).skip)
    assert_same_bits(skipped.inner_state, cut.inner_state)
    assert int(optax.tree.get(skipped, "count")) == SPIKE + 1
    assert int(optax.tree.get(after, "count")) == 1
    assert [bool(each.heal_reset_moments) for each in (cut, skipped, after)] == [True, True, False]


@pytest.mark.parametrize("policy", [KEEPS, OBSERVES, SKIPS_TOO], ids=["off", "observe", "skipped"])
def test_otherwise_they_stay(policy: EngineConfig):
    assert int(optax.tree.get(spiked(policy), "count")) == MANY - (policy is SKIPS_TOO)


def test_a_schedule_continues():
    inner = optax.adamw(optax.linear_schedule(1e-2, 0.0, 100))
    counts = [int(n) for _, n in optax.tree.get_all_with_path(spiked(CUTS, inner), "count")]
    assert sorted(counts) == [MANY - SPIKE - 1, MANY]


def test_a_state_that_is_not_known_stays():
    kept, reset = (spiked(policy, contrib.prodigy(1e-2)) for policy in (KEEPS, CUTS))
    assert jax.tree.structure(kept) == jax.tree.structure(reset)
    assert all(map(np.array_equal, jax.tree.leaves(kept), jax.tree.leaves(reset)))
