"""The ranges in which a run was healthy, and what a rollback holds in them.

Ranges are learnt at checkpoints whose weights are not suspect. If damage recurs after a rollback
that changed nothing, each value that was outside of its healthy range is held in it while the steps
repeat. An example is a weight decay that the program multiplies by 2,000. A held number has its
last healthy value. It is released once the program's own value is back in its range.

The limit of a gradient norm stays. A norm leaves its range at single steps, so a norm within its
range says nothing about the next step. But the limit grows as much as the typical norm grows from
then on.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple

from pydantic import AliasChoices, ConfigDict, Field

from healcore.core.numerics import SIGNAL_LIMIT
from healcore.core.step_record import StepRecord
from healcore.runtime.driver import NumberRange

UNUSUAL_NORM = 3.0
"""A gradient norm is unusual above this many times the largest healthy one."""
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

    def extended(self, seen: NumberRange) -> HealthyNumber:
        """The range with the values since then.

        Args:
            seen: lowest, highest and last value since the newest healthy checkpoint.
        """
        return HealthyNumber(
            low=min(self.low, seen.low),
            high=max(self.high, seen.high),
            last=seen.last,
            change=seen.last - self.last,
        )

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


@dataclass(frozen=True, kw_only=True)
class HealthyValues:
    """What was learnt up to one healthy checkpoint.

    An object never changes, and anchors share it: after a rollback, the run must judge by what it
    knew at the restored checkpoint, and not by what it learnt while the trouble was growing.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    rates: dict[str, HealthyNumber] = field(default_factory=dict)
    """Engine name -> its learning rates at healthy steps and checkpoints, where known."""
    numbers: dict[str, HealthyNumber] = field(default_factory=dict)
    """Name, see `Driver.numbers` -> its values up to the newest healthy checkpoint."""
    norms: dict[str, float] = field(default_factory=dict)
    """Engine name -> the largest healthy gradient norm, where one is known."""
    loss: float | None = None
    """The largest of the last usual losses, or None before enough losses are known."""

    def with_better(self, better: HealthyValues) -> HealthyValues:
        """The values of both. Where both know a name, the value of `better` counts.

        Args:
            better: values that are surer, such as the values of an earlier checkpoint. Later values
                complete them.
        """
        loss = self.loss
        if better.loss is not None:
            loss = better.loss
        return HealthyValues(
            rates=self.rates | better.rates,
            numbers=self.numbers | better.numbers,
            norms=self.norms | better.norms,
            loss=loss,
        )

    def with_checkpoint(
        self,
        rates: Mapping[str, NumberRange],
        seen: Mapping[str, NumberRange],
        norms: Mapping[str, float],
        loss: float | None = None,
    ) -> HealthyValues:
        """The values, extended by the values of one more healthy checkpoint.

        Args:
            rates: engine name -> its learning rates since the last healthy checkpoint.
            seen: result of `Driver.numbers`.
            norms: engine name -> largest healthy gradient norm so far.
            loss: the largest of the last usual losses, or None if unknown.
        """
        return HealthyValues(
            rates=_extended(self.rates, rates),
            numbers=_extended(self.numbers, seen),
            norms={**norms},
            loss=loss,
        )

    def outside(
        self,
        seen: Mapping[str, NumberRange],
        norms: Mapping[str, float],
        intervals: float = 1.0,
        *,
        last_step_before: int = 0,
    ) -> Held:
        """What was outside of its healthy range, to be held in it.

        A name without a known range is never outside.

        Args:
            seen: result of `Driver.numbers`.
            norms: engine name -> largest gradient norm at the trouble.
            intervals: checkpoint intervals since these values were learnt; may be a fraction.
            last_step_before: step of the checkpoint at which these values were known.

        Returns:
            The numbers with their healthy bounds, and the limits of the norms.
        """
        numbers = {}
        for name, each in seen.items():
            if name not in self.numbers:
                continue
            bounds = self.numbers[name].bounds(intervals)
            value = each.low
            if each.high > bounds.high:
                value = each.high
            if bounds.low <= value <= bounds.high:
                continue
            program_value = None
            if math.isfinite(value):
                program_value = value
            numbers[name] = HeldNumber(bounds, program_value, last_step_before)
        limits = {}
        for name, norm in norms.items():
            if self.is_unusual_norm(name, norm):
                limits[name] = HeldNorm(self.norms[name], norm)
        return Held(numbers=numbers, norms=limits)

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


def _extended(
    known: Mapping[str, HealthyNumber], seen: Mapping[str, NumberRange]
) -> dict[str, HealthyNumber]:
    """The ranges with the values that were seen since. Values with NaN or Inf are not learnt."""
    found = {**known}
    for name, each in seen.items():
        if not all(map(math.isfinite, each)):
            continue
        if name in known:
            found[name] = known[name].extended(each)
        else:
            found[name] = HealthyNumber(*each)
    return found


