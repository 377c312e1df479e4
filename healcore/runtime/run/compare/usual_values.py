"""Which losses, gradient norms and learning rates of the last steps are usual or healthy.

`LossLevel` knows the usual losses, `NormHistory` the healthy gradient norms and rates. Both keep
their series as `LastValues`.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from healcore.runtime.driver import NumberRange
from healcore.runtime.run.compare.credit import REGULAR_INTERVAL
from healcore.runtime.run.compare.evidence import RECENT
from healcore.runtime.run.compare.trained_step import TrainedStep
from healcore.runtime.run.healthy_ranges import UNUSUAL_NORM

_NORMS = 500
"""Healthy gradient norms of each engine, of which the largest is known."""


class LastValues:
    """The last values of a series, with their largest at no cost in most steps.

    Taking the maximum of the series at each step would cost as many comparisons as it has values.
    Here all values are compared only if the dropped value was the largest.

    Attributes:
        values: the values, oldest first.
        largest: the largest of them, or -Inf without a value.
    """

    def __init__(self, length: int, values: Iterable[float] = ()) -> None:
        """Begins a series.

        Args:
            length: number of values that are kept.
            values: the first values. The oldest of too many are dropped.
        """
        self.values: deque[float] = deque(values, maxlen=length)
        self.largest = max(self.values, default=-math.inf)

    def add(self, value: float) -> None:
        """Adds a value, and drops the oldest value of a full series.

        The largest value is kept up to date. All values are searched only when the largest value
        drops out, because `add` is called at every step.

        Args:
            value: the value, which is not NaN: a maximum with NaN has no meaning.
        """
        dropped = -math.inf
        if self.is_full:
            dropped = self.values[0]
        self.values.append(value)
        if value >= self.largest:
            self.largest = value
        elif dropped == self.largest:
            self.largest = max(self.values)

    @property
    def is_full(self) -> bool:
        """Whether there are as many values as the series holds."""
        return len(self.values) == self.values.maxlen

    def is_exceeded_by(self, value: float) -> bool:
        """Whether the series is full, and a value is above all its values.

        A short series says too little: the first values of a run exceed each other by chance.

        Args:
            value: the value. The answer is False for NaN.
        """
        return self.is_full and value > self.largest


class LossLevel:
    """Which losses a run has had, and which of them are usual.

    A loss is *usual* unless it exceeds each of the last `REGULAR_INTERVAL` usual losses. High
    losses do not become usual. Otherwise trouble that lasts would hide its own start. Only `accept`
    makes high losses usual, after a comparison of weights that shows no damage.

    Attributes:
        last: the last `REGULAR_INTERVAL` losses. A loss that is not finite is -Inf here.
        usual: the last `REGULAR_INTERVAL` usual losses.
        recent: the last `RECENT` finite losses, including high losses.
    """

    def __init__(self, usual: Sequence[float] = (), recent: Sequence[float] = ()) -> None:
        """Begins a level.

        Args:
            usual: usual losses from before a restart or a rollback. No loss is high until
                `REGULAR_INTERVAL` losses are known.
            recent: last losses from before a restart.
        """
        self.last = LastValues(REGULAR_INTERVAL, usual)
        self.usual = LastValues(REGULAR_INTERVAL, usual)
        self._were_high: deque[bool] = deque(maxlen=REGULAR_INTERVAL)
        """Whether each of the last losses was high."""
        self.recent: deque[float] = deque(recent, maxlen=RECENT)

    def add(self, loss: float, *, high: bool) -> None:
        """Adds the loss of a step.

        Args:
            loss: the loss, or NaN.
            high: whether it is above the usual losses, or an alarm.
        """
        is_finite = math.isfinite(loss)
        if is_finite:
            self.last.add(loss)
        else:
            self.last.add(-math.inf)
        self._were_high.append(high)
        if not is_finite:
            return
        self.recent.append(loss)
        if not high:
            self.usual.add(loss)

    def accept(self) -> None:
        """Makes the last losses the usual losses, if most of them are high.

        Called where a comparison of weights has shown no damage. Otherwise a change of the data
        that raises the loss would make every later step a sign of trouble. Losses that are all NaN
        or Inf are no level: every later loss would exceed it.
        """
        is_new = 2 * sum(self._were_high) > REGULAR_INTERVAL
        if is_new and self.last.largest > -math.inf:
            self.usual = copy.deepcopy(self.last)
            self._were_high.clear()

    def largest_usual(self) -> float | None:
        """The largest usual loss, which a new level begins with after a rollback.

        Returns:
            The loss, or None before `REGULAR_INTERVAL` usual losses are known.
        """
        if not self.usual.is_full:
            return None
        return self.usual.largest

    def mean(self) -> float | None:
        """The mean of the last `RECENT` finite losses, high losses included.

        Returns:
            The mean, or None before there are `RECENT` finite losses: a mean of few losses varies
            too much to be compared.
        """
        if len(self.recent) < RECENT:
            return None
        return statistics.fmean(self.recent)

    def spread(self) -> float:
        """The standard deviation of the losses of `mean`.

        The deviation distinguishes a mean that has risen and a mean that varies by chance. The
        computation is too slow for every step.

        Raises:
            statistics.StatisticsError: there are fewer than two losses.
        """
        return statistics.stdev(self.recent)


class NormHistory:
    """Learns which gradient norms and learning rates are healthy, a while after their steps.

    Nobody knows that a step is healthy when it is taken: the bad steps before the first sign of
    trouble look like any other step. So the norms of a step wait:

        step --> young ----- enough steps without a high loss ----------> healthy
                   |
                   +-------- a high loss or an alarm --> doubtful
                                                            |
                             a healthy checkpoint later ----+-----------> healthy

    A norm above a limit in force never becomes healthy: the limit has kept it from doing harm. The
    rates of a step become healthy with its norms.

    Attributes:
        until_healthy: number of steps without an alarm or a high loss after which the norms of a
            step count as healthy.
        young: steps whose norms are not yet healthy, oldest first.
        doubtful: steps with a sign of trouble shortly after them, oldest first.
    """

    def __init__(self, until_healthy: int) -> None:
        self.until_healthy = until_healthy
        self._healthy: dict[str, LastValues] = {}
        """Engine -> its last healthy norms."""
        self._rates: dict[str, NumberRange] = {}
        """Engine -> range of its healthy rates since the last `take_rates`."""
        self._last: dict[str, deque[float]] = {}
        """Engine -> its last finite norms, healthy or not."""
        self.young: deque[TrainedStep] = deque()
        self.doubtful: deque[TrainedStep] = deque(maxlen=_NORMS)

    def forget(self, norms: Mapping[str, float]) -> None:
        """Drops the steps, which are repeated, and keeps the healthy norms.

        Args:
            norms: engine name -> largest healthy norm, which replaces the norms of this engine.
        """
        for name, largest in norms.items():
            self._healthy[name] = LastValues(_NORMS)
            self._healthy[name].add(largest)
        self._rates.clear()
        self._last = {}
        self.young.clear()
        self.doubtful.clear()

    def add(
        self, trained: TrainedStep, limits: Mapping[str, float], *, is_bad: bool, healthy: bool
    ) -> None:
        """Adds the norms and rates of a step.

        Args:
            trained: the step.
            limits: engine name -> limit of its gradient norm, where there is one.
            is_bad: whether the step has an alarm or a high loss.
            healthy: whether no evidence of damage is pending. Otherwise the step is not learnt.
        """
        if is_bad:
            self.doubtful.extend(self.young)
            self.young.clear()
        elif healthy:
            self.young.append(trained)
            if len(self.young) > self.until_healthy:
                self._learn(self.young.popleft(), limits)
        for name, norm in trained.norms.items():
            if math.isfinite(norm):
                last = self._last.get(name)
                if last is None:
                    last = self._last[name] = deque(maxlen=REGULAR_INTERVAL)
                last.append(norm)

    def learn_doubtful(self, step: int, limits: Mapping[str, float]) -> None:
        """Learns the norms near signs of trouble, at a healthy checkpoint of `step`.

        The norms of the last `until_healthy` steps before the checkpoint still wait, because the
        trouble of such a step may not have shown yet.

        Args:
            step: step of the checkpoint.
            limits: engine name -> limit of its gradient norm, where there is one. Norms above it
                are not learnt.
        """
        while self.doubtful and self.doubtful[0].index < step - self.until_healthy:
            self._learn(self.doubtful.popleft(), limits)

    def _learn(self, trained: TrainedStep, limits: Mapping[str, float]) -> None:
        """Makes the norms and rates of a step healthy."""
        for name, norm in trained.norms.items():
            if math.isfinite(norm) and norm <= limits.get(name, math.inf):
                known = self._healthy.get(name)
                if known is None:
                    known = self._healthy[name] = LastValues(_NORMS)
                known.add(norm)
        for name, rate in trained.rates.items():
            if math.isfinite(rate):
                self._rates[name] = self._range_with(name, rate)

    def _range_with(self, name: str, rate: float) -> NumberRange:
        """The range of healthy rates of an engine, extended to a rate."""
        known = self._rates.get(name, NumberRange(rate, rate, rate))
        return NumberRange(min(known.low, rate), max(known.high, rate), rate)

    def is_unusual(self, trained: TrainedStep) -> bool:
        """Whether a gradient norm of the step is far above the healthy norms of its engine.

        The factor is `UNUSUAL_NORM`. NaN and Inf do not count, because no limit can scale them
        down.

        Args:
            trained: the step.

        Returns:
            False for an engine without a healthy norm so far.
        """
        for name, norm in trained.norms.items():
            known = self._healthy.get(name)
            if known and known.largest * UNUSUAL_NORM < norm < math.inf:
                return True
        return False

    def take_rates(self, newest: Mapping[str, float]) -> dict[str, NumberRange]:
        """The healthy learning rates of the steps since the last call.

        Rates from between two checkpoints count, because a schedule may have its peak there.

        Args:
            newest: engine name -> rate of the newest step, at a healthy checkpoint.

        Returns:
            Engine name -> lowest, highest and newest rate, for the engines in `newest`.
        """
        found: dict[str, NumberRange] = {}
        for name, rate in newest.items():
            found[name] = self._range_with(name, rate)
        self._rates.clear()
        return found

    def largest(self) -> dict[str, float]:
        """The largest of the last healthy gradient norms of each engine.

        A rollback that limits the norm limits it to this value.

        Returns:
            Engine name -> gradient norm, without engines of which no healthy norm is known.
        """
        return {name: norms.largest for name, norms in self._healthy.items()}

    def typical(self) -> dict[str, float]:
        """The median of the last finite gradient norms of each engine, healthy or not.

        A limit that is held follows this median upwards, see `HeldNorm.following`.

        Returns:
            Engine name -> median of `REGULAR_INTERVAL` norms, without engines that have fewer.
        """
        found: dict[str, float] = {}
        for name, norms in self._last.items():
            if len(norms) == norms.maxlen:
                found[name] = statistics.median(norms)
        return found
