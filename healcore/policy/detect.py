"""The tables `[detect.*]`; a detector is on if its table is present, even if empty."""

from __future__ import annotations

from typing import Annotated

from healcore.core import detectors
from healcore.policy.clip import Shift
from healcore.policy.table import (
    AtMost,
    Fraction,
    Limit,
    NotNegative,
    NumberUnless,
    OnOff,
    Positive,
    Ratio,
    Steps,
    StepsOrZero,
    Table,
    number,
    whole,
)

_loss_spike, _grad_spike = detectors.LossSpikeConfig(), detectors.GradSpikeConfig()
_divergence, _instability = detectors.DivergenceConfig(), detectors.InstabilityConfig()
_records, _vanishing = detectors.RecordsConfig(), detectors.VanishingConfig()
_flat, _overfit = detectors.PlateauConfig(), detectors.OverfitConfig()
_loss_ratio, _loss_window = detectors.LossRatioConfig(), detectors.LossWindowConfig()
_ceiling, _grad_ceiling = detectors.LossCeilingConfig(), detectors.GradCeilingConfig()
_grad_ema = detectors.GradEmaConfig()

_WARMUP_IN_WINDOW = AtMost("warmup_steps", "window", "longer", "the window never holds more values")


class NonFinite(Table):
    """NaN or infinite loss or gradient; it has no thresholds."""

    core = detectors.NonFiniteConfig


class LossSpike(Table):
    """One bad batch, or a sustained rise of the loss above the run's own noise."""

    core = detectors.LossSpikeConfig

    z_threshold: Positive = _loss_spike.z_threshold
    """Height above the level, in units of the noise, from which a value is an outlier; at twice
    the height its vote is full. The run's own outliers move the threshold."""
    evidence: Annotated[float, number(above=0, most=15)] = _loss_spike.evidence
    window: Steps = _loss_spike.window
    min_noise: Positive = _loss_spike.min_noise


class NormSpike(LossSpike):
    """A norm of the gradient or of the update far above its own recent level."""

    core = detectors.GradSpikeConfig

    min_noise: Positive = _grad_spike.min_noise


class UpdateSpike(NormSpike):
    """`NormSpike` on the norm of the update."""

    core = detectors.UpdateSpikeConfig


class Divergence(Table):
    """The smoothed loss stays above its best level."""

    core = detectors.DivergenceConfig

    rise: Positive = _divergence.rise
    patience: Steps = _divergence.patience
    window: Steps = _divergence.window


class Instability(Table):
    """Loss and gradient norm grow together from update to update."""

    core = detectors.InstabilityConfig

    growth: NotNegative = _instability.growth
    records: Annotated[int, whole(least=2, most=1000)] = _instability.records
    norm_ratio: Annotated[float, number(least=1)] = _instability.norm_ratio
    patience: Steps = _instability.patience


class Records(Table):
    """The loss sets all-time records more often than well-mixed data can."""

    core = detectors.RecordsConfig

    alpha: Annotated[float, number(least=1e-9, below=1)] = _records.alpha
    record_rate: Fraction = _records.record_rate
    growth: NotNegative = _records.growth
    warmup_steps: Annotated[int, whole(least=1, most=1000)] = _records.warmup_steps


class Vanishing(Table):
    """The gradient norm stays below a floor."""

    core = detectors.VanishingConfig

    # The core sets norms below 1e-12 to zero (numerics.TINY).
    threshold: Annotated[float, number(above=1e-12)] = _vanishing.threshold
    patience: Steps = _vanishing.patience


class Plateau(Table):
    """The loss has stopped falling, or stays at the level of guessing."""

    core = detectors.PlateauConfig

    window: Annotated[int, whole(least=2)] = _flat.window
    patience: Steps = _flat.patience
    min_improvement: NotNegative = _flat.min_improvement
    chance_level: Annotated[float | None, number(none=True)] = _flat.chance_level
    chance_margin: Positive = _flat.chance_margin


class Overfit(Table):
    """The evaluation loss stays far above the training loss."""

    core = detectors.OverfitConfig

    max_gap: Positive = _overfit.max_gap
    patience: Steps = _overfit.patience
    ema_decay: Fraction = _overfit.ema_decay


