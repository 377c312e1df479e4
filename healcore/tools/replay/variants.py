"""`variants`: the policies of a sweep."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from healcore.policy import Policy, load
from healcore.policy.loader import parse_overrides
from healcore.policy.reading import policy_error

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
