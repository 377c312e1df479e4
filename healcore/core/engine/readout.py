"""Named scalars for a logger."""

from __future__ import annotations

from typing import Any

from healcore.core.engine.state import EngineState


def metrics(state: EngineState) -> dict[str, Any]:
    """The last step and the totals so far as 0-d arrays; nothing is copied.

    `heal/loss`, `heal/grad_norm` (last finite ones), `heal/threshold` (0 = none in force),
    `heal/z`, `heal/z_loss`, `heal/grad_scale`, `heal/skip`, `heal/lr_scale`, `heal/cause` and
    `heal/action` (flags), as ordered at the last step, and the counts `heal/steps`, `heal/clips`,
    `heal/skips`, `heal/alarms`, `heal/rollbacks`, `heal/lr_cuts`, `heal/incidents`. In observe mode
    they hold what would have been done.
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
    }
