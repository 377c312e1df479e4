"""Moves a trainer's own gradient clipping into a policy.

A trainer clips before the policy measures the norm, so a spike of 700 would be judged as 1.0.
"""

from __future__ import annotations

from healcore.core.engine import Engine
from healcore.policy.document import Policy
from healcore.policy.loader import load

_WITH_LIMIT = ("zclip", "fixed", "autoclip")
"""Kinds of clipping whose `max_norm` applies at every step."""


def can_apply_limit(policy: Policy | Engine) -> bool:
    """Whether the policy's clipping can apply a fixed limit at every step.

    False without clipping, where the trainer's own clip gives the same bits as without healcore; in
    observe mode; and with AdaGC, whose limit ends with its warm-up. Also False for an Engine, whose
    numbers may be traced arrays. The trainer then clips, after the policy has measured.
    """
    return isinstance(policy, Policy) and policy.mode == "heal" and policy.clip.kind in _WITH_LIMIT


def with_limit(policy: Policy | Engine, limit: float | None) -> Policy | Engine:
    """Returns the policy with a trainer's limit as `max_norm`, unless its own limit is lower.

    In a policy without clipping this limit alone clips. The policy is unchanged if `limit` is None,
    for an Engine, in observe mode and with AdaGC.
    """
    if limit is None or not isinstance(policy, Policy) or policy.mode != "heal":
        return policy
    if policy.clip.kind not in ("none", *_WITH_LIMIT):
        return policy
    own = getattr(policy.clip, "max_norm", None)
    if isinstance(own, int | float) and own <= limit:
        return policy
    return load(policy, clip={"max_norm": float(limit)})
