"""Defines the search space, a range per policy key, and draws the variants."""

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

_DIGITS = 4  # of a drawn number, for readable policy files
_MIN_LOG_FACTOR = 10.0  # a range with at least this factor between its ends is logarithmic
_DEFAULT_RANGE = (0.6, 1.6)  # relative to the base value, without --vary

_PART = re.compile(r"([A-Za-z_]\w*)((?:\[\d+\])*)")
"""One part of a key with its indices, such as `respond[3]`."""
_LEARNING_KEYS = ("warmup", "window", "escape", "first_", "min_rel_std", "min_noise")
"""Prefixes of keys that control how a baseline is learnt, not when an alarm is raised."""

_NOT_IN_CURVES = ("clip", "rollback", "lr", "budget", "grace_steps")
"""Keys that change neither orders nor skips. A recorded curve shows no other effect."""


class Axis(NamedTuple):
    """One key and its possible values."""

    key: str
    place: Place
    whole: bool
    low: float
    high: float
    log: bool
    listed: tuple[float, ...] = ()
    """The values of a list KEY=A,B,C; empty for a range."""

    def value(self, unit: float) -> float | int:
        """Returns the value at a point in [0, 1]."""
        if self.listed:
            return self._round(self.listed[min(int(unit * len(self.listed)), len(self.listed) - 1)])
        if self.log:
            return self._round(self.low * (self.high / self.low) ** unit)
        return self._round(self.low + (self.high - self.low) * unit)

    def unit(self, value: float) -> float:
        """Returns the point of a value, which is in [0, 1] for values in the range."""
        if self.listed:
            nearest = min(range(len(self.listed)), key=lambda i: abs(self.listed[i] - value))
            return (nearest + 0.5) / len(self.listed)
        if self.log:
            return math.log(max(value, 1e-30) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def _round(self, value: float) -> float | int:
        return round(value) if self.whole else float(f"{value:.{_DIGITS}g}")


class Variants(NamedTuple):
    """Distinct settings. The first is the base policy."""

    axes: tuple[Axis, ...]
    values: np.ndarray
    """float64 (n, axes): the settings."""
    units: np.ndarray
    """float64 (n, axes): the settings as points in the unit cube."""
    dropped: int
    """Number of drawn settings that are not a valid policy."""

    def numbers(self, part: slice) -> tuple[np.ndarray, ...]:
        """Returns one array per axis, in the dtype of the core."""
        return tuple(
            self.values[part, i].astype(np.int32 if axis.whole else np.float32)
            for i, axis in enumerate(self.axes)
        )


def parse(policy: Policy, text: str) -> Axis:
    """Parses a `--vary` option: KEY=LOW..HIGH, optionally with `:log` or `:linear`, or KEY=A,B,C.

    Raises SweepError for another form, or a value that the policy rejects.
    """
    key, equals, ranged = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise SweepError(f"--vary {text!r}: write KEY=LOW..HIGH or KEY=A,B,C")
    place = place_of(policy, key)
    base = value_at(to_dict(policy), key)
    whole = isinstance(base, int)
    ranged, _, scale = ranged.partition(":")
    if scale not in ("", "log", "linear"):
        raise SweepError(f"--vary {text!r}: the scale must be log or linear, got {scale!r}")
    listed = ".." not in ranged
    numbers = [_number(text, part) for part in ranged.split("," if listed else "..")]
    if not listed and (len(numbers) != 2 or not numbers[0] < numbers[1]):
        raise SweepError(f"--vary {text!r}: LOW..HIGH needs two numbers, the smaller number first")
    if listed and scale:
        raise SweepError(f"--vary {text!r}: a list of values has no scale, remove :{scale}")
    if scale == "log" and numbers[0] <= 0:
        raise SweepError(f"--vary {text!r}: a logarithmic range must begin above 0")
    if whole and any(number != round(number) for number in numbers):
        raise SweepError(f"--vary {text!r}: {key} must be an integer")
    for number in numbers:
        _check(policy, key, round(number) if whole else number)
    low, high = min(numbers), max(numbers)
    log = scale == "log" or (not scale and not listed and low > 0 and high >= _MIN_LOG_FACTOR * low)
    return Axis(key, place, whole, low, high, log, tuple(sorted(set(numbers))) if listed else ())


def default_axes(policy: Policy) -> tuple[Axis, ...]:
    """Returns the thresholds behind the rollback rules, from 0.6 to 1.6 times their value.

    Raises SweepError if no rule rolls back, or its detectors have no numbers.
    """
    axes = []
    for key in thresholds(policy):
        base = value_at(to_dict(policy), key)
        ends = []
        for factor in _DEFAULT_RANGE:
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
            f"no detector behind the rollback rules of policy {policy.name} has a number: "
            "pass a key to vary, for example --vary respond[1].when.consecutive=3..20"
        )
    return tuple(axes)


