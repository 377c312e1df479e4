"""The ranges in which a run was healthy, and what a rollback holds in them.

Ranges are learnt at checkpoints whose weights are not suspect. If damage comes back after a
rollback that changed nothing, whatever was outside of its healthy range is held in it while the
steps repeat, for example a weight decay that the program multiplies by 2,000. A held value is the
last healthy one. It is released once the program's own value is back in its range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pydantic import ConfigDict

from healcore.runtime.driver import NumberRange

_SCHEDULED = 3.0
"""A number may leave its range by this many times its last change between two checkpoints: a
schedule with constant acceleration moves three times as far in its second interval as in its
first."""


class HealthyNumber(NamedTuple):
    """The values that a number of an optimizer had while the run was healthy."""

    low: float
    high: float
    last: float
    """Its value at the newest healthy checkpoint."""
    change: float = 0.0
    """How far `last` has moved between the last two healthy checkpoints, for a scheduled number."""

    def extended(self, seen: NumberRange) -> HealthyNumber:
        """The range with the values that the number has had since."""
        change = abs(seen.last - self.last)
        return HealthyNumber(min(self.low, seen.low), max(self.high, seen.high), seen.last, change)

    @property
    def bounds(self) -> NumberRange:
        """The healthy range and the value to hold, with room for a schedule to go on."""
        room = _SCHEDULED * self.change
        return NumberRange(self.low - room, self.high + room, self.last)


class HeldNumber(NamedTuple):
    """A number that is held in its healthy range."""

    bounds: NumberRange
    program: float | None
    """The value outside of the range that the program has set; None for NaN and Inf."""


class HeldNorm(NamedTuple):
    """A gradient norm that is limited to the largest healthy one."""

    limit: float
    reached: float
    """Largest norm at the onset of the trouble."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a rollback holds in its healthy range while the steps repeat."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    numbers: dict[str, HeldNumber] = field(default_factory=dict)
    """Name, see `Driver.numbers` -> the number."""
    norms: dict[str, HeldNorm] = field(default_factory=dict)
    """Engine name -> the limit of its gradient norm."""
    until: int = 0
    """Step at which the trouble was found. Nothing is released before it."""

    def __bool__(self) -> bool:
        return bool(self.numbers or self.norms)

    def __or__(self, newer: Held) -> Held:
        """Both together. Limits of the older one stay."""
        return Held(
            numbers=newer.numbers | self.numbers,
            norms=newer.norms | self.norms,
            until=max(self.until, newer.until),
        )

    def without(self, older: Held) -> Held:
        """What `older` does not hold yet."""
        return replace(
            self,
            numbers={n: each for n, each in self.numbers.items() if n not in older.numbers},
            norms={n: each for n, each in self.norms.items() if n not in older.norms},
        )

    def sentences(self) -> list[str]:
        """What is held and where, for the line and the report of a rollback."""
        lines = []
        for name, number in self.numbers.items():
            program = "NaN or Inf" if number.program is None else f"{number.program:.4g}"
            lines.append(f"{name} held at {number.bounds.last:.4g}, the program sets {program}")
        for name, norm in self.norms.items():
            of = f" of {name}" if name else ""
            limit, reached = f"{norm.limit:.4g}", f"{norm.reached:.4g}"
            lines.append(f"gradient norm{of} held below {limit}, it reached {reached}")
        return lines

    @property
    def number_ranges(self) -> dict[str, NumberRange]:
        """The argument of `Driver.hold_numbers`."""
        return {name: each.bounds for name, each in self.numbers.items()}

    @property
    def norm_limits(self) -> dict[str, float]:
        """Engine name -> limit of the gradient norm."""
        return {name: each.limit for name, each in self.norms.items()}


@dataclass
class HealthyRanges:
    """The ranges in which a run was healthy, and what is held now. Checkpoints hold it."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    rates: dict[str, float] = field(default_factory=dict)
    """Engine name -> highest learning rate at a healthy checkpoint, if known."""
    numbers: dict[str, HealthyNumber] = field(default_factory=dict)
    """Name, see `Driver.numbers` -> its values up to the newest healthy checkpoint."""
    held: Held = field(default_factory=Held)
    exceeded: list[str] = field(default_factory=list)
    """Engines whose gradient norm was above its limit since the last healthy checkpoint."""

    def learn(self, rates: Mapping[str, float], seen: Mapping[str, NumberRange]) -> None:
        """Learns at a checkpoint whose weights are not suspect.

        Args:
            rates: learning rates in force.
            seen: result of `Driver.numbers`. Held numbers are not learnt.
        """
        for name, rate in rates.items():
            self.rates[name] = max(rate, self.rates.get(name, 0.0))
        for name, each in seen.items():
            if name in self.held.numbers or not all(map(math.isfinite, each)):
                continue
            known = self.numbers.get(name)
            if known is None:
                self.numbers[name] = HealthyNumber(*each)
            else:
                self.numbers[name] = known.extended(each)

    def outside(
        self,
        seen: Mapping[str, NumberRange],
        norms: Mapping[str, float],
        largest: Mapping[str, float],
    ) -> Held:
        """What was outside of its healthy range since the newest healthy checkpoint.

        Args:
            seen: result of `Driver.numbers`.
            norms: engine name -> unusual gradient norm.
            largest: engine name -> largest healthy gradient norm.
        """
        numbers = {}
        for name, each in seen.items():
            known = self.numbers.get(name)
            if known is None:
                continue
            bounds = known.bounds
            value = each.high if each.high > bounds.high else each.low
            if not bounds.low <= value <= bounds.high:
                program = value if math.isfinite(value) else None
                numbers[name] = HeldNumber(bounds, program)
        limits = {name: HeldNorm(largest[name], norm) for name, norm in norms.items()}
        return Held(numbers=numbers, norms=limits)

    def note_norms(self, norms: Mapping[str, float]) -> None:
        """Remembers which of the step's gradient norms are above their limits."""
        for name, each in self.held.norms.items():
            norm = norms.get(name, math.nan)
            if norm > each.limit and name not in self.exceeded:
                self.exceeded.append(name)

    def release(self, step: int, seen: Mapping[str, NumberRange]) -> Held:
        """Releases what the program itself keeps in range again. Call it at a healthy checkpoint.

        A number is back if its newest value is in its range, a gradient norm if it did not exceed
        its limit since the last healthy checkpoint.

        Args:
            step: step of the checkpoint.
            seen: result of `Driver.numbers`.

        Returns:
            What is not held any more.
        """
        exceeded, self.exceeded = self.exceeded, []
        if step <= self.held.until:
            return Held()
        numbers = {}
        for name, each in self.held.numbers.items():
            value = seen[name].last if name in seen else math.nan
            if each.bounds.low <= value <= each.bounds.high:
                numbers[name] = each
        norms = {name: each for name, each in self.held.norms.items() if name not in exceeded}
        released = Held(numbers=numbers, norms=norms)
        self.held = self.held.without(released)
        return released
