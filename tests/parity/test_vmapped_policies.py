"""Numbers of a policy as arrays: thousands of variants in one program equal one run each."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from healcore.core.clipping import RULES
from healcore.core.detectors import DETECTORS
from healcore.core.engine import Engine, EngineConfig
from healcore.core.numerics import map_leaves
from tests.core import fuzz, policies
from tests.parity import lockstep

VARIANTS, STEPS = 500, 120

Tables = dict[str, Any]
"""Table of a policy -> key -> the ends between which it is drawn, whole numbers if they are."""
ZCLIP: Tables = {
    "clip": {"z_threshold": (1.0, 6.0), "ema_decay": (0.8, 0.999), "max_norm": (0.1, 100.0)}
    | {"min_rel_std": (0.001, 0.1), "warmup_steps": (1, 60)},
}
WATCHING: Tables = {
    "loss_window": {"sigmas": (1.0, 8.0), "min_rel_std": (1e-4, 0.1), "warmup_steps": (2, 24)},
    "grad_window": {"sigmas": (1.0, 8.0), "min_rel_std": (1e-4, 0.1), "sustain": (1, 6)},
    "grad_ema": {"ratio": (1.5, 20.0), "sigmas": (2.0, 20.0), "ema_decay": (0.8, 0.999)},
    "grad_ceiling": {"ceiling": (1.0, 100.0), "first_ratio": (1.5, 10.0), "first_steps": (1, 40)},
    "loss_ratio": {"ratio": (1.01, 6.0), "warmup_steps": (1, 24), "sustain": (1, 6)}
    | {"escape": (1, 20)},
    "loss_ceiling": {"ceiling": (0.0, 12.0), "first_ratio": (1.0, 3.0), "first_steps": (0, 50)},
    "instability": {"growth": (0.0, 0.5), "records": (2, 5), "norm_ratio": (1.0, 6.0)}
    | {"patience": (1, 20)},
    "records": {"alpha": (0.001, 0.3), "record_rate": (0.1, 0.9), "growth": (0.0, 0.5)}
    | {"warmup_steps": (1, 12)},
}
LR: Tables = {
    "lr": {"factor": (0.1, 0.9), "floor": (0.01, 0.1), "ceiling": (-0.3, 1.0)}
    | {"hold_steps": (0, 10), "ramp_steps": (0, 20)},
}


def drawn(tables: Tables, rng: np.random.Generator) -> Any:
    """Numbers of all variants, by table and key; a limit below zero is none."""

    def of(low: Any, high: Any) -> np.ndarray:
        if isinstance(low, int):
            return rng.integers(low, high, VARIANTS).astype(np.int32)
        return np.maximum(rng.uniform(low, high, VARIANTS), 0).astype(np.float32)

    return {name: {key: of(*ends) for key, ends in t.items()} for name, t in tables.items()}


def every_number(numbers: Any) -> EngineConfig:
    """ZClip, the catalogue's detectors, detectors of growth, and the way of the learning rate."""
    # In this order: a dict through jit is in the order of the alphabet.
    settings = {name: policies.SETTINGS[name] | numbers[name] for name in WATCHING}
    detectors = ((name, DETECTORS[name](**each)) for name, each in settings.items())
    config = policies.full(None, detectors=(*policies.full().detectors[:1], *detectors))
    clip = ("zclip", RULES["zclip"](**numbers["clip"]))
    return config._replace(clip=clip, lr=config.lr._replace(**numbers["lr"]))


def test_vmap_over_policies_equals_one_run_each():
    rng = np.random.default_rng(73)
    numbers = drawn(ZCLIP | WATCHING | LR, rng)
    t = np.arange(STEPS)
    grown = np.where((t >= 40) & (t < 55), 1.5 ** np.clip(t - 40, 0, 15), 0.0)
    trace = lockstep.scalar(fuzz.signals(rng, STEPS, 1, wild=False), 0)._replace(
        loss=(2 + 0.05 * rng.normal(size=STEPS) + grown).astype(np.float32),
        grad_norm=((1 + 10 * grown) * np.exp(0.2 * rng.normal(size=STEPS))).astype(np.float32),
        learning_rate=(1e-3 * (1.01 - t / STEPS) * np.where(t < 38, 0.5, 1)).astype(np.float32),
        change_expected=np.zeros(STEPS, bool),
    )

    def run(numbers: Any) -> Any:
        engine = Engine(every_number(numbers))
        state = map_leaves(jnp.asarray, engine.init())
        body = lambda s, x: engine.step(s, x, xp=jnp)  # noqa: E731
        return jax.lax.scan(body, state, map_leaves(jnp.asarray, trace))

    got = jax.jit(jax.vmap(run))(jax.tree.map(jnp.asarray, numbers))
    last, decisions = map_leaves(np.asarray, got)
    for i in rng.choice(VARIANTS, 15, replace=False):
        plain = jax.tree.map(lambda v, i=i: v[i].item(), numbers)  # as from a TOML file
        engine = Engine(every_number(plain))
        fresh = lockstep.start("recorded", engine.init())
        _, states, decided = lockstep.runner("recorded", engine)(fresh, trace)
        mine = map_leaves(lambda leaf, i=i: leaf[i : i + 1], last)
        theirs = map_leaves(lambda leaf: leaf[-1:], states)
        assert lockstep.first_difference(mine, theirs) is None, plain
        mine = map_leaves(lambda leaf, i=i: leaf[i], decisions)
        assert lockstep.first_difference(mine, decided) is None, plain
    averages = last.detectors[1 + [*WATCHING].index("grad_ema")].mean
    for values in (last.clip.mean, averages):
        assert len({float(x) for x in values}) > VARIANTS // 2, "the variants do differ"
    for values, least in ((decisions.cause, VARIANTS // 10), (decisions.lr_scale, VARIANTS // 2)):
        assert len({tuple(each) for each in values}) > least, "and what they decide"
