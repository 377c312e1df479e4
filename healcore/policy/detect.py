"""`[detect.*]`: the detectors. A table that is there, even empty, switches its detector on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from healcore.core.detectors import (
    divergence,
    grad_spike,
    loss_spike,
    nonfinite,
    overfit,
    plateau,
    update_spike,
    vanishing,
)
from healcore.policy.clip import Shift
from healcore.policy.table import Conflict, Table
from healcore.policy.values import Fraction, NotNegative, Number, Positive, Ratio, Steps, Whole

_loss, _norm, _trend = loss_spike.Config(), grad_spike.Config(), divergence.Config()
_gone, _flat, _gap = vanishing.Config(), plateau.Config(), overfit.Config()


class NonFinite(Table):
    """NaN or infinite loss or gradient. No thresholds."""

    core = nonfinite.Config


class LossSpike(Table):
    """One bad batch, or a sustained departure from the own noise."""

    core = loss_spike.Config

    z_threshold: Positive = _loss.z_threshold
    evidence: Annotated[float, Number(above=0, most=15)] = _loss.evidence
    warmup_steps: Steps = _loss.warmup_steps
    escape: Steps = _loss.escape


class NormSpike(Table):
    """A norm far above its own recent level: of the gradient, or of the update."""

    core = grad_spike.Config

    z_threshold: Positive = _norm.z_threshold
    min_ratio: Ratio = _norm.min_ratio
    ema_decay: Fraction = _norm.ema_decay
    warmup_steps: Steps = _norm.warmup_steps
    sustain: Annotated[int, Whole(least=1, most=1_000_000)] = _norm.sustain
    shift: Shift = Shift()

    def conflicts(self) -> Iterator[Conflict]:
        """A spike has to be called sustained before it is called the level."""
        if self.sustain > self.shift.patience:
            yield Conflict(
                ("sustain",),
                self.sustain,
                f"at most shift.patience, which is {self.shift.patience}: by then the high norm "
                "is the new level",
                f"sustain = {self.shift.patience}, or a longer shift.patience",
            )


class UpdateSpike(NormSpike):
    """The same rule on the norm of the update."""

    core = update_spike.Config


class Divergence(Table):
    """The smoothed loss stands above its best level and does not come back."""

    core = divergence.Config

    rise: Positive = _trend.rise
    given_back: Annotated[float, Number(least=0, most=1)] = _trend.given_back
    patience: Steps = _trend.patience
    warmup_steps: Steps = _trend.warmup_steps


class Vanishing(Table):
    """The gradient norm stays below a floor."""

    core = vanishing.Config

    # Norms below 1e-12 are zero to the core (numerics.TINY).
    threshold: Annotated[float, Number(above=1e-12)] = _gone.threshold
    patience: Steps = _gone.patience


class Plateau(Table):
    """The loss has stopped falling, or sits at the level of guessing."""

    core = plateau.Config

    window: Annotated[int, Whole(least=2)] = _flat.window
    patience: Steps = _flat.patience
    min_improvement: NotNegative = _flat.min_improvement
    chance_level: Annotated[float | None, Number(none=True)] = _flat.chance_level
    chance_margin: Positive = _flat.chance_margin


class Overfit(Table):
    """The evaluation loss stays far above the training loss."""

    core = overfit.Config

    max_gap: Positive = _gap.max_gap
    patience: Steps = _gap.patience
    ema_decay: Fraction = _gap.ema_decay


class Detect(Table):
    """All detectors, by the names of `healcore.core.detectors.DETECTORS`."""

    nonfinite: NonFinite | None = None
    loss_spike: LossSpike | None = None
    grad_spike: NormSpike | None = None
    divergence: Divergence | None = None
    vanishing: Vanishing | None = None
    plateau: Plateau | None = None
    overfit: Overfit | None = None
    update_spike: UpdateSpike | None = None