class HeldNumber(NamedTuple):
    """A number of an optimizer that is held in its healthy range.

    While a rollback repeats the steps, the optimizer uses a healthy value instead of the value that
    the program sets.
    """

    bounds: NumberRange
    """Lowest and highest healthy value, and the value that is held."""
    program_value: float | None
    """The value outside of the range that the program has set; None for NaN and Inf."""
    last_step_before: int = 0
    """Step of the checkpoint from before the program set it."""


class HeldNorm(NamedTuple):
    """A gradient norm that is limited to the largest healthy norm.

    Gradients above the limit are scaled down before the update, as by clipping. The limit grows
    with the norms of a healthy run, see `following`.
    """

    limit: float
    """Largest norm from now on: gradients above it are scaled down."""
    reached: float
    """Largest norm at the onset of the trouble."""
    typical: float | None = None
    """Median of the norms of the program to which `limit` belongs; None before a checkpoint."""

    def following(self, typical: float) -> HeldNorm:
        """The limit after a checkpoint at which the norms had the median `typical`.

        It grows as the median grows, and never falls: a norm that is held would pull itself down.

        Args:
            typical: median of the last gradient norms.

        Returns:
            A copy with the new limit. The first call only keeps the median, to which later medians
            are compared.
        """
        if self.typical is None:
            return self._replace(typical=typical)
        if not typical > self.typical > 0:
            return self
        return self._replace(limit=self.limit * typical / self.typical, typical=typical)


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a rollback holds in its healthy range while the steps repeat.

    Checkpoints save it, so that a restart holds the same values. A `Held` is false if it holds
    nothing.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    numbers: dict[str, HeldNumber] = field(default_factory=dict)
    """Name, see `Driver.numbers` -> the number."""
    norms: dict[str, HeldNorm] = field(default_factory=dict)
    """Engine name -> the limit of its gradient norm."""
    frozen_steps: Annotated[
        tuple[int, int] | None,
        Field(validation_alias=AliasChoices("frozen_steps", "withheld")),  # its name in 0.3.0
    ] = None
    """First and last frozen step, or None. A frozen step changes no weights, because its gradient
    is wrong, and nothing shows where."""
    start_rates: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Engine name -> its learning-rate state from before the limit that follows a rollback to the
    start of the run. No rate is known as healthy then, so this limit is a guess, and never
    lasts."""
    until: int = 0
    """Steps done when the rollback began. Nothing is released up to this step."""

    def __bool__(self) -> bool:
        return bool(self.numbers or self.norms or self.frozen_steps or self.start_rates)

    def freezes(self, step: int) -> bool:
        """Whether a step is frozen: it computes its gradients, and changes no weights.

        Args:
            step: index of the step.

        Returns:
            False if no steps are frozen.
        """
        if self.frozen_steps is None:
            return False
        first, last = self.frozen_steps
        return first <= step <= last

    def with_newer(self, newer: Held) -> Held:
        """What both hold. Where both hold a name, the older bounds and limits (`self`) stay."""
        return Held(
            numbers=newer.numbers | self.numbers,
            norms=newer.norms | self.norms,
            frozen_steps=newer.frozen_steps or self.frozen_steps,
            start_rates=self.start_rates or newer.start_rates,
            until=max(self.until, newer.until),
        )

    def without(self, older: Held) -> Held:
        """A copy without the numbers and norms that `older` holds too.

        Only numbers and norms are removed. Frozen steps and limits of the learning rate stay.
        A trial that held nothing new would repeat the same trouble, so `BetterWeights` asks this
        before it tries.

        Args:
            older: what is held already.
        """
        norms = {name: each for name, each in self.norms.items() if name not in older.norms}
        return replace(self.without_numbers(older.numbers), norms=norms)

    def without_numbers(self, names: Container[str]) -> Held:
        """A copy without the numbers of some names.

        Norms, frozen steps and limits of the learning rate stay.

        Args:
            names: names of the numbers that are no longer held.
        """
        kept = {name: each for name, each in self.numbers.items() if name not in names}
        return replace(self, numbers=kept)

    def sentences(self) -> list[str]:
        """What is held and where, for the line and the report of a rollback.

        Returns:
            One sentence for each number and norm: "momentum held at 0.9, the program sets 0.1".
        """
        lines = []
        for name, number in self.numbers.items():
            program = "NaN or Inf"
            if number.program_value is not None:
                program = f"{number.program_value:.4g}"
            lines.append(f"{name} held at {number.bounds.last:.4g}, the program sets {program}")
        for name, norm in self.norms.items():
            of = ""
            if name.isdigit():  # the place of an optimizer in a tuple
                of = f" of state[{name}]"
            elif name:
                of = f' of "{name}"'
            limit, reached = f"{norm.limit:.4g}", f"{norm.reached:.4g}"
            if norm.reached >= SIGNAL_LIMIT:
                reached += " or more"
            lines.append(f"gradient norm{of} kept below {limit} (it was {reached})")
        if self.frozen_steps is not None:
            first, last = self.frozen_steps
            lines.append(f"steps {first} to {last} are frozen: they change no weights")
        return lines

    @property
    def number_ranges(self) -> dict[str, NumberRange]:
        """The argument of `Driver.hold_numbers`."""
        return {name: each.bounds for name, each in self.numbers.items()}

    @property
    def norm_limits(self) -> dict[str, float]:
        """Engine name -> limit of the gradient norm."""
        return {name: each.limit for name, each in self.norms.items()}

    def with_thresholds(self, step: int, records: Sequence[StepRecord]) -> list[StepRecord]:
        """The records of a step with the limits of the norm, for the metrics and the report.

        An engine reports only the threshold of its clipping rule.

        Args:
            step: index of the step.
            records: the records of the step.

        Returns:
            The records. Where a norm has a limit, `threshold` is the lower of both.
        """
        if not self.norms or self.freezes(step):
            return [*records]
        found = []
        for record in records:
            norm = self.norms.get(record.engine)
            if norm is not None and not 0 < record.threshold < norm.limit:
                record = record._replace(threshold=norm.limit)
            found.append(record)
        return found


@dataclass
class HealthyRanges:
    """The ranges in which a run was healthy, and what is held now. Checkpoints hold it.

    The ranges grow at each healthy checkpoint. A number that is held is released when the program's
    own value is back in its range.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    values: HealthyValues = field(default_factory=HealthyValues)
    """What was learnt up to the newest healthy checkpoint."""
    held: Held = field(default_factory=Held)
    """What is held now."""

    def learn(
        self,
        rates: Mapping[str, NumberRange],
        seen: Mapping[str, NumberRange],
        norms: Mapping[str, float],
        loss: float | None = None,
    ) -> None:
        """Learns at a checkpoint whose weights are not suspect.

        Args:
            rates: engine name -> healthy learning rates since the last such checkpoint.
            seen: result of `Driver.numbers`. Held numbers are not learnt.
            norms: engine name -> largest healthy gradient norm.
            loss: the largest of the last usual losses, or None if unknown.
        """
        free = {name: each for name, each in seen.items() if name not in self.held.numbers}
        self.values = self.values.with_checkpoint(rates, free, norms, loss)

    def release(self, step: int, seen: Mapping[str, NumberRange]) -> dict[str, HeldNumber]:
        """Releases the numbers that the program itself keeps in range again.

        Call it at a healthy checkpoint. A number is back if its newest value is in its range.

        Args:
            step: step of the checkpoint.
            seen: result of `Driver.numbers`.

        Returns:
            The released numbers, by name.
        """
        released = {}
        for name, each in self.held.numbers.items():
            value = math.nan  # a name that is unknown now is in no range
            if name in seen:
                value = seen[name].last
            if step > self.held.until and each.bounds.low <= value <= each.bounds.high:
                released[name] = each
        if released:
            self.held = self.held.without(Held(numbers=released))
        return released

    def lasting_numbers(
        self, step: int, seen: Mapping[str, NumberRange], *, after: int
    ) -> dict[str, float]:
        """The numbers that the program has kept outside of their range for many steps.

        Such a value is intended, as of a regulariser that is switched on late. It makes the
        training loss worse. So the run would look better as long as the number is held, and the
        number would never be released.

        Call this at a healthy checkpoint, after `release`.

        Args:
            step: step of the checkpoint.
            seen: result of `Driver.numbers`.
            after: steps after the trouble from which on a value counts as intended.

        Returns:
            Name -> the program's value. It is finite: NaN and Inf are never intended.
        """
        if step < self.held.until + after:
            return {}
        lasting = {}
        for name in self.held.numbers:
            if name in seen and math.isfinite(seen[name].last):
                lasting[name] = seen[name].last
        return lasting

    def release_start_rates(self, step: int) -> Mapping[str, dict[str, Any]]:
        """Ends the limit of the rate after a rollback to the start of the run.

        Call this at a healthy checkpoint. If the program's rate is too high indeed, a later trial
        limits it to the healthy rates up to this checkpoint.

        Args:
            step: step of the checkpoint.

        Returns:
            The learning-rate states to restore, by engine name; empty without such a limit.
        """
        rates = self.held.start_rates
        if not rates or step <= self.held.until:
            return {}
        self.held = replace(self.held, start_rates={})
        return rates

    def follow_norms(self, step: int, typical: Mapping[str, float]) -> None:
        """Adapts the limits to the norms of the program. Call it at a healthy checkpoint.

        Args:
            step: step of the checkpoint.
            typical: engine name -> median of the program's last norms, where it is known.
        """
        if step <= self.held.until:
            return
        norms = dict(self.held.norms)
        for name, median in typical.items():
            if name in norms:
                norms[name] = norms[name].following(median)
        self.held = replace(self.held, norms=norms)
