"""Signals of one training step, raw (`Signals`) and checked (`CheckedSignals`)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from healcore.core.array_namespace import (
    FLOAT32_MAX,
    SIGNAL_LIMIT,
    TINY,
    Flag,
    Float,
    Norms,
    Number,
    xp,
)
from healcore.core.decision import Telemetry
from healcore.core.errors import HealcoreError


class SignalError(HealcoreError, ValueError):
    """A signal of wrong type or shape; the message says what was received and what to pass.

    For example, a loss was passed as the tuple (loss, aux), or as one value for each sample of the
    batch. A loss that is NaN raises no error: NaN is what the engine judges.
    """

    __module__ = "healcore.errors"


class Signals(NamedTuple):
    """One step's observations, each a float32 0-d array (or of one batch shape), or None.

    None means that the run never has the signal. A detector without its signal is inactive. Which
    signals a run has is fixed before its first step, because a compiled step is traced with them.
    """

    loss: Float | None = None
    """Training loss of this step."""
    grad_norm: Float | None = None
    """Global L2 norm of the gradients, float32, before any clipping; at least 0."""
    eval_loss: Float | None = None
    """Evaluation loss; NaN at a step without an evaluation."""
    group_norms: Norms | None = None
    """(n,) L2 norm of each tensor's gradient, for per-tensor clipping."""
    change_expected: Flag | None = None
    """bool: opens the grace window, because the LR, batch, data or weights change."""
    externally_skipped: Flag | None = None
    """bool: whether the caller skips this step, as after an overflow of a GradScaler. The engine
    then neither learns nor counts the step. It uses only `change_expected` and `eval_loss`, because
    these are reported once."""
    learning_rate: Float | None = None
    """float32: the schedule's learning rate at this step. With it, the limit on the learning rate
    is absolute. Without it, the schedule is assumed to be constant."""


class CheckedSignals(NamedTuple):
    """Signals that are safe for arithmetic, and flags of what was replaced.

    Every value is finite and at most `SIGNAL_LIMIT`: NaN, Inf and invalid norms are replaced. A
    value is None if the run never has its signal, see `Signals`; its flag is False then. All
    detectors get the same observed signals, so that each signal is checked once in a step.
    """

    loss: Float
    """Training loss; the last finite loss where `bad_loss` holds."""
    grad_norm: Float
    """Global gradient norm before clipping; the last finite one, or 0 if the policy clips, where
    `bad_grad` holds."""
    eval_loss: Float
    """Evaluation loss; 0 where `has_eval` is false."""
    group_norms: Norms
    """Gradient norm of each tensor; 0 for a norm that is not finite."""
    bad_loss: Flag
    """Whether the loss is NaN or infinite."""
    bad_grad: Flag
    """Whether a gradient norm is NaN, infinite, too large to clip, or negative."""
    bad: Flag
    """Whether a signal is bad."""
    finite: Flag
    """Whether baselines may learn this step: all signals are finite, and the caller does not skip
    the step."""
    has_eval: Flag
    """Whether this step has an evaluation."""
    restart: Flag
    """Whether a change is expected, so that baselines restart their warm-up."""


def check_signals(
    signals: Signals, restart: Flag, last: Telemetry, *, clips: bool
) -> CheckedSignals:
    """Checks the signals of a step, once for all detectors.

    Args:
        signals: as the adapter measured them.
        restart: a change is expected at this step.
        last: has the last finite loss and norm, which replace a loss or norm that is not finite.
        clips: whether the policy clips. No float32 factor clips a gradient above `SIGNAL_LIMIT`, so
            such a norm is then bad. A bad norm is replaced by 0, because a clipping rule would
            learn the last norm again.
    """
    largest_norm, other_norm = FLOAT32_MAX, last.grad_norm
    if clips:
        largest_norm, other_norm = SIGNAL_LIMIT, 0.0
    # A norm is not negative, except by rounding.
    loss = grad_norm = group_norms = eval_loss = None
    bad_loss = bad_grad = has_eval = restart & False
    if signals.loss is not None:
        loss, bad_loss = sanitized(signals.loss, -FLOAT32_MAX, FLOAT32_MAX, last.loss)
    if signals.grad_norm is not None:
        grad_norm, bad_grad = sanitized(signals.grad_norm, -TINY, largest_norm, other_norm)
    if signals.group_norms is not None:
        group_norms, bad = sanitized(signals.group_norms, -TINY, largest_norm)
        bad_grad = bad_grad | (xp.sum(xp.as_int(bad), -1) > 0)
    if signals.eval_loss is not None:
        eval_loss, bad = sanitized(signals.eval_loss, -FLOAT32_MAX, FLOAT32_MAX)
        has_eval = ~bad
    bad = xp.shared(bad_loss | bad_grad)
    skipped = signals.externally_skipped
    return CheckedSignals(
        loss=loss,
        grad_norm=grad_norm,
        eval_loss=eval_loss,
        group_norms=group_norms,
        bad_loss=bad_loss,
        bad_grad=bad_grad,
        bad=bad,
        finite=~bad if skipped is None else ~(bad | skipped),
        has_eval=has_eval,
        restart=restart,
    )


def sanitized(x: Float, low: float, high: float, other: Float | Number = 0.0) -> tuple[Float, Flag]:
    """Makes a signal safe for arithmetic, and finds out whether it is bad.

    Args:
        x: the signal, float32 of any shape.
        low: the smallest value that is not bad.
        high: the largest value that is not bad.
        other: replaces bad values.

    Returns:
        `x` limited to `SIGNAL_LIMIT`, where values of at most `TINY` are 0; and a bool array of its
        shape: the value is bad, which is NaN or outside of the range.
    """
    bad = xp.clip(x, low, high) != x
    limited = xp.flush(xp.clip(x, -SIGNAL_LIMIT, SIGNAL_LIMIT), TINY)
    return xp.where(bad, other, limited), bad


def check_scalar(name: str, value: Float) -> np.float32:
    """Converts a number on the host to a float32 signal; NaN and Inf are allowed.

    A number beyond the range of float32 becomes infinite, as on a device.

    Args:
        name: the signal's name, for the message.
        value: a number or a one-element array.

    Raises:
        SignalError: `value` is None, text, a bool, not numeric, or not one element.
    """
    array = None
    if not isinstance(value, str | bytes | bool | np.bool_ | Mapping | None):
        with np.errstate(over="ignore"), suppress(TypeError, ValueError, OverflowError):
            array = np.asarray(value, dtype=np.float64)
    if array is None or array.size != 1:
        if array is None:
            shown = repr(value)
        else:
            shown = f"{array.size} numbers of shape {array.shape}"
        raise SignalError(
            f"{name} must be one number, got {type(value).__name__} ({shown:.60}): write "
            "loss.mean() instead of one loss for each sample, and loss instead of (loss, aux)"
        )
    with np.errstate(over="ignore"):
        return np.float32(array.reshape(()))
