"""Engine configurations for the tests: everything on, with windows short enough to be reached."""

from __future__ import annotations

from typing import Any

from healcore.core import detectors
from healcore.core.clipping import RULES
from healcore.core.engine import (
    BudgetConfig,
    EngineConfig,
    IncidentConfig,
    LrConfig,
    RollbackConfig,
    RuleConfig,
)
from healcore.core.verdict import Action, Cause

CLIPS: dict[str, Any] = {
    "zclip": RULES["zclip"].ZClipConfig(warmup_steps=20),
    "zclip-mean": RULES["zclip"].ZClipConfig(target="mean", max_norm=None, warmup_steps=11),
    "zclip-max": RULES["zclip"].ZClipConfig(target="max", z_threshold=3.0, max_norm=100.0),
    "fixed": RULES["fixed"].FixedConfig(max_norm=0.7),
    "autoclip": RULES["autoclip"].AutoClipConfig(percentile=40.0, window=30),
    "adagc": RULES["adagc"].AdaGCConfig(warmup_steps=30),
}
"""One config of each clipping rule; the key up to a dash is the rule's name."""

GROUPS = 3
"""Tensors, where a rule works per tensor."""

SETTINGS: dict[str, dict[str, Any]] = {
    "plateau": {"window": 25, "patience": 2, "chance_level": 0.693},
    "overfit": {"max_gap": 1.0},
    "loss_spike": {"warmup_steps": 20, "escape": 20},
    "divergence": {"warmup_steps": 20, "patience": 12},
    "vanishing": {"threshold": 1e-6, "patience": 6},
}
"""Detector settings that a few hundred steps can reach."""

_BAD = int(Cause.NONFINITE_LOSS | Cause.NONFINITE_GRAD)
_SPIKES = int(Cause.GRAD_SPIKE | Cause.LOSS_SPIKE)

RULES_OF_ALL_KINDS = (
    RuleConfig(_BAD, skip=True),
    RuleConfig(_SPIKES, skip=True),
    RuleConfig(_BAD, action=int(Action.ROLLBACK | Action.CUT_LR), consecutive=3),
    RuleConfig(_BAD, action=int(Action.ROLLBACK | Action.CUT_LR), count=5, within=20),
    RuleConfig(_SPIKES, action=int(Action.ROLLBACK | Action.CUT_LR), sustained=True),
    RuleConfig(int(Cause.DIVERGENCE), action=int(Action.ROLLBACK | Action.SAVE)),
    RuleConfig(int(Cause.UPDATE_SPIKE), action=int(Action.CUT_LR), count=2, within=7),
    RuleConfig(int(Cause.PLATEAU | Cause.OVERFIT | Cause.GRAD_VANISHING), action=int(Action.ALERT)),
    RuleConfig(int(Cause.GRAD_VANISHING), action=int(Action.STOP), consecutive=9),
)
"""Skips, rollbacks, cuts, alerts and stops; at once, in a row, in a window, when sustained."""


def full(clip: str | None = "zclip", *, mode: str = "heal", **changes: Any) -> EngineConfig:
    """All detectors, all kinds of rules, one clipping rule (a key of `CLIPS`)."""
    return EngineConfig(
        mode=mode,
        clip=None if clip is None else (clip.split("-")[0], CLIPS[clip]),
        detectors=tuple(
            (name, module.Config(**_known(module, SETTINGS.get(name, {}))))
            for name, module in detectors.DETECTORS.items()
        ),
        rules=RULES_OF_ALL_KINDS,
        incident=IncidentConfig(quiet_steps=8, patience=12),
        rollback=RollbackConfig(depth=1, deepen=2, region=60),
        lr=LrConfig(factor=0.5, floor=0.2, hold_steps=7, ramp_steps=13),
        budget=BudgetConfig(recoveries=4, lr_cuts=5, refund_after=40),
        max_skips=4,
        grace_steps=10,
    )._replace(**changes)


def _known(module: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Only settings that this detector has: thresholds are tuned, tests should not break."""
    return {key: value for key, value in settings.items() if key in module.Config._fields}
