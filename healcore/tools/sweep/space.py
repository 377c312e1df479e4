"""Defines the search space, a range per key, and draws the variants from it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_type_hints

import numpy as np

from healcore.core.detectors import CAUSES
from healcore.core.engine import IncidentConfig, RuleConfig
from healcore.core.errors import HealcoreError
from healcore.core.verdict import Action
from healcore.plugins.sweep import Place
from healcore.policy import Policy, PolicyError, from_dict, to_dict

_DIGITS = 4  # of a drawn number, so that it is readable in a file
_LOG_FROM = 10.0  # a range with this factor between its ends is logarithmic
_DEFAULT = (0.6, 1.6)  # of the base value, without --vary

_PART = re.compile(r"([A-Za-z_]\w*)((?:\[\d+\])*)")
"""One part of a key, with its indices: `respond[3]`."""
_LEARNING_KEYS = ("warmup", "window", "escape", "first_", "min_rel_std", "min_noise")
"""Prefixes of numbers that control how a baseline is learnt, not when an alarm is raised."""

_NOT_IN_CURVES = ("clip", "update_clip", "rollback", "lr", "budget", "grace_steps")
"""Keys that change neither an order nor a skip, which are all that a recorded curve can show."""


class Axis(NamedTuple):
    """One key and the values it may take."""

    key: str
    place: Place
    whole: bool
    low: float
    high: float
    log: bool
    listed: tuple[float, ...] = ()
    """The values themselves, if they were given one by one."""

    def value(self, unit: float) -> float | int:
        """The value at a point of [0, 1]."""
        if self.listed:
            return self._typed(self.listed[min(int(unit * len(self.listed)), len(self.listed) - 1)])
        if self.log:
            return self._typed(self.low * (self.high / self.low) ** unit)
        return self._typed(self.low + (self.high - self.low) * unit)

    def unit(self, value: float) -> float:
        """Where a value lies on the axis; outside [0, 1] if it is outside the range."""
        if self.listed:
            nearest = min(range(len(self.listed)), key=lambda i: abs(self.listed[i] - value))
            return (nearest + 0.5) / len(self.listed)
        if self.log:
            return math.log(max(value, 1e-30) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def _typed(self, value: float) -> float | int:
        return round(value) if self.whole else float(f"{value:.{_DIGITS}g}")


class Variants(NamedTuple):
    """Distinct settings; the first is the base policy's own."""

    axes: tuple[Axis, ...]
    values: np.ndarray
    units: np.ndarray
    """float64 (n, axes), like `values`: the settings as points of the unit cube."""
    dropped: int
    """Settings drawn that are no valid policy."""

    def numbers(self, part: slice) -> tuple[np.ndarray, ...]:
        """One array per axis, in the dtype that the core is given."""
        return tuple(
            self.values[part, i].astype(np.int32 if axis.whole else np.float32)
            for i, axis in enumerate(self.axes)
        )


def parse(policy: Policy, text: str) -> Axis:
    """Parses a `--vary`: KEY=LOW..HIGH, with `:log` or `:linear` after it, or KEY=A,B,C.

    Raises SweepError for another form, or a value that the policy cannot have.
    """
    key, equals, ranged = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise SweepError(f"--vary {text!r}: write KEY=LOW..HIGH or KEY=A,B,C")
    place = place_of(policy, key)
    base = value_at(to_dict(policy), key)
    whole = isinstance(base, int)
    ranged, _, scale = ranged.partition(":")
    if scale not in ("", "log", "linear"):
        raise SweepError(f"--vary {text!r}: after the range stands log or linear, got {scale!r}")
    listed = ".." not in ranged
    numbers = [_number(text, part) for part in ranged.split("," if listed else "..")]
    if not listed and (len(numbers) != 2 or not numbers[0] < numbers[1]):
        raise SweepError(f"--vary {text!r}: LOW..HIGH is two numbers, the smaller one first")
    if listed and scale:
        raise SweepError(f"--vary {text!r}: single values have no scale, drop :{scale}")
    if scale == "log" and numbers[0] <= 0:
        raise SweepError(f"--vary {text!r}: a logarithmic range begins above 0")
    if whole and any(number != round(number) for number in numbers):
        raise SweepError(f"--vary {text!r}: {key} takes whole numbers")
    for number in numbers:
        _check(policy, key, round(number) if whole else number)
    low, high = min(numbers), max(numbers)
    log = scale == "log" or (not scale and not listed and low > 0 and high >= _LOG_FROM * low)
    return Axis(key, place, whole, low, high, log, tuple(sorted(set(numbers))) if listed else ())


def default_axes(policy: Policy) -> tuple[Axis, ...]:
    """The thresholds behind the rollback rules, from 0.6 to 1.6 times their value.

    Raises SweepError if no rule rolls back, or its detectors have no number.
    """
    axes = []
    for key in thresholds(policy):
        base = value_at(to_dict(policy), key)
        ends = []
        for factor in _DEFAULT:
            end = round(base * factor) if isinstance(base, int) else base * factor
            try:
                _check(policy, key, end)
            except SweepError:
                end = base
            ends.append(float(end))
        if ends[0] < ends[1]:
            whole = isinstance(base, int)
            axes.append(Axis(key, place_of(policy, key), whole, ends[0], ends[1], False))
    if not axes:
        raise SweepError(
            f"no detector of policy {policy.name} behind its rollback rules has a number: "
            "say what to vary, for example --vary respond[1].when.consecutive=3..20"
        )
    return tuple(axes)


