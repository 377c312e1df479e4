"""One row, judged: the engine's step, and what a replay keeps of it. Pure, in every backend."""

from __future__ import annotations

from typing import Any, NamedTuple

from healcore.core.engine import Engine, EngineState
from healcore.core.signals import Signals


class Verdict(NamedTuple):
    """What was decided about one row, or about each row of a chunk.

    As ordered: under a policy with `mode = "observe"` too, where what is enforced is neutral.
    """

    cause: Any
    """int32 `Cause` flags."""
    action: Any
    """int32 `Action` flags, as the engine gave them."""
    skip: Any
    """bool."""
    grad_scale: Any
    """float32."""
    lr_scale: Any
    """float32."""
    threshold: Any
    """float32: the norm above which the row would be clipped; 0 = none in force."""
    z: Any
    """float32: the clipping rule's score of the norm."""
    z_loss: Any
    """float32: the loss-spike detector's score."""
    due: Any
    """bool: a rollback was due at this row, whether or not the budget still paid for it."""
    incident: Any
    """int32: incidents so far."""
    open: Any
    """bool: an incident is in progress."""


def judged(
    engine: Engine, state: EngineState, signals: Signals, *, xp: Any
) -> tuple[EngineState, Verdict]:
    """The state after one row, and what was decided about it.

    Args:
        engine: the policy.
        state: before the row.
        signals: what the row logged.
        xp: the array namespace.
    """
    new, _ = engine.step(state, signals, xp=xp)
    ordered, after = new.last.decision, new.incident
    # The incident counts alarms since its last order of a rollback, from 0, whether or not the
    # budget still paid for it. At a step in alarm (quiet is 0) that is 0 only for a new order.
    due = after.open & (after.quiet == 0) & (after.recovered == 0)
    return new, Verdict(
        cause=ordered.cause,
        action=ordered.action,
        skip=ordered.skip,
        grad_scale=ordered.grad_scale,
        lr_scale=ordered.lr_scale,
        threshold=new.last.threshold,
        z=new.last.z,
        z_loss=new.last.z_loss,
        due=due,
        incident=after.number,
        open=after.open,
    )
