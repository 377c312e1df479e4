"""Numbers of a policy as arrays: thousands of variants in one program equal one run each."""

from itertools import chain
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

CLIP, LR = RULES["zclip"](), policies.full().lr
WATCHING = {
    name: DETECTORS[name](**policies.SETTINGS[name])
    for name in (*chain(*policies.PUBLISHED.values()), "instability", "records")
}


def drawn(config: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """All variants of each number: from itself to twice it; a share remains one."""

    def of(value: float) -> np.ndarray:
        if isinstance(value, int):
            return rng.integers(value, 2 * value + 1, VARIANTS).astype(np.int32)
        power = rng.uniform(0.5, 2, VARIANTS)
        return (value**power if 0 < value < 1 else value * power).astype(np.float32)

    fields = config._asdict().items()  # the length of a window is no number of a variant
    return {key: of(x) for key, x in fields if type(x) in (int, float) and key != "window"}


def every_number(numbers: Any) -> EngineConfig:
    """ZClip, the catalogue's detectors, detectors of growth, and the way of the learning rate."""
    # In this order: a dict through jit is in the order of the alphabet.
    detectors = ((name, each._replace(**numbers[name])) for name, each in WATCHING.items())
    config = policies.full(None, detectors=(*policies.full().detectors[:1], *detectors))
    clip, lr = CLIP._replace(**numbers["clip"]), LR._replace(**numbers["lr"])
    return config._replace(clip=("zclip", clip), lr=lr)


def test_vmap_over_policies_equals_one_run_each():
    rng = np.random.default_rng(73)
    numbers = {name: drawn(x, rng) for name, x in ({"clip": CLIP, "lr": LR} | WATCHING).items()}
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
        fresh = map_leaves(jnp.asarray, engine.init())
        return jax.lax.scan(lambda s, x: engine.step(s, x, xp=jnp), fresh, trace)

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
    assert len({tuple(each) for each in decisions.lr_scale}) > VARIANTS // 2, "they differ"
    assert len({tuple(each) for each in decisions.cause}) > VARIANTS // 10, "and their alarms"
