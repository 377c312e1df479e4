"""Named scalars for a logger."""

from __future__ import annotations

from typing import Any

from healcore.core.engine.state import EngineState


def metrics(state: EngineState) -> dict[str, Any]:
    """The last step, and counts so far, as 0-d arrays; nothing is copied.

    Counts are of all steps that were judged, with those that a rollback has undone.

    `heal/loss` and `heal/grad_norm` are the last finite ones, `heal/threshold` is 0 if none is in
    force, `heal/cause` and `heal/action` are flags. A policy with `update_clip` has three more. In
    observe mode they are what would have been done.
    """
    last, tally = state.last, state.tally
    return {
        "heal/loss": last.loss,
        "heal/grad_norm": last.grad_norm,
        "heal/threshold": last.threshold,
        "heal/z": last.z,
        "heal/z_loss": last.z_loss,
        "heal/grad_scale": last.decision.grad_scale,
        "heal/skip": last.decision.skip,
        "heal/lr_scale": last.decision.lr_scale,
        "heal/cause": last.decision.cause,
        "heal/action": last.decision.action,
        "heal/steps": state.step,
        "heal/clips": tally.clips,
        "heal/skips": tally.skips,
        "heal/alarms": tally.alarms,
        "heal/rollbacks": tally.rollbacks,
        "heal/lr_cuts": tally.lr_cuts,
        "heal/incidents": state.incident.number,
        **of_updates(state),
    }


def of_updates(state: EngineState) -> dict[str, Any]:
    """The numbers of the clip of the update; empty for a policy without one."""
    clip = getattr(state, "update_clip", None)
    if clip is None:
        return {}
    return {
        "heal/update_norm": clip.norm,
        "heal/update_scale": clip.scale,
        "heal/update_clips": clip.clips,
    }
