"""Detectors, one file each, all with the same names.

`Config` is a NamedTuple of thresholds, and `init(config)` gives the state as NumPy arrays.
`update(config, state, seen, *, xp)` judges one step against the state, then learns it, and returns
`(state, Reading)`. Without the signals in `NEEDS` a detector is inactive.
"""

from __future__ import annotations

from types import ModuleType

from healcore.core.detectors import (
    divergence,
    grad_ceiling,
    grad_ema,
    grad_spike,
    grad_window,
    instability,
    loss_ceiling,
    loss_ratio,
    loss_spike,
    loss_window,
    nonfinite,
    overfit,
    plateau,
    records,
    update_spike,
    vanishing,
)
from healcore.core.verdict import NONFINITE, Cause

DETECTORS: dict[str, ModuleType] = {
    "nonfinite": nonfinite,
    "loss_spike": loss_spike,
    "grad_spike": grad_spike,
    "divergence": divergence,
    "instability": instability,
    "records": records,
    "vanishing": vanishing,
    "plateau": plateau,
    "overfit": overfit,
    "update_spike": update_spike,
    "loss_ratio": loss_ratio,
    "loss_ceiling": loss_ceiling,
    "loss_window": loss_window,
    "grad_window": grad_window,
    "grad_ema": grad_ema,
    "grad_ceiling": grad_ceiling,
}
"""Detectors by their name in a policy file, in the order in which they run."""

CAUSES: dict[str, Cause] = {
    "nonfinite": NONFINITE,
    "nonfinite_loss": Cause.NONFINITE_LOSS,
    "nonfinite_grad": Cause.NONFINITE_GRAD,
    "loss_spike": Cause.LOSS_SPIKE,
    "grad_spike": Cause.GRAD_SPIKE,
    "divergence": Cause.DIVERGENCE,
    "instability": Cause.INSTABILITY,
    "records": Cause.RECORDS,
    "vanishing": Cause.GRAD_VANISHING,
    "plateau": Cause.PLATEAU,
    "overfit": Cause.OVERFIT,
    "update_spike": Cause.UPDATE_SPIKE,
    "loss_ratio": Cause.LOSS_SPIKE,
    "loss_ceiling": Cause.DIVERGENCE,
    "loss_window": Cause.LOSS_SPIKE,
    "grad_window": Cause.GRAD_SPIKE,
    "grad_ema": Cause.GRAD_SPIKE,
    "grad_ceiling": Cause.GRAD_SPIKE,
}
"""The names that a rule's `to` may have on the device, and their flags."""
