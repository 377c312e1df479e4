"""The learning-rate multiplier: cut, hold, and a ramp that ends at exactly 1.0."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.engine.config import LrConfig


class LrState(NamedTuple):
    """Where the multiplier is on its way."""

    scale: Any
    """float32: the multiplier in force."""
    low: Any
    """float32: what the last cut left; where the ramp begins."""
    hold: Any
    """int32: steps still to hold."""
    ramp: Any
    """int32: steps of the ramp still to go."""


def init() -> LrState:
    """The user's own schedule, untouched."""
    one, none = np.ones((), np.float32), np.zeros((), np.int32)
    return LrState(one, one.copy(), none, none.copy())


def update(config: LrConfig, state: LrState, cut: Any, calm: Any, *, xp: Any) -> LrState:
    """One step: a cut multiplies what is in force; hold and ramp run only while it is calm.

    Args:
        config: factor, floor, hold and ramp.
        state: the multiplier.
        cut: bool, cut now.
        calm: bool, no incident is open.
        xp: the array namespace.
    """
    lower = numerics.larger(config.factor * state.scale, config.floor, xp=xp)
    # A floor above the multiplier in force may not raise it.
    lower = numerics.smaller(lower, state.scale, xp=xp)
    low = xp.where(cut, lower, state.low)
    hold = xp.where(cut, config.hold_steps, state.hold)
    ramp = xp.where(cut, config.ramp_steps, state.ramp)

    holding = hold > 0
    moves = calm & ~cut
    ramp = xp.where(moves & ~holding, numerics.sub_one(ramp, xp=xp), ramp)
    hold = xp.where(moves & holding, hold - 1, hold)
    # Not done / ramp_steps: dividing by a constant is not exact in XLA (numerics). 1 / n rounds to
    # the same float32 from Python's double and from an array.
    share = 1.0 / (config.ramp_steps + (config.ramp_steps == 0))
    climbed = numerics.as_float(config.ramp_steps - ramp, xp=xp) * share
    ramped = low + numerics.product(1.0 - low, climbed, xp=xp)
    done = ~holding & (ramp == 0)
    scale = xp.where(done, 1.0, xp.where(holding, low, ramped))
    # While an incident is open the multiplier stays where it is.
    scale = xp.where(cut, low, xp.where(calm, scale, state.scale))
    return LrState(scale, low, hold, ramp)
