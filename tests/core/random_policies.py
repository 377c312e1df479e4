"""Hypothesis strategies: any policy that the core can run."""

from __future__ import annotations

from typing import Any

import hypothesis
from hypothesis import strategies as st

from healcore.core.baseline import ShiftConfig
from healcore.core.clipping import RULES
from healcore.core.detectors import DETECTORS
from healcore.core.engine import (
    BudgetConfig,
    EngineConfig,
    IncidentConfig,
    LrConfig,
    RollbackConfig,
    RuleConfig,
)

# Deterministic and short: `make test` has two cores and a few minutes for everything.
BOUNDED: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "phases": [hypothesis.Phase.explicit, hypothesis.Phase.generate],
    "suppress_health_check": list(hypothesis.HealthCheck),
}


def number(low: float, high: float) -> st.SearchStrategy[float]:
    """A float32 in [low, high], so that no backend rounds it again."""
    return st.floats(low, high, width=32)


decays = st.sampled_from([0.5, 0.9, 0.97, 0.99])
counts = st.integers(1, 40)
limits = st.none() | number(0.125, 128.0)
shifts = st.builds(
    ShiftConfig, patience=st.integers(2, 40), gain=st.integers(1, 6), forgive=st.integers(0, 8)
)

CLIPS: dict[str, st.SearchStrategy] = {
    "zclip": st.builds(
        RULES["zclip"],
        z_threshold=number(0.5, 8.0),
        ema_decay=decays,
        warmup_steps=counts,
        target=st.sampled_from(["reciprocal", "mean", "max"]),
        max_norm=limits,
        min_rel_std=number(0.001953125, 0.25),
        shift=shifts,
    ),
    "fixed": st.builds(RULES["fixed"], max_norm=number(0.03125, 64.0)),
    "autoclip": st.builds(
        RULES["autoclip"], percentile=number(1.0, 99.0), window=st.integers(2, 60), max_norm=limits
    ),
    "adagc": st.builds(
        RULES["adagc"],
        ratio=number(1.0, 4.0),
        ema_decay=decays,
        warmup_steps=counts,
        max_norm=number(0.125, 64.0),
        shift=shifts,
    ),
}

SETTINGS: dict[str, dict[str, st.SearchStrategy]] = {
    "grad_spike": {
        "z_threshold": number(1.0, 12.0),
        "evidence": number(1.0, 4.0),
        "window": counts,
        "min_noise": number(0.03125, 1.0),
    },
    "loss_spike": {
        "z_threshold": number(2.0, 6.0),
        "evidence": number(1.0, 4.0),
        "window": counts,
        "min_noise": number(0.0009765625, 0.25),
    },
    "divergence": {"rise": number(2.0, 10.0), "patience": st.integers(1, 60), "window": counts},
    "instability": {
        "growth": number(0.0, 1.0),
        "records": st.integers(2, 6),
        "norm_ratio": number(1.0, 12.0),
        "patience": st.integers(1, 30),
    },
    "records": {
        "alpha": number(0.0009765625, 0.5),
        "record_rate": number(0.0625, 0.9375),
        "growth": number(0.0, 1.0),
        "warmup_steps": st.integers(1, 12),
    },
    "vanishing": {"threshold": number(0.0009765625, 2.0), "patience": st.integers(1, 20)},
    "plateau": {
        "window": st.integers(1, 50),
        "patience": st.integers(1, 5),
        "min_improvement": number(0.0, 2.0),
        "chance_level": st.none() | number(-1.0, 4.0),
        "chance_margin": number(0.0078125, 0.5),
    },
    "overfit": {"max_gap": number(0.125, 4.0), "patience": st.integers(1, 4), "ema_decay": decays},
    "loss_ratio": {
        "ratio": number(1.125, 8.0),
        "window": st.integers(1, 70),
        "warmup_steps": counts,
        "sustain": st.integers(1, 8),
        "escape": st.integers(1, 40),
    },
    "loss_ceiling": {
        "ceiling": st.none() | number(-1.0, 12.0),
        "first_steps": st.integers(0, 60),
        "first_ratio": number(1.0, 4.0),
        "sustain": st.integers(1, 8),
    },
}
SETTINGS["update_spike"] = SETTINGS["grad_spike"]
SETTINGS["loss_window"] = SETTINGS["grad_window"] = {
    "sigmas": number(1.0, 8.0),
    "window": st.integers(2, 70),
    "warmup_steps": st.integers(2, 40),
    "bessel": st.booleans(),
    "min_rel_std": number(0.0001220703125, 0.125),
    "sustain": st.integers(1, 8),
}
SETTINGS["grad_ema"] = {
    "ratio": st.none() | number(1.5, 30.0),
    "sigmas": st.none() | number(1.0, 30.0),
    "ema_decay": decays,
    "warmup_steps": counts,
    "min_rel_std": number(0.001953125, 0.25),
    "sustain": st.integers(1, 8),
    "shift": shifts,
}
SETTINGS["grad_ceiling"] = {
    "ceiling": st.none() | number(0.0078125, 128.0),
    "first_ratio": st.none() | number(1.0, 20.0),
    "first_steps": counts,
    "sustain": st.integers(1, 8),
    "escape": counts,
}


def detector(name: str) -> st.SearchStrategy:
    """(name, config)."""
    config = DETECTORS[name]
    settings = {k: v for k, v in SETTINGS.get(name, {}).items() if k in config._fields}
    return st.tuples(st.just(name), st.builds(config, **settings))


rules = st.builds(
    RuleConfig,
    causes=st.integers(1, 2047),
    skip=st.booleans(),
    action=st.integers(0, 63),
    sustained=st.booleans(),
    consecutive=st.integers(1, 5),
    count=st.integers(1, 6),
    within=st.sampled_from([0, 1, 8, 30]),
)


@st.composite
def engine_configs(draw: Any, clips: tuple[str | None, ...] = (*CLIPS, None)) -> EngineConfig:
    """A whole policy: any rule, any set of detectors, any escalation."""
    clip = draw(st.sampled_from(clips))
    chosen = draw(st.lists(st.sampled_from(list(DETECTORS)), unique=True))
    small = st.integers(0, 12)
    return EngineConfig(
        mode=draw(st.sampled_from(["heal", "heal", "observe"])),
        clip=None if clip is None else (clip, draw(CLIPS[clip])),
        detectors=tuple(draw(detector(name)) for name in DETECTORS if name in chosen),
        rules=tuple(draw(st.lists(rules, max_size=5))),
        incident=IncidentConfig(draw(st.integers(1, 30)), draw(st.integers(1, 30))),
        rollback=RollbackConfig(draw(counts), draw(small), draw(st.integers(0, 200))),
        lr=LrConfig(
            draw(number(0.125, 0.9375)),
            draw(number(0.0625, 1.0)),
            draw(small),
            draw(small),
            draw(st.just(0.0) | number(0.0625, 1.0)),
            draw(number(0.0625, 0.9375)),
        ),
        budget=BudgetConfig(draw(small), draw(small), draw(st.integers(1, 100))),
        max_skips=draw(small),
        grace_steps=draw(small),
    )
