"""Numbers of a policy as arrays: thousands of variants in one program equal one run each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from healcore.core.clipping import RULES
from healcore.core.detectors import DETECTORS
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


def vmapped(
    policy: Callable[[Any], EngineConfig], numbers: Any, trace: Any, rng: np.random.Generator
) -> Any:
    """Last states and decisions of all variants; some of them are compared with runs of their own.

    Args:
        policy: takes the numbers of one variant.
        numbers: a tree of arrays with an element for each variant.
        trace: scalar signals.
        rng: chooses the variants that are compared.
    """

    def run(numbers: Any) -> Any:
        engine = Engine(policy(numbers))
        state = map_leaves(jnp.asarray, engine.init())
        body = lambda s, x: engine.step(s, x, xp=jnp)  # noqa: E731
        return jax.lax.scan(body, state, map_leaves(jnp.asarray, trace))

    got = jax.jit(jax.vmap(run))(jax.tree.map(jnp.asarray, numbers))
    last, decisions = map_leaves(np.asarray, got)
    for i in rng.choice(VARIANTS, 15, replace=False):
        plain = jax.tree.map(lambda v, i=i: v[i].item(), numbers)  # as from a TOML file
        engine = Engine(policy(plain))
        host = backends.runner("host", engine)
        _, states, alone = host(backends.start("host", engine.init()), trace)
        mine = map_leaves(lambda leaf, i=i: leaf[i : i + 1], last)
        theirs = map_leaves(lambda leaf: leaf[-1:], states)
        assert lockstep.first_difference(mine, theirs) is None, plain
        mine = map_leaves(lambda leaf, i=i: leaf[i], decisions)
        assert lockstep.first_difference(mine, alone) is None, plain
    return last, decisions


def test_vmap_over_policies_equals_one_run_each():
    rng = np.random.default_rng(70)
    numbers = zclip_variants(rng)
    trace = lockstep.scalar(fuzz.signals(rng, STEPS, 1, wild=False), 0)
    last, _ = vmapped(policy, numbers, trace, rng)
    assert len({float(x) for x in last.clip.mean}) > VARIANTS // 2, "the variants do differ"


CATALOGUE: dict[str, dict[str, tuple[float, float]]] = {
    "loss_window": {"sigmas": (1.0, 8.0), "min_rel_std": (1e-4, 0.1), "warmup_steps": (2, 24)},
    "grad_window": {"sigmas": (1.0, 8.0), "min_rel_std": (1e-4, 0.1), "sustain": (1, 6)},
    "grad_ema": {"ratio": (1.5, 20), "sigmas": (2, 20), "ema_decay": (0.8, 0.999)},
    "grad_ceiling": {"ceiling": (1, 100), "first_ratio": (1.5, 10), "first_steps": (1, 40)},
    "loss_ratio": {
        "ratio": (1.01, 6),
        "warmup_steps": (1, 24),
        "sustain": (1, 6),
        "escape": (1, 20),
    },
    "loss_ceiling": {"ceiling": (0, 12), "first_ratio": (1, 3), "first_steps": (0, 50)},
}
"""The numbers of the catalogue's detectors, and where they are drawn from."""


WHOLE = ("warmup_steps", "sustain", "first_steps", "escape")
WINDOWS = ("loss_window", "grad_window", "loss_ratio")


def test_vmap_over_the_catalogue():
    rng = np.random.default_rng(72)

    def drawn(key: str, low: float, high: float) -> np.ndarray:
        if key in WHOLE:
            return rng.integers(int(low), int(high), VARIANTS).astype(np.int32)
        return rng.uniform(low, high, VARIANTS).astype(np.float32)

    numbers = {
        name: {key: drawn(key, *ends) for key, ends in keys.items()}
        for name, keys in CATALOGUE.items()
    }
    trace = lockstep.scalar(fuzz.signals(rng, STEPS, 1, wild=False), 0)

    def config(numbers: Any) -> EngineConfig:
        """Windows are static: they are the lengths of arrays."""
        window = {"window": 24}
        return policies.full(
            None,
            detectors=tuple(
                (
                    name,
                    DETECTORS[name](**numbers[name], **(window if name in WINDOWS else {})),
                )
                for name in CATALOGUE  # a dict through jit is in the order of the alphabet
            ),
        )

    last, decisions = vmapped(config, numbers, trace, rng)
    averages = last.detectors[list(CATALOGUE).index("grad_ema")].mean
    assert len({float(x) for x in averages}) > VARIANTS // 2, "the variants do differ"
    assert len({tuple(each) for each in decisions.cause}) > VARIANTS // 10, "and what they decide"


