"""Variants of a policy in which some numbers differ: `--vary KEY=A,B,C`."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from healcore.core.errors import HealcoreError
from healcore.policy import Policy, PolicyError, from_dict, to_dict

MAX_VARIANTS = 100
"""A larger table is not read, and the best of many settings is the best by chance."""

_PART = re.compile(r"(\w[\w-]*)((?:\[\d+\])*)")


class SweepError(HealcoreError, ValueError):
    """A sweep is not possible. The message has the received value and the rule."""


def variants(policy: Policy, vary: Sequence[str]) -> dict[str, Policy]:
    """All combinations of the values of `vary`.

    Args:
        policy: the base policy.
        vary: options `KEY=A,B,C`.

    Returns:
        The settings as text -> the policy with them. The first is the base policy, by its name.

    Raises:
        SweepError: an option has another form, the key is not a number of the policy, the policy
            rejects a value, or there are more than `MAX_VARIANTS` combinations.
    """
    base = to_dict(policy)
    axes = [_parse(base, text) for text in vary]
    count = math.prod(len(values) for _, values in axes)
    if count > MAX_VARIANTS:
        raise SweepError(f"--vary makes {count:,} variants; at most {MAX_VARIANTS} are compared")
    found = {policy.name: policy}
    for numbers in itertools.product(*(values for _, values in axes)):
        settings = dict(zip((key for key, _ in axes), numbers, strict=True))
        name = " ".join(f"{key}={number:g}" for key, number in settings.items())
        data = to_dict(policy)
        for key, number in settings.items():
            parent, last = _place(data, key)
            parent[last] = number
        try:
            found[name] = from_dict(data, source=f"--vary {name}")
        except PolicyError as error:
            raise SweepError(str(error)) from None
    return found


def _parse(base: Mapping[str, Any], text: str) -> tuple[str, list[float | int]]:
    """The key and the values of one option."""
    key, equals, values = (part.strip() for part in text.partition("="))
    if not equals or not key or not values:
        raise SweepError(f"--vary {text!r}: write KEY=A,B,C")
    parent, last = _place(base, key)
    value = parent[last]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SweepError(
            f"{key} = {value!r} is not a number: a sweep varies numbers. Compare policies that "
            "differ in texts or tables with: healcore replay --policy A --policy B"
        )
    numbers = [_number(text, part) for part in values.split(",")]
    if isinstance(value, int) and any(number != round(number) for number in numbers):
        raise SweepError(f"--vary {text!r}: {key} must be an integer")
    kind = int if isinstance(value, int) else float
    return key, [kind(number) for number in dict.fromkeys(numbers)]


def _number(text: str, part: str) -> float:
    try:
        number = float(part)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise SweepError(f"--vary {text!r}: {part.strip()!r} is not a number")
    return number


def _place(data: Any, key: str) -> tuple[Any, str | int]:
    """The table or list that holds a key such as `respond[3].when.count`, and the last part."""
    parts: list[str | int] = []
    for part in key.split("."):
        match = _PART.fullmatch(part)
        if match is None:
            raise SweepError(
                f"{key!r} is not a policy key: write it as in the file, with dots, for example "
                "detect.loss_spike.z_threshold or respond[3].when.consecutive"
            )
        parts += [match[1], *(int(index) for index in re.findall(r"\d+", match[2]))]
    for place, part in enumerate(parts):
        try:
            inner = data[part]
        except (KeyError, IndexError, TypeError):
            keys = f"; its keys are {', '.join(data)}" if isinstance(data, Mapping) else ""
            raise SweepError(f"{key}: the table in the base policy has no {part!r}{keys}") from None
        if place < len(parts) - 1:
            data = inner
    return data, parts[-1]
