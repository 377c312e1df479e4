"""Detectors, which judge one step against their state and then learn the step.

A detector is a NamedTuple of thresholds, which may be arrays. `init` returns the state as NumPy
arrays. `update(state, seen)` returns the new state and a `DetectorResult`. `CAUSE` holds the
flags of an alarm. A detector is inactive without the signals in `NEEDS`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_args, get_type_hints

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


class Detect(NamedTuple):
    """`[detect]`: the thresholds of each detector, or None for a detector that is off.

    A detector is on if the file has its table, also if the table is empty: `[detect.plateau]`. The
    detectors run in the order of the fields.
    """

    nonfinite: NonFiniteConfig | None = None
    loss_spike: LossSpikeConfig | None = None
    grad_spike: GradSpikeConfig | None = None
    divergence: DivergenceConfig | None = None
    instability: InstabilityConfig | None = None
    records: RecordsConfig | None = None
    vanishing: VanishingConfig | None = None
    plateau: PlateauConfig | None = None
    overfit: OverfitConfig | None = None
    loss_ratio: LossRatioConfig | None = None
    loss_ceiling: LossCeilingConfig | None = None
    loss_window: LossWindowConfig | None = None
    grad_window: GradWindowConfig | None = None
    grad_ema: GradEmaConfig | None = None
    grad_ceiling: GradCeilingConfig | None = None


DETECTORS: dict[str, Any] = {
    name: get_args(optional)[0] for name, optional in get_type_hints(Detect).items()
}
"""Detectors by their name in a policy file, in the order in which they run."""

CAUSES: dict[str, Cause] = {
    "nonfinite": NONFINITE,
    "nonfinite_loss": Cause.NONFINITE_LOSS,
    "nonfinite_grad": Cause.NONFINITE_GRAD,
    **{name: detector.CAUSE for name, detector in DETECTORS.items()},
}
"""`Cause` flags by the names that a rule's `to` accepts for detectors."""
