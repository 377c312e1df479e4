"""Takes over `Trainer(gradient_clip_val=...)` as the policy's own limit.

Lightning clips before the policy measures the norm: a spike of 700 would be seen as 1.
"""

from __future__ import annotations

from typing import Any

from healcore.core.engine import Engine
from healcore.policy import PolicyLike
from healcore.policy.loader import resolve
from healcore.torch.errors import AttachError


def with_limit_of(trainer: Any, policy: PolicyLike, overrides: dict[str, Any]) -> dict[str, Any]:
    """The overrides of a policy with the Trainer's limit as `clip.max_norm`, the smaller of both.

    Raises AttachError for what a policy cannot do: clipping by value, a limit under `adagc`, which
    has none for the whole gradient, or under an engine that is given as an object.
    """
    limit = trainer.gradient_clip_val
    found = resolve(policy, overrides)
    if not limit or found.mode == "observe":
        return overrides
    given = f"Trainer(gradient_clip_val={limit:g}"
    if getattr(trainer.gradient_clip_algorithm, "value", "norm") != "norm":
        raise AttachError(
            f'{given}, gradient_clip_algorithm="value") changes each element before the policy '
            'sees the norm: write gradient_clip_algorithm="norm", or leave both out'
        )
    if isinstance(found, Engine):
        raise AttachError(
            f"{given}) clips before the policy sees the norm, and an Engine cannot be given a "
            "limit: write it into the engine's config, and leave gradient_clip_val out"
        )
    if found.clip.kind == "adagc":
        raise AttachError(
            f'{given}) clips before the policy sees the norm, and [clip] kind = "adagc" has no '
            "limit for the whole gradient: leave gradient_clip_val out, or use another kind"
        )
    own = getattr(found.clip, "max_norm", None)
    clip = {
        **(overrides.get("clip") or {}),
        "max_norm": float(limit if own is None else min(own, limit)),
    }
    if found.clip.kind == "none":
        clip["kind"] = "fixed"
    return {**overrides, "clip": clip}
