"""The result of a detector (`Reading`), the order of the engine (`Decision`), and their flags."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple


class Cause(enum.IntFlag):
    """What is wrong. Detectors on the device set the first eleven; the host sets the rest."""

    NONFINITE_LOSS = 1
    NONFINITE_GRAD = 2
    GRAD_SPIKE = 4
    LOSS_SPIKE = 8
    DIVERGENCE = 16
    GRAD_VANISHING = 32
    PLATEAU = 64
    OVERFIT = 128
    UPDATE_SPIKE = 256
    INSTABILITY = 512
    RECORDS = 1024
    OOM = 1 << 16
    DATA = 1 << 17
    NETWORK = 1 << 18
    HANG = 1 << 19
    UNKNOWN = 1 << 20
    WORKER = 1 << 21


NONFINITE = Cause.NONFINITE_LOSS | Cause.NONFINITE_GRAD
"""Causes of a step with a non-finite loss or gradient."""


class Action(enum.IntFlag):
    """Requests to the host. Skipped steps are not among them, see `Decision.skip`."""

    ALERT = 1
    SAVE = 2
    ROLLBACK = 4
    STOP = 8
    CUT_LR = 16
    """The LR multiplier was cut at this step; `Decision.lr_scale` includes the cut."""


def names(flags: enum.IntFlag) -> list[str]:
    """Names of the set flags, lowest bit first: ``names(Cause(12)) == ["GRAD_SPIKE", ...]``."""
    return [member.name for member in type(flags) if member.name and member & flags]


def flag(condition: Any, flags: int, *, xp: Any) -> Any:
    """Returns `flags` as int32 where `condition` holds, else 0.

    Not `where(condition, flags, 0)`: each backend chooses another dtype for two Python numbers.
    """
    if hasattr(xp, "flag"):
        return xp.flag(condition, int(flags))
    bit = xp.astype(condition, xp.int32)
    return bit if flags == 1 else bit * int(flags)


class Reading(NamedTuple):
    """A detector's result for one step: 0-d arrays, or arrays of the batch's shape."""

    alarm: Any
    """bool: this step is an outlier."""
    sustained: Any
    """bool: the fault lasts, so a rollback may help. During a sustained spike a single step may be
    normal; `alarm` is then false."""
    cause: Any = None
    """int32 `Cause` flags from a detector with several causes, else None for its `CAUSE`."""
    z: Any = None
    """float32 score of `loss_spike`, 0 in its warm-up; None from other detectors."""


class Decision(NamedTuple):
    """The decision about one step, in 0-d arrays."""

    grad_scale: Any
    """float32 in [0, 1]: factor on all gradients, 1 = unchanged."""
    skip: Any
    """bool: keep parameters, moments and counters unchanged."""
    lr_scale: Any
    """float32 in (0, 1]: factor on the update, 1 = the user's own schedule."""
    action: Any
    """int32 `Action` flags for the host."""
    cause: Any
    """int32 `Cause` flags."""
    rollback_depth: Any
    """int32: known-good checkpoint to restore, 1 = newest; 0 without ROLLBACK."""
    group_scale: Any = None
    """float32 (n,): one factor per tensor from per-tensor clipping rules; else None."""


class Telemetry(NamedTuple):
    """Numbers of the last step for loggers and reports; always finite."""

    decision: Decision
    """The ordered decision; in observe mode the enforced decision is neutral."""
    loss: Any
    """float32: last finite loss."""
    grad_norm: Any
    """float32: last finite global gradient norm, before clipping."""
    threshold: Any
    """float32: norm above which gradients are clipped; 0 without a threshold."""
    z: Any
    """float32: z-score of the norm in the clipping rule; 0 during warm-up."""
    z_loss: Any
    """float32: score of the loss-spike detector; 0 during warm-up or without the detector."""
