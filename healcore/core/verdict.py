"""What a detector returns (`Reading`) and what the engine orders (`Decision`), with their flags."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple


class Cause(enum.IntFlag):
    """Why something is wrong. The first eleven are decided on the device, the rest on the host."""

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


NONFINITE = Cause.NONFINITE_LOSS | Cause.NONFINITE_GRAD
"""The two causes of a step that is not finite."""


class Action(enum.IntFlag):
    """What the host is asked to do. The device itself skips steps, see `Decision.skip`."""

    ALERT = 1
    SAVE = 2
    ROLLBACK = 4
    STOP = 8
    CUT_LR = 16
    """The LR multiplier was cut at this step; `Decision.lr_scale` has it already."""
    SOFT_STEP = 32
    """This step alone is a fraction of an ordinary one; `Decision.lr_scale` has it already."""


def names(flags: int) -> list[str]:
    """Names of the set flags, lowest bit first: ``names(Cause(12)) == ["GRAD_SPIKE", ...]``."""
    kind = type(flags) if isinstance(flags, enum.IntFlag) else None
    if kind is None:
        raise TypeError(
            f"names() takes a Cause or an Action, got {type(flags).__name__}: "
            f"wrap the number, as in names(Cause({flags!r}))"
        )
    return [member.name for member in kind if member.name and member & flags]


def flag(condition: Any, flags: int, *, xp: Any) -> Any:
    """`flags` as int32 where `condition` holds, else 0.

    Not `where(condition, flags, 0)`: for two Python numbers each backend chooses its own dtype.
    """
    return xp.astype(condition, xp.int32) * int(flags)


class Reading(NamedTuple):
    """One detector's result for one step: 0-d arrays, or arrays of the batch's shape."""

    alarm: Any
    """bool: this step is an outlier."""
    sustained: Any
    """bool: the trouble lasts (what a rollback is for). A step within a sustained spike may itself
    be normal: then `alarm` is false."""
    cause: Any = None
    """int32 `Cause` flags of a detector with several causes, else None for its `CAUSE`."""
    z: Any = None
    """float32 score of `loss_spike`, 0 in its warm-up, or None from another detector."""


class Decision(NamedTuple):
    """What is done with one step. 0-d arrays."""

    grad_scale: Any
    """float32 in [0, 1]: factor on all gradients, 1 = untouched."""
    skip: Any
    """bool: leave parameters, moments and counters exactly as they are."""
    lr_scale: Any
    """float32 in (0, 1]: factor on the update, 1 = the user's own schedule."""
    action: Any
    """int32 `Action` flags for the host."""
    cause: Any
    """int32 `Cause` flags."""
    rollback_depth: Any
    """int32: how many known-good checkpoints to go back when ROLLBACK is set, else 0."""
    group_scale: Any = None
    """float32 (n,), one factor per tensor, from per-tensor clipping rules; else None."""


class Telemetry(NamedTuple):
    """The last step as the engine judged it, for loggers and reports; always finite."""

    decision: Decision
    """As ordered, also in observe mode, where the enforced one is neutral."""
    loss: Any
    """float32: last finite loss."""
    grad_norm: Any
    """float32: last finite global gradient norm, before clipping."""
    threshold: Any
    """float32: the norm above which this step would have been clipped; 0 = none in force."""
    z: Any
    """float32: the clipping rule's z-score of the norm; 0 during warm-up."""
    z_loss: Any
    """float32: the loss-spike detector's score; 0 during warm-up or without that detector."""