class LossRatio(Table):
    """The loss is several times the mean of recent losses."""

    core = detectors.LossRatioConfig
    rules = (
        _WARMUP_IN_WINDOW,
        AtMost("sustain", "escape", "longer", "from then on the high loss is the level"),
    )

    ratio: Annotated[float, number(above=1)] = _loss_ratio.ratio
    window: Annotated[int, whole(least=1, most=4096)] = _loss_ratio.window
    warmup_steps: Steps = _loss_ratio.warmup_steps
    sustain: Steps = _loss_ratio.sustain
    escape: Steps = _loss_ratio.escape


class LossCeiling(Table):
    """The loss is above a fixed level, or above all losses of the first steps."""

    core = detectors.LossCeilingConfig
    rules = (
        NumberUnless(
            "ceiling",
            "first_steps",
            "a number if first_steps is 0: otherwise nothing is compared",
            "ceiling = 5.0, or first_steps = 100",
        ),
    )

    ceiling: Annotated[float | None, number(none=True)] = _ceiling.ceiling
    first_steps: StepsOrZero = _ceiling.first_steps
    first_ratio: Ratio = _ceiling.first_ratio
    sustain: Steps = _ceiling.sustain


class LossWindow(Table):
    """The loss is many standard deviations above the mean of recent losses."""

    core = detectors.LossWindowConfig
    rules = (_WARMUP_IN_WINDOW,)

    sigmas: Positive = _loss_window.sigmas
    window: Annotated[int, whole(least=2, most=4096)] = _loss_window.window
    warmup_steps: Annotated[int, whole(least=2, most=4096)] = _loss_window.warmup_steps
    bessel: OnOff = _loss_window.bessel
    min_rel_std: NotNegative = _loss_window.min_rel_std
    sustain: Steps = _loss_window.sustain


class GradWindow(LossWindow):
    """`LossWindow` on the gradient norm."""

    core = detectors.GradWindowConfig


class GradEma(Table):
    """The gradient norm is far above the moving average of accepted norms."""

    core = detectors.GradEmaConfig
    rules = (
        NumberUnless(
            "ratio",
            "sigmas",
            "a number if sigmas is none: otherwise nothing is compared",
            "ratio = 20.0, or sigmas = 20.0",
        ),
        AtMost("sustain", "shift.patience", "longer", "from then on the high norm is the level"),
    )

    ratio: Annotated[float | None, number(above=1, none=True)] = _grad_ema.ratio
    sigmas: Limit = _grad_ema.sigmas
    ema_decay: Fraction = _grad_ema.ema_decay
    warmup_steps: Steps = _grad_ema.warmup_steps
    min_rel_std: NotNegative = _grad_ema.min_rel_std
    sustain: Annotated[int, whole(least=1, most=1_000_000)] = _grad_ema.sustain
    shift: Shift = Shift()


class GradCeiling(Table):
    """The gradient norm is above an absolute limit, or many times the first norms."""

    core = detectors.GradCeilingConfig
    rules = (
        NumberUnless(
            "ceiling",
            "first_ratio",
            "a number if first_ratio is none: otherwise nothing is compared",
            "ceiling = 100.0, or first_ratio = 10.0",
        ),
        AtMost("sustain", "escape", "longer", "from then on the first norms are learnt again"),
    )

    ceiling: Limit = _grad_ceiling.ceiling
    first_ratio: Annotated[float | None, number(least=1, none=True)] = _grad_ceiling.first_ratio
    first_steps: Steps = _grad_ceiling.first_steps
    sustain: Steps = _grad_ceiling.sustain
    escape: Steps = _grad_ceiling.escape


class Detect(Table):
    """All detectors, by their names in `healcore.core.detectors.DETECTORS`."""

    nonfinite: NonFinite | None = None
    loss_spike: LossSpike | None = None
    grad_spike: NormSpike | None = None
    divergence: Divergence | None = None
    instability: Instability | None = None
    records: Records | None = None
    vanishing: Vanishing | None = None
    plateau: Plateau | None = None
    overfit: Overfit | None = None
    update_spike: UpdateSpike | None = None
    loss_ratio: LossRatio | None = None
    loss_ceiling: LossCeiling | None = None
    loss_window: LossWindow | None = None
    grad_window: GradWindow | None = None
    grad_ema: GradEma | None = None
    grad_ceiling: GradCeiling | None = None