def draw(policy: Policy, axes: Sequence[Axis], count: int) -> Variants:
    """Draws up to `count` distinct settings, the base policy first.

    If all axes are lists with fewer than `count` combinations, all combinations are used. Otherwise
    the settings are points of a deterministic additive recurrence (Roberts, 2018, with the golden
    ratio generalized to the number of axes), which fill the cube more evenly than random points.
    """
    base = to_dict(policy)
    grid = math.prod(len(axis.listed) for axis in axes)
    if all(axis.listed for axis in axes) and grid < count:
        units = list(itertools.product(*([axis.unit(v) for v in axis.listed] for axis in axes)))
    else:
        units = _recurrence(len(axes), 2 * count)
    base_values = tuple(value_at(base, axis.key) for axis in axes)
    settings: dict[tuple[Any, ...], None] = {base_values: None}
    dropped = 0
    for point in units:
        if len(settings) >= count:
            break
        values = tuple(axis.value(unit) for axis, unit in zip(axes, point, strict=True))
        if values in settings:
            continue
        try:
            policy_with(policy, axes, values)
        except PolicyError:
            dropped += 1
            continue
        settings[values] = None
    values = np.array(list(settings), np.float64)
    units = np.array(
        [[axis.unit(v) for axis, v in zip(axes, row, strict=True)] for row in settings]
    )
    return Variants(tuple(axes), values, units, dropped)


def policy_with(
    policy: Policy, axes: Sequence[Axis], values: Sequence[float], **fields: str
) -> Policy:
    """Returns the base policy with these values. Raises PolicyError if they conflict."""
    data = to_dict(policy)
    for axis, value in zip(axes, values, strict=True):
        set_value(data, axis.key, round(value) if axis.whole else float(value))
    return from_dict(data | fields, source=f"a variant of {policy.name}")


def _recurrence(axes: int, count: int) -> list[tuple[float, ...]]:
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
        raise SweepError(f"--vary {text!r}: {part.strip()!r} is not a number")
    return number


def _check(policy: Policy, key: str, value: float | int) -> None:
    """Raises SweepError with the message of the policy if the policy rejects the value."""
    data = to_dict(policy)
    set_value(data, key, value)
    try:
        from_dict(data, source=f"--vary {key}")
    except PolicyError as error:
        raise SweepError(str(error)) from None


class SweepError(HealcoreError, ValueError):
    """A sweep is not possible. The message has the received value and the rule."""


def split_key(key: str) -> Place:
    """Splits `respond[3].when.count` into ("respond", 3, "when", "count")."""
    parts: list[str | int] = []
    for part in key.split("."):
        match = _PART.fullmatch(part)
        if match is None:
            raise SweepError(
                f"{key!r} is not a policy key: write it as in the file, with dots, for example "
                "detect.loss_spike.z_threshold or respond[3].when.consecutive"
            )
        parts.append(match[1])
        parts += [int(i) for i in re.findall(r"\d+", match[2])]
    return tuple(parts)


def value_at(data: Any, key: str) -> Any:
    """Returns the value of a key in a document of `to_dict`. Raises SweepError if it is absent."""
    for part in split_key(key):
        known = list(data) if isinstance(data, Mapping) else []
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            keys = f"; its keys are {', '.join(map(str, known))}" if known else ""
            raise SweepError(f"{key}: the table in the base policy has no {part!r}{keys}") from None
    return data


def set_value(data: dict[str, Any], key: str, value: Any) -> None:
    """Sets the value of a key in a document of `healcore.policy.to_dict`."""
    *parents, last = split_key(key)
    for part in parents:
        data = data[part]  # type: ignore[index]
    data[last] = value  # type: ignore[index]


def place_of(policy: Policy, key: str) -> Place:
    """Returns the place of a key's number in the core's config.

    Raises SweepError if the key does not exist, is not a number, is static in the core, or changes
    neither orders nor skips.
    """
    value = value_at(to_dict(policy), key)
    path = split_key(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SweepError(
            f"{key} = {value!r} is not a number: a sweep varies numbers. Compare policies that "
            "differ in texts or tables with: healcore replay --policy A --policy B"
        )
    if path[0] in _NOT_IN_CURVES:
        raise SweepError(
            f"{key} changes neither orders of a recovery nor skips, and a recorded curve shows no "
            "other effect: vary numbers of detect.*, incident.*, respond[i].when.* or max_skips"
        )
    if path[0] == "detect":
        place: Place = ("detectors", *path[1:])
        config: Any = dict(policy.config().detectors)[str(path[1])]
        for part in path[2:-1]:
            config = getattr(config, str(part))
        _check_variable(key, type(config), str(path[-1]))
        return place
    if path[0] == "respond" and isinstance(path[1], int):
        _check_variable(key, RuleConfig, str(path[-1]))
        return ("rules", path[1], str(path[-1]))
    if path[0] == "incident":
        _check_variable(key, IncidentConfig, str(path[-1]))
        return path
    if path == ("max_skips",):
        return path
    raise SweepError(
        f"{key} is not a threshold: vary numbers of detect.*, incident.*, respond[i].when.* or "
        "max_skips"
    )


def _check_variable(key: str, config: type, field: str) -> None:
    """Raises SweepError for a field of type `int`, a size; numbers that may be arrays are `Any`."""
    if get_type_hints(config).get(field) is int:
        raise SweepError(
            f"{key} is static in the core (a size of its memory), so one program has one value. "
            "Sweep one policy file per value, and compare the results"
        )


def thresholds(policy: Policy) -> list[str]:
    """Returns the keys of numbers that decide when a rollback is ordered."""
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
