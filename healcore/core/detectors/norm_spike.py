"""A norm far above its own recent level, on any scale, for gradients and updates.

The level is a moving average of accepted norms and the scale one of their absolute deviations:
without squares, which one outlier would dominate. A spike has to exceed a multiple of the level too
(`min_ratio`): after near-constant norms one percent is many deviations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import level_shift, numerics, warmup


class NormSpikeConfig(NamedTuple):
    """Thresholds; numbers may be arrays."""

    z_threshold: Any = 8.0
    """Mean absolute deviations above the level."""
    min_ratio: Any = 3.0
    """Multiple of the level that a spike reaches at least."""
    ema_decay: Any = 0.97
    """Decay of level and scale per accepted step."""
    warmup_steps: Any = 25
    """Steps learnt before a spike is called one."""
    sustain: Any = 5
    """Spikes in a row (leaky) that make it sustained."""
    shift: level_shift.ShiftConfig = level_shift.ShiftConfig()
    """When the high norm has become the level."""


class NormSpikeState(NamedTuple):
    """The baseline of a norm."""

    count: Any  # int32: steps learnt, up to the end of warm-up
    level: Any  # float32
    scale: Any  # float32: mean absolute deviation from the level
    shift: level_shift.ShiftState


class NormSpike(NamedTuple):
    """The result for one step."""

    alarm: Any
    sustained: Any
    z: Any


def init(config: NormSpikeConfig) -> NormSpikeState:
    """A baseline at the start of its warm-up."""
    del config
    zero = np.zeros((), np.float32)
    return NormSpikeState(np.zeros((), np.int32), zero, zero.copy(), level_shift.init())


def update(
    config: NormSpikeConfig, state: NormSpikeState, norm: Any, learn: Any, restart: Any, *, xp: Any
) -> tuple[NormSpikeState, NormSpike]:
    """Judges `norm` (float32, finite) against the baseline, then learns it if accepted."""
    learn = learn & (norm > 0)
    count = xp.where(restart, 0, state.count)
    warm = count < config.warmup_steps
    gap = norm - state.level
    scale = state.scale
    far = (gap > config.z_threshold * scale) & (norm > config.min_ratio * state.level)
    alarm = learn & ~warm & far
    known = ~warm & (scale > 0)
    z = xp.where(known, numerics.quotient(gap, xp.where(known, scale, 1.0), xp=xp), 0.0)

    watch, shift = level_shift.update(
        config.shift, state.shift, norm, alarm, learn & ~warm, restart, xp=xp
    )
    taught = learn & ~alarm
    value, first_were_outliers = warmup.robust(norm, state.level, count, warm, xp=xp)
    count = xp.where(taught & first_were_outliers, 0, count)
    seen = xp.where(taught & warm, count + 1, count)
    divisor = numerics.as_float(xp.where(seen > 0, seen, 1), xp=xp)
    rate = numerics.complement(config.ema_decay, norm)
    first = taught & (count == 0)
    level = xp.where(first, 0.0, state.level)
    gap = value - level
    level = level + xp.where(taught, warmup.step(gap, divisor, rate, warm, xp=xp), 0.0)
    # The first norm has no deviation.
    off = xp.where(first, 0.0, xp.abs(gap))
    scale = xp.where(first, 0.0, scale)
    gap = off - scale
    scale = scale + xp.where(taught, warmup.step(gap, divisor, rate, warm, xp=xp), 0.0)
    level, scale = numerics.settle(level, xp=xp), numerics.settle(scale, xp=xp)
    level = xp.where(shift.escaped, shift.level, level)
    sustained = alarm & (watch.run >= config.sustain * config.shift.gain)
    return NormSpikeState(seen, level, scale, watch), NormSpike(alarm, sustained | shift.escaped, z)
