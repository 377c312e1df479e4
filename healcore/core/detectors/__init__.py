"""Detectors. Each judges one step against its state, then learns the step.

A detector is a NamedTuple of thresholds, which may be arrays. Its methods are `init()`, which gives
the state as NumPy arrays, and `update(state, seen, *, xp)`, which returns the new state and a
`Reading`. `CAUSE` has the flags of an alarm. Without the signals in `NEEDS` it is inactive.
"""

from __future__ import annotations

from typing import Any

from healcore.core.detectors.divergence import DivergenceConfig
from healcore.core.detectors.grad_ema import GradEmaConfig
from healcore.core.detectors.instability import InstabilityConfig
from healcore.core.detectors.limits import (
    GradCeilingConfig,
    LossCeilingConfig,
    NonFiniteConfig,
    VanishingConfig,
)
from healcore.core.detectors.overfit import OverfitConfig
from healcore.core.detectors.plateau import PlateauConfig
from healcore.core.detectors.records import RecordsConfig
from healcore.core.detectors.spike import GradSpikeConfig, LossSpikeConfig, UpdateSpikeConfig
from healcore.core.detectors.windows import GradWindowConfig, LossRatioConfig, LossWindowConfig
from healcore.core.verdict import NONFINITE, Cause

DETECTORS: dict[str, Any] = {
    "nonfinite": NonFiniteConfig,
    "loss_spike": LossSpikeConfig,
    "grad_spike": GradSpikeConfig,
    "divergence": DivergenceConfig,
    "instability": InstabilityConfig,
    "records": RecordsConfig,
    "vanishing": VanishingConfig,
    "plateau": PlateauConfig,
    "overfit": OverfitConfig,
    "update_spike": UpdateSpikeConfig,
    "loss_ratio": LossRatioConfig,
    "loss_ceiling": LossCeilingConfig,
    "loss_window": LossWindowConfig,
    "grad_window": GradWindowConfig,
    "grad_ema": GradEmaConfig,
    "grad_ceiling": GradCeilingConfig,
}
"""Detectors by their name in a policy file, in the order in which they run."""

CAUSES: dict[str, Cause] = {
    "nonfinite": NONFINITE,
    "nonfinite_loss": Cause.NONFINITE_LOSS,
    "nonfinite_grad": Cause.NONFINITE_GRAD,
    **{name: detector.CAUSE for name, detector in DETECTORS.items()},
}
"""Flags of the names that a rule's `to` may have on the device."""
