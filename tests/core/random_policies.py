"""Hypothesis strategies: any policy that the core can run."""

from typing import Any

import hypothesis
from hypothesis import strategies as st

from healcore.core.baseline import ShiftConfig
from healcore.core.detectors import DETECTORS
from healcore.core.engine import (
    BudgetConfig,
    EngineConfig,
    IncidentConfig,
    LrConfig,
    RollbackConfig,
    RuleConfig,
)
from tests.core.policies import RULES

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


counts = st.integers(1, 40)
SETTINGS: dict[str, st.SearchStrategy] = {
    "alpha": number(0.0009765625, 0.5),
    "bessel": st.booleans(),
    "ceiling": st.none() | number(0.0078125, 128.0),
    "chance_level": st.none() | number(-1.0, 4.0),
    "chance_margin": number(0.0078125, 0.5),
    "ema_decay": st.sampled_from([0.5, 0.9, 0.97, 0.99]),
    "escape": counts,
    "evidence": number(1.0, 4.0),
    "first_ratio": number(1.0, 4.0),
    "first_steps": st.integers(1, 60),
    "growth": number(0.0, 1.0),
    "max_gap": number(0.125, 4.0),
    "max_norm": st.none() | number(0.125, 128.0),
    "min_improvement": number(0.0, 2.0),
    "min_noise": number(0.0009765625, 1.0),
    "min_rel_std": number(0.001953125, 0.25),
    "norm_ratio": number(1.0, 12.0),
    "patience": counts,
    "percentile": number(1.0, 99.0),
    "ratio": number(1.125, 8.0),
    "record_rate": number(0.0625, 0.9375),
    "records": st.integers(2, 6),
    "rise": number(2.0, 10.0),
    "shift": st.builds(
        ShiftConfig, patience=st.integers(2, 40), gain=st.integers(1, 6), forgive=st.integers(0, 8)
    ),
    "sigmas": number(1.0, 8.0),
    "sustain": st.integers(1, 8),
    "target": st.sampled_from(["reciprocal", "mean", "max"]),
    "threshold": number(0.0009765625, 2.0),
    "warmup_steps": st.integers(2, 40),
    "window": st.integers(2, 60),
    "z_threshold": number(0.5, 8.0),
}
OTHERS: dict[str, dict[str, st.SearchStrategy]] = {
    "fixed": {"max_norm": number(0.03125, 64.0)},
    "adagc": {"max_norm": number(0.125, 64.0), "ratio": number(1.0, 4.0)},
    "grad_ema": {
        "ratio": number(1.5, 30.0),
        "warmup_steps": counts,
    },
    "grad_ceiling": {"ceiling": number(0.0078125, 128.0)},
    "loss_ceiling": {"ceiling": st.none() | number(-1.0, 12.0), "first_steps": st.integers(0, 60)},
    "plateau": {"window": st.integers(1, 50), "patience": st.integers(1, 5)},
    "records": {"warmup_steps": st.integers(1, 12)},
}
"""Numbers of one detector or clipping rule whose range differs."""


def config(kind: Any, name: str) -> st.SearchStrategy:
    """The config of a clipping rule or a detector, with any numbers."""
    numbers = {key: SETTINGS[key] for key in kind._fields} | OTHERS.get(name, {})
    return st.builds(kind, **numbers)


CLIPS = {name: config(kind, name) for name, kind in RULES.items()}


def detector(name: str) -> st.SearchStrategy:
    return st.tuples(st.just(name), config(DETECTORS[name], name))


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
        clip=None if clip is None else draw(CLIPS[clip]),
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
