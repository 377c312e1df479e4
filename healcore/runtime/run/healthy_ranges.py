"""The ranges in which a run was healthy: rates, numbers of the optimizers, gradient norms.

They are learnt at checkpoints whose weights are not suspect. What has left its range when trouble
begins is a suspect, and a rollback holds it in its range (`envelope.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic import ConfigDict

from healcore.runtime.driver import NumberRange
from healcore.runtime.run.envelope import Envelope, Held

UNUSUAL_NORM = 3.0
"""A gradient norm is unusual above this many times the largest healthy one."""
OLDER_NORM = 1 - 1 / 1000
"""Factor on the largest healthy norm at each healthy step: the norms of the first steps of a run
are large, and say little about later steps. A limit that is too low hides damage that a rate or a
wrong gradient does: it grows too slowly to be found."""
RATE_TOLERANCE = 1.0001
"""A rate is above another from this ratio on: two float32 computations of one rate differ less."""


class HealthyNumber(NamedTuple):
    """The values that a learning rate, or a number of an optimizer, had in the healthy run.

    A number of an optimizer is a momentum, a beta or a weight decay. The learning rate has its own
    name. `low` and `high` are the lowest and the highest value so far. A value far outside of this
    range is a suspect when trouble begins.
    """

    low: float
    """Lowest value at any healthy step."""
    high: float
    """Highest value at any healthy step."""
    last: float
    """The value at the newest healthy checkpoint."""
    change: float = 0.0
    """How much `last` rose between the last two healthy checkpoints, for a scheduled value."""

    def bounds(self, intervals: float = 1.0) -> NumberRange:
        """The healthy range and the value to hold, with room for a schedule to continue.

        Args:
            intervals: checkpoint intervals since the newest healthy checkpoint, which may be a
                fraction. A schedule with constant acceleration moves 1, 3, 5, ... times as far in
                its first, second, third, ... interval, so in n more intervals at most
                (n + 1)^2 - 1 times its last change.

        Returns:
            Lowest and highest value that is still healthy, and the last healthy value.
        """
        room = ((max(1.0, intervals) + 1) ** 2 - 1) * abs(self.change)
        return NumberRange(self.low - room, self.high + room, self.last)


@dataclass(kw_only=True)
class HealthyValues:
    """What was learnt up to one healthy checkpoint.

    Each checkpoint has its own: after a rollback, the run must judge by what it knew at the
    restored checkpoint, and not by what it learnt while the trouble was growing.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    rates: dict[str, HealthyNumber] = field(default_factory=dict)
    """Engine name -> its learning rates at healthy steps and checkpoints, where known."""
    numbers: dict[str, HealthyNumber] = field(default_factory=dict)
    """Name, see `Driver.numbers` -> its values up to the newest healthy checkpoint."""
    norms: dict[str, float] = field(default_factory=dict)
    """Engine name -> the largest healthy gradient norm, where one is known."""

    def with_better(self, better: HealthyValues) -> HealthyValues:
        """The values of both. Where both know a name, the value of `better` counts.

        Args:
            better: values that are surer, such as the values of an earlier checkpoint. Later values
                complete them.
        """
        return HealthyValues(
            rates=self.rates | better.rates,
            numbers=self.numbers | better.numbers,
            norms=self.norms | better.norms,
        )

    def add_step(
        self, norms: Mapping[str, float], rates: Mapping[str, float], limits: Mapping[str, float]
    ) -> None:
        """Adds a healthy step between two checkpoints. A schedule may have its peak there.

        Args:
            norms: engine name -> gradient norm.
            rates: engine name -> learning rate.
            limits: engine name -> limit of its norm. A norm above it is not healthy.
        """
        for name, norm in norms.items():
            if math.isfinite(norm) and norm <= limits.get(name, math.inf):
                self.norms[name] = max(norm, OLDER_NORM * self.norms.get(name, 0.0))
        for name, rate in rates.items():
            _add(self.rates, name, NumberRange(rate, rate, rate), is_last=False)

    def add_checkpoint(self, rates: Mapping[str, float], seen: Mapping[str, NumberRange]) -> None:
        """Adds a healthy checkpoint.

        Args:
            rates: engine name -> its learning rate.
            seen: result of `Driver.numbers`.
        """
        for name, rate in rates.items():
            _add(self.rates, name, NumberRange(rate, rate, rate), is_last=True)
        for name, each in seen.items():
            _add(self.numbers, name, each, is_last=True)

    def outside(
        self,
        seen: Mapping[str, NumberRange],
        norms: Iterable[Mapping[str, float]],
        intervals: float,
    ) -> Envelope:
        """What was outside of its healthy range, to be held in it.

        A name without a known range is never outside.

        Args:
            seen: result of `Driver.numbers`.
            norms: gradient norms by engine name, of each step that may have caused the trouble.
            intervals: checkpoint intervals since these values were learnt; may be a fraction.
        """
        numbers, limits = {}, {}
        for name, each in seen.items():
            if name not in self.numbers:
                continue
            bounds = self.numbers[name].bounds(intervals)
            if each.high > bounds.high:
                value = each.high
            else:
                value = each.low
            if not bounds.low <= value <= bounds.high:
                numbers[name] = Held(bounds, value if math.isfinite(value) else None)
        for of_step in norms:
            for name, norm in of_step.items():
                if self.is_unusual_norm(name, norm):
                    limits[name] = self.norms[name]
        return Envelope(numbers=numbers, norms=limits)

    def is_unusual_norm(self, name: str, norm: float) -> bool:
        """Whether a gradient norm of an engine is far above its healthy norms.

        The factor is `UNUSUAL_NORM`. NaN and Inf do not count, because no limit can scale them
        down.

        Args:
            name: name of the engine. An engine without a known healthy norm has no unusual norm.
            norm: the gradient norm.
        """
        return UNUSUAL_NORM * self.norms.get(name, math.inf) < norm < math.inf

    def healthy_rate(self, name: str, rate: float) -> float:
        """The rate of an engine, or its last healthy rate if `rate` is above every healthy one.

        Args:
            name: the engine's name.
            rate: its learning rate, such as the rate at a restored checkpoint.
        """
        known = self.rates.get(name)
        if known is not None and rate > known.high * RATE_TOLERANCE:
            return known.last
        return rate


def _add(ranges: dict[str, HealthyNumber], name: str, seen: NumberRange, *, is_last: bool) -> None:
    """Adds values of a healthy step or checkpoint to a range. NaN and Inf are not learnt.

    Args:
        ranges: name -> its range.
        name: the name.
        seen: lowest, highest and last value.
        is_last: whether the last value is the value at a checkpoint.
    """
    if all(map(math.isfinite, seen)):
        known = ranges.get(name, HealthyNumber(*seen))
        known = known._replace(low=min(known.low, seen.low), high=max(known.high, seen.high))
        if is_last:
            known = known._replace(last=seen.last, change=seen.last - known.last)
        ranges[name] = known
