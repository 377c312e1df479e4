"""Keys of a policy file: which of them a sweep can vary, and where they stand in the core."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_type_hints

from healcore.core.detectors import CAUSES
from healcore.core.engine import IncidentConfig, RuleConfig
from healcore.core.errors import HealcoreError
from healcore.core.verdict import Action
from healcore.plugins.sweep import Place
from healcore.policy import Policy, to_dict

_PART = re.compile(r"([A-Za-z_]\w*)((?:\[\d+\])*)")
_SETTLED = ("warmup", "escape", "first_", "min_rel_std")
"""How the names of numbers begin that say how a baseline is learnt, not when it is left."""
_BLIND = ("clip", "rollback", "lr", "budget", "grace_steps")


class SweepError(HealcoreError, ValueError):
    """A sweep that cannot be done; the message says what was received and what to write instead."""


def parts(key: str) -> Place:
    """`respond[3].when.count` as ("respond", 3, "when", "count")."""
    found: list[str | int] = []
    for part in key.split("."):
        match = _PART.fullmatch(part)
        if match is None:
            raise SweepError(
                f"{key!r} is no key of a policy: write it as in the file, with dots, for example "
                "detect.loss_spike.z_threshold or respond[3].when.consecutive"
            )
        found.append(match[1])
        found += [int(i) for i in re.findall(r"\d+", match[2])]
    return tuple(found)


def value_at(data: Any, key: str) -> Any:
    """The value of a key in a document of `healcore.policy.to_dict`.

    Raises:
        SweepError: the policy has no such key; names those that are there.
    """
    for part in parts(key):
        known = list(data) if isinstance(data, Mapping) else []
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            there = f"; here there are: {', '.join(map(str, known))}" if known else ""
            raise SweepError(f"{key}: the base policy has no {part!r} there{there}") from None
    return data


def with_value(data: dict[str, Any], key: str, value: Any) -> None:
    """Puts a value into such a document."""
    *way, last = parts(key)
    for part in way:
        data = data[part]  # type: ignore[index]
    data[last] = value  # type: ignore[index]


def place_of(policy: Policy, key: str) -> Place:
    """Where the key's number stands in the core.

    Raises:
        SweepError: no such key, not a number, static in the core, or of no influence on what a
            recorded curve can show.
    """
    value = value_at(to_dict(policy), key)
    way = parts(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SweepError(
            f"{key} = {value!r} is no number: a sweep varies numbers. Compare policies that "
            "differ in words or tables with: healcore replay --policy A --policy B"
        )
    if way[0] in _BLIND:
        raise SweepError(
            f"{key} changes neither where a recovery is ordered nor which step is skipped, and a "
            "recorded curve shows nothing else: vary numbers of detect.*, incident.*, "
            "respond[i].when.* or max_skips"
        )
    if way[0] == "detect":
        place: Place = ("detectors", *way[1:])
        config: Any = dict(policy.config().detectors)[str(way[1])]
        for part in way[2:-1]:
            config = getattr(config, str(part))
        _varies(key, type(config), str(way[-1]))
        return place
    if way[0] == "respond" and isinstance(way[1], int):
        _varies(key, RuleConfig, str(way[-1]))
        return ("rules", way[1], str(way[-1]))
    if way[0] == "incident":
        _varies(key, IncidentConfig, str(way[-1]))
        return way
    if way == ("max_skips",):
        return way
    raise SweepError(
        f"{key} is no threshold: vary numbers of detect.*, incident.*, respond[i].when.* or "
        "max_skips"
    )


def _varies(key: str, config: type, field: str) -> None:
    """Numbers that may be arrays are annotated `Any` in the core; `int` is a fixed size."""
    if get_type_hints(config).get(field) is int:
        raise SweepError(
            f"{key} is static in the core (a size of its memory): one program cannot run two of "
            "them. Sweep one policy file per value, and compare what the sweeps say"
        )


def thresholds(policy: Policy) -> list[str]:
    """Keys of the numbers that decide when a rollback is ordered, warm-ups aside."""
    heard = 0
    for rule in policy.config().rules:
        if rule.action & Action.ROLLBACK:
            heard |= rule.causes
    keys = []
    for name, table in to_dict(policy)["detect"].items():
        if int(CAUSES[name]) & heard:
            config = dict(policy.config().detectors)[name]
            hints = get_type_hints(type(config))
            keys += [
                f"detect.{name}.{field}"
                for field, value in table.items()
                if isinstance(value, int | float)
                and not isinstance(value, bool)
                and hints.get(field) is not int
                and not field.startswith(_SETTLED)
            ]
    return keys
