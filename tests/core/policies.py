"""Engine configurations for the tests: everything on, with windows short enough to be reached."""

from collections.abc import Iterable
from typing import Any

from healcore.core.clipping import AdaGCConfig, AutoClipConfig, FixedConfig, ZClipConfig
from healcore.core.decision import Action, Cause
from healcore.core.detectors import DETECTORS
from healcore.core.engine import (
    BudgetConfig,
    EngineConfig,
    IncidentConfig,
    LrConfig,
    RollbackConfig,
    RuleConfig,
)

RULES: dict[str, Any] = {
    rule.kind: rule for rule in (ZClipConfig, FixedConfig, AutoClipConfig, AdaGCConfig)
}
"""The clipping rules by their names in a policy file."""
CLIPS: dict[str, Any] = {
    "zclip": RULES["zclip"](warmup_steps=20),
    "zclip-mean": RULES["zclip"](target="mean", max_norm=None, warmup_steps=11),
    "zclip-max": RULES["zclip"](target="max", z_threshold=3.0, max_norm=100.0),
    "fixed": RULES["fixed"](max_norm=0.7),
    "autoclip": RULES["autoclip"](percentile=40.0, window=30),
    "adagc": RULES["adagc"](warmup_steps=30),
}
"""One config of each clipping rule; the key up to a dash is the rule's name."""

GROUPS = 3
"""Tensors, where a rule works per tensor."""

SETTINGS: dict[str, dict[str, Any]] = {
    "plateau": {"window": 25, "patience": 2, "chance_level": 0.693},
    "overfit": {"max_gap": 1.0},
    "loss_spike": {"window": 12},
    "grad_spike": {"window": 12},
    "divergence": {"window": 20, "patience": 12},
    "instability": {"records": 2, "norm_ratio": 2.75, "patience": 6},
    "records": {"alpha": 0.05},
    "vanishing": {"threshold": 1e-6, "patience": 6},
    "loss_ratio": {"window": 24, "warmup_steps": 5, "sustain": 3, "escape": 9},
    "loss_ceiling": {"ceiling": 11.0, "first_steps": 20, "first_ratio": 1.5},
    "loss_window": {"sigmas": 3.0, "window": 24, "warmup_steps": 12, "sustain": 2},
    "grad_window": {"window": 20, "warmup_steps": 7, "sustain": 3, "bessel": False},
    "grad_ema": {"ratio": 4.0, "ema_decay": 0.9, "warmup_steps": 3},
    "grad_ceiling": {"ceiling": 4.0, "sustain": 2},
}
"""Detector settings that a few hundred steps can reach."""

PUBLISHED: dict[str, tuple[str, ...]] = {
    "limits": ("loss_ratio", "loss_ceiling"),
    "windows": ("loss_window", "grad_window"),
    "averages": ("grad_ema",),
    "ceilings": ("grad_ceiling",),
}
"""Detectors of the catalogue's recipes, a few at a time."""

_BAD = int(Cause.NONFINITE_LOSS | Cause.NONFINITE_GRAD)
_SPIKES = int(Cause.GRAD_SPIKE | Cause.LOSS_SPIKE)

RULES_OF_ALL_KINDS = (
    RuleConfig(_BAD, skip=True),
    RuleConfig(_SPIKES, skip=True),
    RuleConfig(_BAD, action=int(Action.ROLLBACK | Action.CUT_LR), consecutive=3),
    RuleConfig(_BAD, action=int(Action.ROLLBACK | Action.CUT_LR), count=5, within=20),
    RuleConfig(_SPIKES, action=int(Action.ROLLBACK | Action.CUT_LR), sustained=True),
    RuleConfig(int(Cause.DIVERGENCE), action=int(Action.ROLLBACK | Action.SAVE)),
    RuleConfig(int(Cause.GRAD_SPIKE), action=int(Action.CUT_LR), count=2, within=7),
    RuleConfig(int(Cause.PLATEAU | Cause.OVERFIT | Cause.GRAD_VANISHING), action=int(Action.ALERT)),
    RuleConfig(int(Cause.GRAD_VANISHING), action=int(Action.STOP), consecutive=9),
    RuleConfig(int(Cause.INSTABILITY), action=int(Action.ROLLBACK | Action.CUT_LR)),
    RuleConfig(int(Cause.RECORDS), action=int(Action.ROLLBACK | Action.CUT_LR)),
)
"""Skips, rollbacks, cuts, alerts, stops; at once, in a row, in a window, sustained."""


def full(clip: str | None = "zclip", **changes: Any) -> EngineConfig:
    """All of healcore's own detectors, all kinds of rules, one clipping rule (a key of `CLIPS`).

    With "zclip" or no clipping the learning rate comes back in full, with the others to a ceiling.
    """
    published = {name for names in PUBLISHED.values() for name in names}
    ceiling = 0.0 if clip in (None, "zclip") else 0.625
    return EngineConfig(
        clip=None if clip is None else CLIPS[clip],
        detectors=_watching(name for name in DETECTORS if name not in published),
        rules=RULES_OF_ALL_KINDS,
        incident=IncidentConfig(quiet_steps=8, patience=12),
        rollback=RollbackConfig(depth=1, deepen=2, region=60),
        lr=LrConfig(factor=0.5, floor=0.2, hold_steps=7, ramp_steps=13, ceiling=ceiling),
        budget=BudgetConfig(recoveries=4, lr_cuts=5, refund_after=40),
        max_skips=4,
        grace_steps=10,
    )._replace(**changes)


def clip_only(clip: str) -> EngineConfig:
    """One clipping rule and the non-finite detector: a small program, compiled in seconds."""
    return full(clip, detectors=full().detectors[:1], rules=RULES_OF_ALL_KINDS[:3])


def covering(clip: str) -> EngineConfig:
    """Over all keys of `CLIPS`: every detector and every rule once, every clipping rule."""
    # They do not see each other, so only the tests marked `stress` have each pair of them.
    return full(clip) if clip == "zclip" else clip_only(clip)


def watching_all(clip: str) -> EngineConfig:
    """As `full`, with the detectors of the catalogue's recipes too."""
    return full(clip, detectors=_watching(DETECTORS))


def only(*names: str) -> EngineConfig:
    """A policy of these detectors or keys of `PUBLISHED` alone: others would hide their causes."""
    lasting = RuleConfig(int(Cause.DIVERGENCE), action=int(Action.CUT_LR), sustained=True)
    chosen = (each for name in names for each in PUBLISHED.get(name, (name,)))
    detectors = _watching(("nonfinite", *chosen))
    return full(None, detectors=detectors, rules=(*RULES_OF_ALL_KINDS, lasting))


def _watching(names: Iterable[str]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, DETECTORS[name](**SETTINGS.get(name, {}))) for name in names)
