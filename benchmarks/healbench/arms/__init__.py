"""The arms: what a run is trained with. By name, in the order of the table."""

from __future__ import annotations

import functools
from collections.abc import Callable

import healcore.policy
from benchmarks.healbench.arms.clipping import AdaGC, ClipSkipNan, FixedClip, Nothing, ZClip
from benchmarks.healbench.arms.common import Unavailable
from benchmarks.healbench.arms.healing import Attached, Healed
from benchmarks.healbench.arms.packages import SelfHealingTrainer, Selgis
from benchmarks.healbench.arms.published import LightningSpike, OlmoSkipStep
from benchmarks.healbench.problem import Problem
from benchmarks.healbench.training import Training

__all__ = ["ARMS", "Unavailable"]

PRESETS = (
    "default",
    "pretraining",
    "aggressive",
    "conservative",
)
"""Presets of healcore that are attached: one arm `attach_<name>` each."""

CLIPPED = healcore.policy.load("default", clip={"kind": "fixed", "max_norm": FixedClip.max_norm})
"""`default` for a run that had a fixed clip before: to be compared with the arm `fixed_clip`."""

RESETS = healcore.policy.load("default", rollback={"reset_moments": True})
"""`default`, whose rollbacks reset the moments too: to be compared with the arm `healer`."""

ARMS: dict[str, Callable[[Problem], Training]] = {
    "nothing": Nothing,
    "fixed_clip": FixedClip,
    "clip_skip_nan": ClipSkipNan,
    "zclip": ZClip,
    "adagc": AdaGC,
    "lightning_spike": LightningSpike,
    "olmo_skip_step": OlmoSkipStep,
    "selgis": Selgis,
    "self_healing_trainer": SelfHealingTrainer,
    **{f"attach_{name}": functools.partial(Attached, policy=name) for name in PRESETS},
    "healer": Healed,
    "healer_ask": functools.partial(Healed, ask=True),
    "healer_pretraining": functools.partial(Healed, policy="pretraining"),
    "attach_clip": functools.partial(Attached, policy=CLIPPED),
    "healer_clip": functools.partial(Healed, policy=CLIPPED),
    "healer_ask_clip": functools.partial(Healed, policy=CLIPPED, ask=True),
    "healer_reset": functools.partial(Healed, policy=RESETS),
    "spam_reset": functools.partial(Healed, policy="spam-reset"),
}
"""An arm of a problem: `with ARMS[name](problem) as run: run.train()`.

Raises `Unavailable` where the arm is made, if what it needs is not installed.
"""
