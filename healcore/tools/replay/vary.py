"""Variants of one policy: the combinations of `--vary KEY=A,B,C`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from healcore.core.errors import HealcoreError
from healcore.policy import Policy, PolicyError, load
from healcore.policy.loader import parse_overrides

MAX_VARIANTS = 100
"""A larger table is not read, and the best of many settings is the best by chance."""


class VaryError(HealcoreError, ValueError):
    """An option `--vary` cannot be used. The message has the rule."""


def variants(policy: Policy, vary: Sequence[str]) -> dict[str, Policy]:
    """Returns the base policy by its name, and all combinations of the values by their settings.

    `vary` has options `KEY=A,B,C` with the dotted keys of a policy file. Raises VaryError if an
    option has another form, the policy rejects a value, or there are more than `MAX_VARIANTS`.
    """
    axes: list[list[str]] = []
    for text in vary:
        key, _, values = text.partition("=")
        settings = [f"{key.strip()}={value.strip()}" for value in values.split(",")]
        axes.append(list(dict.fromkeys(settings)))
    count = math.prod(map(len, axes))
    if count > MAX_VARIANTS:
        raise VaryError(f"--vary makes {count:,} variants; at most {MAX_VARIANTS} are compared")
    found = {policy.name: policy}
    for settings in itertools.product(*axes):
        name = " ".join(settings)
        try:
            found[name] = load(policy, **parse_overrides(settings, "--vary"))
        except PolicyError as error:
            raise VaryError(f"--vary KEY=A,B,C: {name}: {error}") from None
    return found
