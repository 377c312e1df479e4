"""From the ordered decision to the enforced one."""

from __future__ import annotations

from typing import Any

from healcore.core.verdict import Decision


def observed_only(decision: Decision, *, xp: Any) -> Decision:
    """The neutral decision of `mode = "observe"`, with the causes."""
    always = decision.skip | True
    return _neutral(decision, always, 1.0, xp=xp)


def neutral_if_skipped(
    decision: Decision, externally_skipped: Any, lr_scale: Any, *, xp: Any
) -> Decision:
    """The neutral decision, with `lr_scale` and no cause, where the caller skips the step."""
    neutral = _neutral(decision, externally_skipped, lr_scale, xp=xp)
    return neutral._replace(cause=xp.where(externally_skipped, 0, decision.cause))


def pick(condition: Any, old: Any, new: Any, *, xp: Any) -> Any:
    """`where(condition, old, new)` for a leaf that may have trailing axes."""
    trailing = (None,) * (new.ndim - condition.ndim)
    return xp.where(condition[(..., *trailing)] if trailing else condition, old, new)


def _neutral(decision: Decision, when: Any, lr_scale: Any, *, xp: Any) -> Decision:
    group = decision.group_scale
    return decision._replace(
        grad_scale=xp.where(when, 1.0, decision.grad_scale),
        skip=decision.skip & ~when,
        lr_scale=xp.where(when, lr_scale, decision.lr_scale),
        action=xp.where(when, 0, decision.action),
        rollback_depth=xp.where(when, 0, decision.rollback_depth),
        group_scale=None if group is None else xp.where(when[..., None], 1.0, group),
    )
