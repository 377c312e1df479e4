"""The tables `[clip]`, one class per `kind` of gradient clipping."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from healcore.core.baseline import ShiftConfig
from healcore.core.clipping import (
    AdaGCConfig,
    AutoClipConfig,
    FixedConfig,
    ZClipConfig,
)
from healcore.policy.table import (
    Fraction,
    Limit,
    NotNegative,
    Positive,
    Ratio,
    Steps,
    Table,
    Target,
    number,
    whole,
)

_shift, _zclip, _auto, _adagc = ShiftConfig(), ZClipConfig(), AutoClipConfig(), AdaGCConfig()


class Shift(Table):
    """`[….shift]`: when repeatedly rejected values become the new level."""

    core = ShiftConfig

    # The count, up to patience x gain, is an int32.
    patience: Annotated[int, whole(least=1, most=1_000_000)] = _shift.patience
    gain: Annotated[int, whole(least=1, most=1000)] = _shift.gain
    forgive: Annotated[int, whole(least=0, most=1_000_000)] = _shift.forgive


class _Clip(Table):
    """Base of the kinds; `kind` is a name in `healcore.core.clipping.RULES`, or none."""

    kind: str

    def rule(self) -> tuple[str, Any] | None:
        """Name and config of the core's rule, or None for no clipping."""
        return self.kind, self.config()


class ZClip(_Clip):
    """Clips a norm that is unusually large for its own history (arXiv:2504.02507)."""

    core = ZClipConfig

    kind: Literal["zclip"]
    z_threshold: Positive = _zclip.z_threshold
    ema_decay: Fraction = _zclip.ema_decay
    warmup_steps: Steps = _zclip.warmup_steps
    target: Target = "reciprocal"
    max_norm: Limit = _zclip.max_norm
    min_rel_std: NotNegative = _zclip.min_rel_std
    shift: Shift = Shift()


class Fixed(_Clip):
    """Clips at one absolute limit, as clip_grad_norm_ and clip_by_global_norm do."""

    core = FixedConfig

    kind: Literal["fixed"]
    max_norm: Positive = FixedConfig().max_norm


class AutoClip(_Clip):
    """Clips at a percentile of the recent norms (arXiv:2007.14469)."""

    core = AutoClipConfig

    kind: Literal["autoclip"]
    percentile: Annotated[float, number(above=0, below=100)] = _auto.percentile
    window: Steps = _auto.window
    max_norm: Limit = _auto.max_norm


class AdaGC(_Clip):
    """Clips each tensor relative to the moving average of its norm (arXiv:2502.11034)."""

    core = AdaGCConfig

    kind: Literal["adagc"]
    ratio: Ratio = _adagc.ratio
    ema_decay: Fraction = _adagc.ema_decay
    warmup_steps: Steps = _adagc.warmup_steps
    max_norm: Positive = _adagc.max_norm
    shift: Shift = Shift(**_adagc.shift._asdict())


class NoClip(_Clip):
    """No clipping."""

    kind: Literal["none"] = "none"

    def rule(self) -> None:
        """None."""


Clip = Annotated[ZClip | Fixed | AutoClip | AdaGC | NoClip, Field(discriminator="kind")]

KINDS: dict[str, type[Table]] = {
    "zclip": ZClip,
    "fixed": Fixed,
    "autoclip": AutoClip,
    "adagc": AdaGC,
    "none": NoClip,
}