def draw(policy: Policy, axes: Sequence[Axis], count: int) -> Variants:
    """Up to `count` distinct settings, the base policy's first.

    Takes all combinations if every axis is a list and they fit; else points of the additive
    recurrence with the golden ratio's generalisation to the number of axes (Roberts, 2018), which
    fill the cube more evenly than random points and are deterministic.
    """
    base = to_dict(policy)
    grid = math.prod(len(axis.listed) for axis in axes)
    if all(axis.listed for axis in axes) and grid < count:
        units = list(itertools.product(*([axis.unit(v) for v in axis.listed] for axis in axes)))
    else:
        units = _spread(len(axes), 2 * count)
    own = tuple(value_at(base, axis.key) for axis in axes)
    found: dict[tuple[Any, ...], None] = {own: None}
    dropped = 0
    for point in units:
        if len(found) >= count:
            break
        values = tuple(axis.value(u) for axis, u in zip(axes, point, strict=True))
        if values in found:
            continue
        try:
            policy_with(policy, axes, values)
        except PolicyError:
            dropped += 1
            continue
        found[values] = None
    values = np.array(list(found), np.float64)
    units = np.array([[a.unit(v) for a, v in zip(axes, row, strict=True)] for row in found])
    return Variants(tuple(axes), values, units, dropped)


def policy_with(
    policy: Policy, axes: Sequence[Axis], values: Sequence[float], **fields: str
) -> Policy:
    """The base policy with these values; PolicyError if they are not valid together."""
    data = to_dict(policy)
    for axis, value in zip(axes, values, strict=True):
        with_value(data, axis.key, round(value) if axis.whole else float(value))
    return from_dict(data | fields, source=f"a variant of {policy.name}")


def _spread(axes: int, count: int) -> list[tuple[float, ...]]:
    ratio = 2.0
    for _ in range(60):
        ratio = (1.0 + ratio) ** (1.0 / (axes + 1))
    steps = np.array([ratio ** -(i + 1) for i in range(axes)])
    points = (0.5 + np.outer(np.arange(1, count + 1), steps)) % 1.0
    return [tuple(point) for point in points.tolist()]


def _number(text: str, part: str) -> float:
    try:
        number = float(part)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise SweepError(f"--vary {text!r}: {part.strip()!r} is no number")
    return number


def _check(policy: Policy, key: str, value: float | int) -> None:
    """Raises SweepError, with the policy's message, if the policy may not have this value there."""
    data = to_dict(policy)
    with_value(data, key, value)
    try:
        from_dict(data, source=f"--vary {key}")
    except PolicyError as error:
        raise SweepError(str(error)) from None


class SweepError(HealcoreError, ValueError):
    """A sweep that is not possible; the message has the received value and a valid one."""


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
    """The value of a key in a document of `healcore.policy.to_dict`; SweepError for no such key."""
    for part in parts(key):
        known = list(data) if isinstance(data, Mapping) else []
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            there = f"; here there are: {', '.join(map(str, known))}" if known else ""
            raise SweepError(f"{key}: the base policy has no {part!r} there{there}") from None
    return data


def with_value(data: dict[str, Any], key: str, value: Any) -> None:
    """Sets a value in such a document."""
    *way, last = parts(key)
    for part in way:
        data = data[part]  # type: ignore[index]
    data[last] = value  # type: ignore[index]


def place_of(policy: Policy, key: str) -> Place:
    """Where the key's number is in the core's config.

    Raises SweepError if there is no such key, it is not a number, is static in the core, or has no
    influence on what a recorded curve can show.
    """
    value = value_at(to_dict(policy), key)
    way = parts(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SweepError(
            f"{key} = {value!r} is no number: a sweep varies numbers. Compare policies that "
            "differ in words or tables with: healcore replay --policy A --policy B"
        )
    if way[0] in _NOT_IN_CURVES:
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
    """Raises SweepError for sizes (`int`): in the core, numbers that may be arrays are `Any`."""
    if get_type_hints(config).get(field) is int:
        raise SweepError(
            f"{key} is static in the core (a size of its memory): one program cannot run two of "
            "them. Sweep one policy file per value, and compare the results"
        )


def thresholds(policy: Policy) -> list[str]:
    """Keys of the numbers that decide when a rollback is ordered, without warm-ups."""
    causes = 0
    for rule in policy.config().rules:
        if rule.action & Action.ROLLBACK:
            causes |= rule.causes
    keys = []
    for name, table in to_dict(policy)["detect"].items():
        if int(CAUSES[name]) & causes:
            config = dict(policy.config().detectors)[name]
            hints = get_type_hints(type(config))
            keys += [
                f"detect.{name}.{field}"
                for field, value in table.items()
                if isinstance(value, int | float)
                and not isinstance(value, bool)
                and hints.get(field) is not int
                and not field.startswith(_LEARNING_KEYS)
            ]
    return keys
