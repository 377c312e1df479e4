"""`[lr] reset_moments`: the step after a cut of the learning rate begins with new moments."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from healcore.core.detectors import GradSpikeConfig
from healcore.core.engine import EngineConfig, LrConfig, RuleConfig
from healcore.core.verdict import Action, Cause
from healcore.jax import last_decision, protect
from tests.jax.bit_comparison import assert_same_bits

SPIKE, STEPS = 12, 20
_RULE = RuleConfig(int(Cause.GRAD_SPIKE), action=int(Action.CUT_LR))
CUTS = EngineConfig(
    detectors=(("grad_spike", GradSpikeConfig(window=5)),),
    rules=(_RULE,),
    lr=LrConfig(factor=0.5, hold_steps=30, reset_moments=True),
)
KEEPS = CUTS._replace(lr=CUTS.lr._replace(reset_moments=False))
OBSERVES = CUTS._replace(mode="observe")
SKIPS_TOO = CUTS._replace(rules=(_RULE._replace(skip=True),))


PARAMS = {"w": jnp.zeros((2, 3))}


def run(policy: EngineConfig, inner: Any = optax.adamw(1e-2), *, jit: bool = True) -> Any:  # noqa: B008
    """The state of an optimizer after steps of which one has a gradient 1,000 times as large."""
    return states(policy, inner, jit=jit)[-1].inner_state


def states(policy: EngineConfig, inner: Any, *, jit: bool = True, bad: int = -1) -> list[Any]:
    """The state after each step; the gradient of the step `bad` is NaN."""
    tx = protect(inner, policy)
    found: list[Any] = [tx.init(PARAMS)]
    update = jax.jit(tx.update) if jit else tx.update
    for i in range(STEPS):
        size = {SPIKE: 1000.0, bad: jnp.nan}.get(i, 1.0)
        grad = jax.random.normal(jax.random.key(i), (2, 3)) * size
        found.append(update({"w": grad}, found[-1], PARAMS, value=jnp.float32(1.0))[1])
    return found[1:]


@pytest.mark.parametrize("jit", [True, False])
def test_the_step_after_the_cut_is_the_first_of_new_moments(jit: bool):
    state = run(CUTS, jit=jit)
    assert int(optax.tree.get(state, "count")) == STEPS - SPIKE - 1
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
    assert int(optax.tree.get(run(policy), "count")) == STEPS - (policy is SKIPS_TOO)


def test_a_schedule_continues():
    inner = optax.adamw(optax.linear_schedule(1e-2, 0.0, 100))
    counts = [int(n) for _, n in optax.tree.get_all_with_path(run(CUTS, inner), "count")]
    assert sorted(counts) == [STEPS - SPIKE - 1, STEPS]


def test_a_state_that_is_not_known_stays():
    kept, reset = (run(policy, contrib.prodigy(1e-2)) for policy in (KEEPS, CUTS))
    assert jax.tree.structure(kept) == jax.tree.structure(reset)
    assert all(map(np.array_equal, jax.tree.leaves(kept), jax.tree.leaves(reset)))