def test_the_same_in_numpy_with_a_policy_per_lane():
    rng = np.random.default_rng(71)
    numbers = zclip_variants(rng)
    one = fuzz.signals(rng, 60, 1, wild=False)
    trace = map_leaves(lambda x: np.broadcast_to(x, (60, VARIANTS)).copy(), one)
    engine = Engine(policy(numbers))
    run = backends.runner("numpy", engine)
    _, *outputs = run(engine.init(batch=(VARIANTS,)), trace)
    for i in rng.choice(VARIANTS, 15, replace=False):
        alone = Engine(policy({k: v[i].item() for k, v in numbers.items()}))
        _, *single = backends.runner("host", alone)(
            backends.start("host", alone.init()), lockstep.scalar(one, 0)
        )
        mine = map_leaves(lambda leaf, i=i: leaf[:, i], tuple(outputs))
        assert lockstep.first_difference(mine, tuple(single)) is None


def limited(numbers: dict[str, Any]) -> EngineConfig:
    """Growth and the way of the learning rate; keys are "table.threshold"."""

    def of(table: str) -> dict[str, Any]:
        return {k.partition(".")[2]: v for k, v in numbers.items() if k.startswith(f"{table}.")}

    config = policies.growing("instability", "records")
    settings = {name: each._replace(**of(name)) for name, each in config.detectors}
    return config._replace(detectors=tuple(settings.items()), lr=config.lr._replace(**of("lr")))


def test_vmap_over_growth_and_the_ceiling_of_the_learning_rate():
    rng = np.random.default_rng(73)
    numbers: dict[str, np.ndarray] = {
        "instability.growth": rng.uniform(0.0, 0.5, VARIANTS).astype(np.float32),
        "instability.records": rng.integers(2, 5, VARIANTS).astype(np.int32),
        "instability.norm_ratio": rng.uniform(1, 6, VARIANTS).astype(np.float32),
        "instability.patience": rng.integers(1, 20, VARIANTS).astype(np.int32),
        "records.alpha": rng.uniform(0.001, 0.3, VARIANTS).astype(np.float32),
        "records.record_rate": rng.uniform(0.1, 0.9, VARIANTS).astype(np.float32),
        "records.growth": rng.uniform(0.0, 0.5, VARIANTS).astype(np.float32),
        "records.warmup_steps": rng.integers(1, 12, VARIANTS).astype(np.int32),
        "lr.factor": rng.uniform(0.1, 0.9, VARIANTS).astype(np.float32),
        "lr.floor": rng.uniform(0.01, 0.1, VARIANTS).astype(np.float32),
        "lr.ceiling": np.maximum(rng.uniform(-0.3, 1.0, VARIANTS), 0).astype(np.float32),
        "lr.hold_steps": rng.integers(0, 10, VARIANTS).astype(np.int32),
        "lr.ramp_steps": rng.integers(0, 20, VARIANTS).astype(np.int32),
    }
    t = np.arange(STEPS)
    grown = np.where((t >= 40) & (t < 55), 1.5 ** np.clip(t - 40, 0, 15), 0.0)
    one = fuzz.signals(rng, STEPS, 1, wild=False)
    trace = lockstep.scalar(one, 0)._replace(
        loss=(2 + 0.05 * rng.normal(size=STEPS) + grown).astype(np.float32),
        grad_norm=((1 + 10 * grown) * np.exp(0.2 * rng.normal(size=STEPS))).astype(np.float32),
        update_norm=np.ones(STEPS, np.float32),
        learning_rate=(1e-3 * (1.01 - t / STEPS) * np.where(t < 38, 0.5, 1)).astype(np.float32),
        change_expected=np.zeros(STEPS, bool),
    )

    _, decisions = vmapped(limited, numbers, trace, rng)
    assert len({tuple(each) for each in decisions.lr_scale}) > VARIANTS // 2, "they do differ"
