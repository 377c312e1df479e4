"""Takes a trainer's own gradient clipping over into a policy.

A trainer clips before the policy measures the norm: a spike of 700 would be judged as 1.0.
"""

from __future__ import annotations

from healcore.core.engine import Engine
from healcore.policy.document import Policy
from healcore.policy.loader import load

_WITH_LIMIT = ("recent_max", "zclip", "fixed", "autoclip")
"""Kinds of clipping whose `max_norm` holds at every step."""


def keeps_limit(policy: Policy | Engine) -> bool:
    """Whether the policy's clipping can hold a fixed limit at every step.

    Not without clipping, not in observe mode, where nothing is clipped, and not with AdaGC, whose
    limit ends with its warm-up. There the trainer has to, and for an Engine, whose numbers may be
    traced arrays.
    """
    return isinstance(policy, Policy) and policy.mode == "heal" and policy.clip.kind in _WITH_LIMIT


def with_limit(policy: Policy | Engine, limit: float | None) -> Policy | Engine:
    """The policy with a trainer's limit as its own `max_norm`, unless that is lower already.

    Unchanged without a limit, and if `keeps_limit` is False for it.
    """
    if limit is None or not isinstance(policy, Policy) or not keeps_limit(policy):
        return policy
    own = getattr(policy.clip, "max_norm", None)
    if isinstance(own, int | float) and own <= limit:
        return policy
    return load(policy, clip={"max_norm": float(limit)})
