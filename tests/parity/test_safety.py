"""Fuzzed steps: the state stays finite, factors in [0, 1], no bad gradient is accepted.

Some 200,000 of them, and ten million with every detector under `stress`.

As JAX lanes, in one jitted scan per policy that returns counts of violations only. NumPy does the
same sum over the same trace for a part of it, so that the counting itself is checked.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from healcore.core.engine import Engine
from healcore.core.signals import Signals
from healcore.core.tree import leaves, map_leaves
from healcore.core.verdict import Decision
from tests.core import fuzz, policies
from tests.parity import backends

CHUNK = 100
# Lanes per policy, of 1,000 steps each; a histogram per lane is a thousand times the memory.
LANES = {"zclip": 4000, "zclip-max": 2000, "fixed": 2000, "adagc": 1900, "autoclip": 100}


def violations(state: Any, decision: Decision, signals: Signals, xp: Any) -> dict[str, Any]:
    """How often each promise was broken at this step, over all lanes."""
    finite = [xp.isfinite(leaf).all() for leaf in leaves(state) if leaf.dtype == np.float32]
    factors = [decision.grad_scale, decision.lr_scale, decision.group_scale]
    outside = [~((x >= 0) & (x <= 1)).all() for x in factors if x is not None]
    bad = ~xp.isfinite(signals.grad_norm)
    if signals.group_norms is not None:
        bad = bad | ~xp.isfinite(signals.group_norms).all(-1)
    skipped, deep = signals.externally_skipped, decision.rollback_depth > 0
    return {
        "state not finite": ~xp.stack(finite).all(),
        "factor outside [0, 1]": xp.stack(outside).any(),
        "learning rate zero": (decision.lr_scale <= 0).any(),
        "bad gradient accepted": (bad & ~decision.skip & ~skipped).any(),
        "skip on an externally skipped step": (decision.skip & skipped).any(),
        "depth without rollback": (deep != (decision.action & 4 > 0)).any(),
    }


@pytest.mark.parametrize("clip", LANES)
@pytest.mark.parametrize(
    ("policy", "share"),
    [(policies.covering, 50), pytest.param(policies.full, 1, marks=pytest.mark.stress)],
    ids=["some", "all"],
)
def test_a_thousand_steps_of_hundreds_of_runs(clip, policy, share):
    groups = policies.GROUPS if clip == "adagc" else 0
    engine, lanes = Engine(policy(clip)), LANES[clip] // share

    @jax.jit
    def run(state: Any, trace: Signals) -> Any:
        def body(state: Any, signals: Signals) -> Any:
            state, decision = engine.step(state, signals, xp=jnp)
            return state, violations(state, decision, signals, jnp)

        state, broken = jax.lax.scan(body, state, trace)
        return state, {name: each.sum() for name, each in broken.items()}

    state = map_leaves(jnp.asarray, engine.init(groups=groups, batch=(lanes,)))
    kinds = [(leaf.dtype, leaf.shape) for leaf in leaves(state)]
    total: dict[str, int] = {}
    rng = np.random.default_rng(80)
    for _ in range(1000 // CHUNK):
        trace = fuzz.signals(rng, CHUNK, lanes, groups=groups)
        state, broken = run(state, map_leaves(jnp.asarray, trace))
        for name, count in broken.items():
            total[name] = total.get(name, 0) + int(count)
    assert total == dict.fromkeys(total, 0)
    assert [(leaf.dtype, leaf.shape) for leaf in leaves(state)] == kinds
    assert int(state.tally.skips.min()) >= 0
    assert int(state.step.max()) > 900


def test_a_broken_promise_is_counted():
    """The planted error: a skip that is not enforced, a state with a NaN, a factor of 2."""
    engine = Engine(policies.full("zclip"))
    signals = fuzz.at(fuzz.signals(np.random.default_rng(0), 60, 500), 30)
    signals = signals._replace(externally_skipped=np.zeros(500, bool))
    state, decision = engine.step(engine.init(batch=(500,)), signals, xp=np)
    assert not any(violations(state, decision, signals, np).values())
    none = np.zeros(500, bool)
    worse = decision._replace(skip=none, grad_scale=2 * decision.grad_scale)
    state = state._replace(clip=state.clip._replace(mean=np.full(500, np.nan, np.float32)))
    found = violations(state, worse, signals, np)
    for promise in ("bad gradient accepted", "factor outside [0, 1]", "state not finite"):
        assert found[promise]


@pytest.mark.parametrize("which", policies.PUBLISHED)
def test_the_same_promises_with_the_detectors_of_the_catalogue(which):
    engine = Engine(policies.published(which))
    trace = fuzz.signals(np.random.default_rng(82), 300, 300)
    run = backends.runner("numpy", engine)
    _, states, decisions = run(backends.start("numpy", engine.init(batch=(300,))), trace)
    assert not any(violations(states, decisions, trace, np).values())
