"""Numbers of a policy as arrays: thousands of variants in one program equal one run each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from healcore.core.clipping import RULES
from healcore.core.engine import Engine, EngineConfig
from healcore.core.tree import map_leaves
from tests.core import fuzz, policies
from tests.parity import backends, lockstep

VARIANTS, STEPS = 500, 120


def zclip_variants(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """ZClipConfig's numbers, one per variant."""
    draw = {
        "z_threshold": rng.uniform(1.0, 6.0, VARIANTS),
        "ema_decay": rng.uniform(0.8, 0.999, VARIANTS),
        "max_norm": rng.uniform(0.1, 100.0, VARIANTS),
        "min_rel_std": rng.uniform(0.001, 0.1, VARIANTS),
    }
    numbers: dict[str, np.ndarray] = {k: v.astype(np.float32) for k, v in draw.items()}
    return numbers | {"warmup_steps": rng.integers(1, 60, VARIANTS).astype(np.int32)}


def policy(numbers: dict[str, Any]) -> EngineConfig:
    """A ZClip policy; the rest as in the other tests."""
    config = RULES["zclip"](**numbers)
    return policies.full("zclip")._replace(
        clip=("zclip", config), detectors=policies.full().detectors[:2]
    )


def test_vmap_over_policies_equals_one_run_each():
    rng = np.random.default_rng(70)
    numbers = zclip_variants(rng)
    trace = lockstep.scalar(fuzz.signals(rng, STEPS, 1, wild=False), 0)

    def run(numbers: Any) -> Any:
        engine = Engine(policy(numbers))
        state = map_leaves(jnp.asarray, engine.init())
        body = lambda s, x: engine.step(s, x, xp=jnp)  # noqa: E731
        return jax.lax.scan(body, state, map_leaves(jnp.asarray, trace))

    last, decisions = jax.jit(jax.vmap(run))({k: jnp.asarray(v) for k, v in numbers.items()})
    got = map_leaves(np.asarray, (last, decisions))
    assert len({float(x) for x in got[0].clip.mean}) > VARIANTS // 2, "the variants do differ"
    for i in rng.choice(VARIANTS, 15, replace=False):
        plain = {k: v[i].item() for k, v in numbers.items()}  # Python numbers, as from a TOML file
        engine = Engine(policy(plain))
        host = backends.runner("host", engine)
        _, states, alone = host(backends.start("host", engine.init()), trace)
        mine = map_leaves(lambda leaf, i=i: leaf[i : i + 1], got[0])
        theirs = map_leaves(lambda leaf: leaf[-1:], states)
        assert lockstep.first_difference(mine, theirs) is None, plain
        mine = map_leaves(lambda leaf, i=i: leaf[i], got[1])
        assert lockstep.first_difference(mine, alone) is None, plain
