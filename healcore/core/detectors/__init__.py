"""Detectors, which judge one step against their state and then learn the step.

A detector is a NamedTuple of thresholds, which may be arrays. `init` returns the state as NumPy
arrays. `update(state, seen)` returns the new state and a `DetectorResult`. `CAUSE` holds the
flags of an alarm. A detector is inactive without the signals in `NEEDS`.
"""

from __future__ import annotations

from typing import Any

from healcore.core.decision import NONFINITE, Cause
from healcore.core.detectors.loss_records import InstabilityConfig, RecordsConfig
from healcore.core.detectors.spikes import GradSpikeConfig, LossSpikeConfig
from healcore.core.detectors.thresholds import (
    GradCeilingConfig,
    LossCeilingConfig,
    NonFiniteConfig,
    VanishingConfig,
)
from healcore.core.detectors.trends import DivergenceConfig, OverfitConfig, PlateauConfig
from healcore.core.detectors.windows import (
    GradEmaConfig,
    GradWindowConfig,
    LossRatioConfig,
    LossWindowConfig,
)

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
"""`Cause` flags by the names that a rule's `to` accepts for detectors."""
