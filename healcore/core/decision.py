"""The engine's `Decision` about one step, its flags, and the `DetectorResult` of each detector."""

from __future__ import annotations

import enum
from typing import NamedTuple

from healcore.core.array_namespace import Flag, Float, Int, Norms


class Cause(enum.IntFlag):
    """What is wrong with a step, as bit flags, because a step may have several causes.

    Detectors set the flags up to RECORDS within the step. The host sets the other flags, for
    exceptions and hangs (`healcore/runtime/faults/classification.py`). A flag keeps its number,
    because the numbers are saved in states. The value 256 belonged to a cause of older versions.
    """

    NONFINITE_LOSS = 1
    NONFINITE_GRAD = 2
    GRAD_SPIKE = 4
    LOSS_SPIKE = 8
    DIVERGENCE = 16
    GRAD_VANISHING = 32
    PLATEAU = 64
    OVERFIT = 128
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
LASTING = Cause.PLATEAU | Cause.OVERFIT | Cause.GRAD_VANISHING
"""Causes that raise an alarm at every step until they end, also if the policy only alerts."""


class Action(enum.IntFlag):
    """What the policy asks the host to do, as bit flags, because a step may order several actions.

    A skip is not an action: it happens within the step, see `Decision.skip`. The host reads these
    flags some steps later, when the results of the device have arrived.
    """

    ALERT = 1
    SAVE = 2
    ROLLBACK = 4
    STOP = 8
    CUT_LR = 16
    """The LR multiplier was cut at this step; `Decision.lr_scale` includes the cut."""


def names_of(flags: enum.Flag) -> list[str]:
    """Lists the names of the set flags.

    Args:
        flags: a `Cause` or an `Action`.

    Returns:
        The names, lowest bit first: ``["GRAD_SPIKE", "LOSS_SPIKE"]`` for ``Cause(12)``.
    """
    if flags:
        return [each.name for each in type(flags) if each.name and each & flags]
    return []


class DetectorResult(NamedTuple):
    """What a detector has found at one step: 0-d arrays, or arrays of the batch's shape.

    A detector only reports. The rules of the policy decide what its alarm leads to, and a rule may
    react to every alarm or to sustained alarms only.
    """

    alarm: Flag
    """bool: this step is an outlier."""
    sustained: Flag | None = None
    """bool: the fault lasts, so a rollback may help. During a sustained spike a single step may be
    normal; `alarm` is then false. None if every alarm is sustained."""
    cause: Int | None = None
    """int32 `Cause` flags from a detector with several causes, else None for its `CAUSE`."""
    z: Float | None = None
    """float32 score of `loss_spike`, 0 in its warm-up; None from other detectors."""


class Decision(NamedTuple):
    """The decision about one step, in 0-d arrays.

    The adapter carries out the factors and `skip` within the step. The action, the cause and the
    depth are for the host, which reads them later. `neutral` in `engine/state.py` makes the
    decision that changes nothing.
    """

    grad_scale: Float
    """float32 in [0, 1]: factor on all gradients, 1 = unchanged."""
    skip: Flag
    """bool: keep parameters, moments and counters unchanged."""
    lr_scale: Float
    """float32 in (0, 1]: factor on the update, 1 = the user's own schedule."""
    action: Int
    """int32 `Action` flags for the host."""
    cause: Int
    """int32 `Cause` flags."""
    rollback_depth: Int
    """int32: known-good checkpoint to restore, 1 = newest; 0 without ROLLBACK."""
    group_scale: Norms = None
    """float32 (n,): one factor per tensor from per-tensor clipping rules; else None."""


class Telemetry(NamedTuple):
    """Numbers of the last step for loggers and reports; always finite.

    Decisions depend on the last finite loss and norm only, which replace a NaN in the statistics.
    A state with NaN in it could not be compared or saved as JSON.
    """

    decision: Decision
    """The ordered decision; in observe mode the enforced decision is neutral."""
    loss: Float
    """float32: last finite loss. -0.0 before the first one, which no measured loss is: NaN here
    would make a checkpoint count as bad. `step_record.loss_or_nan` reads it."""
    grad_norm: Float
    """float32: last finite global gradient norm, before clipping."""
    threshold: Float
    """float32: norm above which gradients are clipped; 0 without a threshold."""
    z: Float
    """float32: z-score of the norm in the clipping rule; 0 during warm-up."""
    z_loss: Float
    """float32: score of the loss-spike detector; 0 during warm-up or without the detector."""
