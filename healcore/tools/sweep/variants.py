"""Variants of a policy in which some values differ: `--vary KEY=A,B,C`."""

from __future__ import annotations

import functools
import itertools
import math
import tomllib
from collections.abc import Sequence
from typing import Any

from healcore.core.errors import HealcoreError
from healcore.policy import Policy, PolicyError, load
from healcore.policy.loader import merged

MAX_VARIANTS = 100
"""A larger table is not read, and the best of many settings is the best by chance."""


class SweepError(HealcoreError, ValueError):
    """A sweep is not possible. The message has the received value and the rule."""


def variants(policy: Policy, vary: Sequence[str]) -> dict[str, Policy]:
    """All combinations of the values of `vary`.

    Args:
        policy: the base policy.
        vary: options `KEY=A,B,C` with the dotted keys of a policy file.

    Returns:
        The settings as text -> the policy with them. The first is the base policy, by its name.

    Raises:
        SweepError: an option has another form, the policy rejects a value, or there are more than
            `MAX_VARIANTS` combinations.
    """
    axes = [_parse(text) for text in vary]
    count = math.prod(map(len, axes))
    if count > MAX_VARIANTS:
        raise SweepError(f"--vary makes {count:,} variants; at most {MAX_VARIANTS} are compared")
    found = {policy.name: policy}
    for settings in itertools.product(*axes):
        overrides: dict[str, Any] = functools.reduce(merged, map(tomllib.loads, settings), {})
        name = " ".join(settings)
        try:
            found[name] = load(policy, **overrides)
        except PolicyError as error:
            raise SweepError(f"--vary {name}: {error}") from None
    return found


def _parse(text: str) -> list[str]:
    """The settings `KEY=VALUE` of one option, each a line of TOML."""
    key, _, values = text.partition("=")
    settings = [f"{key.strip()}={value.strip()}" for value in values.split(",")]
    try:
        for setting in settings:
            tomllib.loads(setting)
    except ValueError as error:
        raise SweepError(f"--vary {text!r}: write KEY=A,B,C with numbers ({error})") from None
    return list(dict.fromkeys(settings))
