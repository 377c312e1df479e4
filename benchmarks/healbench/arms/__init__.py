"""The arms: what a run is trained with. By name, in the order of the table."""

from __future__ import annotations

import functools
from collections.abc import Callable

from benchmarks.healbench.arms.clipping import AdaGC, FixedClip, Nothing, ZClip
from benchmarks.healbench.arms.common import Unavailable
from benchmarks.healbench.arms.healing import Attached, Healed
from benchmarks.healbench.arms.packages import SelfHealingTrainer, Selgis
from benchmarks.healbench.arms.published import LightningSpike, OlmoSkipStep
from benchmarks.healbench.problem import Problem
from benchmarks.healbench.training import Training

__all__ = ["ARMS", "Unavailable"]

ARMS: dict[str, Callable[[Problem], Training]] = {
    "nothing": Nothing,
    "fixed_clip": FixedClip,
    "zclip": ZClip,
    "adagc": AdaGC,
    "lightning_spike": LightningSpike,
    "olmo_skip_step": OlmoSkipStep,
    "selgis": Selgis,
    "self_healing_trainer": SelfHealingTrainer,
    "attach_default": functools.partial(Attached, policy="default"),
    "healer": Healed,
    "healer_ask": functools.partial(Healed, ask=True),
    "healer_pretraining": functools.partial(Healed, policy="pretraining"),
}
"""An arm of a problem: `with ARMS[name](problem) as run: run.train()`.

Raises `Unavailable` where the arm is made, if what it needs is not installed.
"""
