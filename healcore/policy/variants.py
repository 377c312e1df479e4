"""Policies that are derived from a loaded policy: variants of a sweep, and a trainer's limit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from healcore.core.engine import Engine
from healcore.policy.document import NoClip, Policy, to_dict
from healcore.policy.loader import load
from healcore.policy.overrides import parse_overrides
from healcore.policy.tables import policy_error

MAX_VARIANTS = 100
"""Largest number of variants. Nobody reads a larger table, and the best of many settings is the
best by chance."""


def variants(policy: Policy, vary: Sequence[str]) -> dict[str, Policy]:
    """Makes all combinations of the values of some keys.

    Args:
        policy: the base policy.
        vary: options `KEY=A,B,C` with the dotted keys of a policy file. A comma within brackets
            does not separate values.

    Returns:
        The base policy by its name, then each variant by its settings, such as
        "clip.max_norm=0.5 mode=observe". The last option varies fastest.

    Raises:
        PolicyError: an option has another form, a value is invalid, or there are more than
            `MAX_VARIANTS` variants.
    """
    axes: list[list[str]] = []
    for option in vary:
        key, _, values = option.partition("=")
        settings = [f"{key.strip()}={value}" for value in _split_values(values)]
        axes.append(list(dict.fromkeys(settings)))  # without a value that is given twice
    count = math.prod(map(len, axes))
    if count > MAX_VARIANTS:
        rule = f"at most {MAX_VARIANTS} variants"
        raise policy_error(
            "on the command line", f"{count:,} variants", rule, "fewer values of --vary"
        )
    policies = {policy.name: policy}
    for settings in itertools.product(*axes):
        policies[" ".join(settings)] = load(policy, **parse_overrides(settings, "--vary"))
    return policies


def _split_values(text: str) -> list[str]:
    """Splits values at commas outside of brackets: `["skip"],["skip", "alert"]` has two values."""
    values = [""]
    depth = 0
    for character in text:
        if character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        if character == "," and depth == 0:
            values.append("")
        else:
            values[-1] += character
    return [value.strip() for value in values]


def can_apply_limit(policy: Policy | Engine) -> bool:
    """Whether the policy's clipping can apply a fixed limit at every step.

    Args:
        policy: the policy or Engine of a trainer's run.

    Returns:
        False if the trainer has to clip, after the policy has measured: without clipping, where the
        trainer's own clip gives the same bits as without healcore; in observe mode; with AdaGC,
        whose limit ends with its warm-up; and for an Engine, whose numbers may be traced arrays.
    """
    if not isinstance(policy, Policy) or policy.mode != "heal":
        return False
    return policy.clip.limits_every_step


def with_limit(policy: Policy | Engine, limit: float | None) -> Policy | Engine:
    """Gives a trainer's limit to the policy's clipping, unless the policy's own limit is lower.

    A trainer clips before the policy measures the norm, so a spike of 700 would be judged as 1.0.
    With this function the policy measures first, and clips.

    Args:
        policy: the policy or Engine of a trainer's run.
        limit: largest gradient norm of the trainer, or None for no limit.

    Returns:
        The policy with the limit as `max_norm`. In a policy without clipping this limit alone
        clips. The policy is unchanged if `limit` is None, for an Engine, in observe mode and with
        AdaGC.
    """
    if limit is None or not isinstance(policy, Policy) or policy.mode != "heal":
        return policy
    if not (policy.clip.limits_every_step or isinstance(policy.clip, NoClip)):
        return policy
    own = to_dict(policy)["clip"].get("max_norm")
    if isinstance(own, int | float) and own <= limit:
        return policy
    return load(policy, clip={"max_norm": float(limit)})
