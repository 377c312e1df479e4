"""`StepHistory`: what a run remembers of its last steps, to date trouble and to find its cause."""

from __future__ import annotations

import copy
import hashlib
import math
import statistics
import struct
from collections import deque
from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

from healcore.runtime.driver import NumberRange
from healcore.runtime.run.compare.evidence import RECENT, REGULAR_INTERVAL, SAMPLE_SIZE, TrainedStep
from healcore.runtime.run.healthy_ranges import UNUSUAL_NORM, HealthyValues
from healcore.runtime.store import values

STEPS_BEFORE_SIGN = 8
"""Steps before the first sign of trouble that may have caused it."""
STEPS_AFTER_SIGN = 12
"""Steps from the first sign on that may have caused the trouble, whatever their loss. Signs with
smaller gaps belong to the same trouble."""
MAX_HIGH_STEPS = 8 * SAMPLE_SIZE
"""Later steps with a high loss or unusual norm that are remembered, as far as memory allows."""
_UNTIL_HEALTHY = STEPS_BEFORE_SIGN + STEPS_AFTER_SIGN
"""Steps without an alarm or a high loss after which the norm of a step counts as healthy."""
_TEXT = ("the last steps",)
"""Place of the text of a history, for error messages."""
WINDOWS = 4
"""Signs of trouble, and bursts of high steps, that are remembered to date its onset."""
_NORMS = 500
"""Healthy gradient norms of each engine, of which the largest is known."""


class Signs(NamedTuple):
    """What the loss of one step says."""

    sign: bool
    """Whether it is a reason to compare weights: an alarm, a loss above the last losses, or an
    unusual gradient norm."""
    first_alarm: bool
    """Whether it is an alarm, the first one for `STEPS_AFTER_SIGN` steps."""
    last_is_over: bool
    """Whether the last sign was `STEPS_AFTER_SIGN` steps ago: its burst is over."""
    high: bool
    """Whether it belongs to the trouble: a sign, or a loss above the last usual losses."""


class Suspects(NamedTuple):
    """The steps that may have caused some trouble."""

    start: int
    """Step of the first sign."""
    steps: list[TrainedStep]
    """The steps around the first sign, and the later ones that were high, in order."""
    around: list[TrainedStep]
    """The steps around the first sign alone."""

    def largest_norms(self) -> dict[str, float]:
        """Engine name -> the largest finite gradient norm of these steps."""
        found: dict[str, float] = {}
        for step in self.steps:
            for name, norm in step.norms.items():
                if math.isfinite(norm):
                    found[name] = max(norm, found.get(name, 0.0))
        return found

    def with_unusual_norm(self, names: Container[str], healthy: HealthyValues) -> list[int]:
        """Steps around the first sign at which one of these engines had an unusual norm."""
        found = []
        for step in self.around:
            norms = step.norms.items()
            if any(name in names and healthy.is_unusual_norm(name, norm) for name, norm in norms):
                found.append(step.index)
        return found


class _Window(NamedTuple):
    """The steps around the first sign of some trouble."""

    start: int
    steps: list[TrainedStep]


class _LastValues:
    """The last values of a series, with their largest at no cost in most steps."""

    def __init__(self, length: int, values: Iterable[float] = ()) -> None:
        self.values: deque[float] = deque(values, maxlen=length)
        self.largest = max(self.values, default=-math.inf)

    def add(self, value: float) -> None:
        """Adds a value. Drops the oldest one of a full series."""
        dropped = self.values[0] if self.is_full else -math.inf
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
        """Whether a value is above each of a full series."""
        return self.is_full and value > self.largest


class StepHistory:
    """Losses, gradient norms and batches of the last steps, in bounded memory.

    A loss is *usual* unless it exceeds each of the last `REGULAR_INTERVAL` usual losses. High
    losses do not become usual, so that trouble which lasts cannot hide its own begin. Only
    `accept_level` makes them usual, after a comparison of weights that shows no damage.

    The norm of a step becomes healthy `_UNTIL_HEALTHY` steps later, if no alarm and no high loss
    came meanwhile: the bad steps before the first sign must not count as healthy. The others become
    healthy at a checkpoint whose weights are not suspect. A norm above a limit in force never
    becomes healthy: the limit has kept it from doing harm. The rates of a step become healthy with
    its norms.
    """

    def __init__(self) -> None:
        self._norms: dict[str, _LastValues] = {}
        self._rates: dict[str, NumberRange] = {}
        self.norm_limits: Mapping[str, float] = {}
        """Engine name -> limit of its gradient norm, where there is one."""
        self.forget()

    def forget(self, norms: Mapping[str, float] | None = None) -> None:
        """Drops the steps, which are repeated.

        Args:
            norms: engine name -> largest healthy gradient norm at the step from which on the run
                repeats its steps, or None to keep those that are known.
        """
        for name, largest in (norms or {}).items():
            self._norms[name] = _LastValues(_NORMS)
            self._norms[name].add(largest)
        self._rates.clear()
        self._losses = _LastValues(REGULAR_INTERVAL)
        self._newest: deque[tuple[int, float, float]] = deque(maxlen=REGULAR_INTERVAL)
        """Step, loss and largest gradient norm of the last steps, for `digest`."""
        self._usual = _LastValues(REGULAR_INTERVAL)
        self._were_high: deque[bool] = deque(maxlen=REGULAR_INTERVAL)
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._last: deque[TrainedStep] = deque(maxlen=STEPS_BEFORE_SIGN)
        self._windows: deque[_Window] = deque(maxlen=WINDOWS)
        self._high: deque[TrainedStep] = deque(maxlen=MAX_HIGH_STEPS)
        self._young: deque[TrainedStep] = deque()
        """Steps whose norms are not yet healthy."""
        self._doubtful: deque[TrainedStep] = deque(maxlen=_NORMS)
        """Steps with a sign of trouble shortly after them."""
        self._last_sign = self._last_alarm = -STEPS_AFTER_SIGN - 1  # none
        self._last_norms: dict[str, deque[float]] = {}

    def steps_with_batches(self) -> list[TrainedStep]:
        """The steps whose batches may be compared."""
        windows = [step for window in self._windows for step in window.steps]
        return [*self._last, *windows, *self._high]

    def to_text(self) -> str:
        """Everything but the batches of the steps, as text."""
        kept = [*self.steps_with_batches(), *self._young, *self._doubtful]
        found = {
            "steps": {each.index: (dict(each.norms), dict(each.rates)) for each in kept},
            "norms": {name: each.values for name, each in self._norms.items()},
            "rates": {name: tuple(each) for name, each in self._rates.items()},
            "losses": self._losses.values,
            "usual": self._usual.values,
            "newest": self._newest,
            "were_high": self._were_high,
            "recent": self._recent,
            "last": [each.index for each in self._last],
            "windows": [(w.start, [each.index for each in w.steps]) for w in self._windows],
            "high": [each.index for each in self._high],
            "young": [each.index for each in self._young],
            "doubtful": [each.index for each in self._doubtful],
            "signs": (self._last_sign, self._last_alarm),
            "last_norms": self._last_norms,
        }
        return values.dumps(found, _TEXT)

    def restore(self, text: str, contents: Mapping[int, Any]) -> dict[int, TrainedStep]:
        """Takes what `to_text` has saved, with the batches by step as far as they are known.

        Returns the steps by number.
        """
        found = values.loads(text, _TEXT)
        steps = {
            index: TrainedStep(index, contents.get(index, ()), norms, rates)
            for index, (norms, rates) in found["steps"].items()
        }
        self._norms = {name: _LastValues(_NORMS, each) for name, each in found["norms"].items()}
        self._rates = {name: NumberRange(*each) for name, each in found["rates"].items()}
        self._losses = _LastValues(REGULAR_INTERVAL, found["losses"])
        self._usual = _LastValues(REGULAR_INTERVAL, found["usual"])
        self._newest.extend(found["newest"])
        self._were_high.extend(found["were_high"])
        self._recent.extend(found["recent"])
        for name, own in (
            ("last", self._last),
            ("high", self._high),
            ("young", self._young),
            ("doubtful", self._doubtful),
        ):
            own.extend(steps[index] for index in found[name])
        for start, indices in found["windows"]:
            self._windows.append(_Window(start, [steps[index] for index in indices]))
        self._last_sign, self._last_alarm = found["signs"]
        self._last_norms = dict(found["last_norms"])
        return steps

    def add(self, step: TrainedStep, loss: float, *, alarm: bool, healthy: bool) -> Signs:
        """Adds a step.

        Args:
            step: the step.
            loss: its loss, or NaN.
            alarm: whether a detector has raised an alarm.
            healthy: whether no evidence of damage is pending.
        """
        is_record = self._losses.is_exceeded_by(loss)
        is_bad = alarm or is_record or self._usual.is_exceeded_by(loss)
        sign = alarm or is_record or self._is_unusual(step)
        high = is_bad or sign
        since_sign = step.index - self._last_sign
        first = sign and since_sign > STEPS_AFTER_SIGN
        first_alarm = alarm and step.index - self._last_alarm > STEPS_AFTER_SIGN
        if alarm:
            self._last_alarm = step.index
        self._newest.append((step.index, loss, max(step.norms.values(), default=math.nan)))
        self._add_loss(loss, high=is_bad)
        if first:
            self._windows.append(_Window(step.index, [*self._last]))
        if sign:
            self._last_sign = step.index
        if self._windows and step.index < self._windows[-1].start + STEPS_AFTER_SIGN:
            self._windows[-1].steps.append(step)
        if high:
            self._high.append(step)
        if is_bad:
            self._doubtful.extend(self._young)
            self._young.clear()
        elif healthy:
            self._young.append(step)
            if len(self._young) > _UNTIL_HEALTHY:
                self._add_norms(self._young.popleft())
        self._last.append(step)
        for name, norm in step.norms.items():
            if math.isfinite(norm):
                last = self._last_norms.setdefault(name, deque(maxlen=REGULAR_INTERVAL))
                last.append(norm)
        return Signs(sign, first_alarm, not sign and since_sign == STEPS_AFTER_SIGN, high)

    def _add_loss(self, loss: float, *, high: bool) -> None:
        self._losses.add(loss if math.isfinite(loss) else -math.inf)
        self._were_high.append(high)
        if not math.isfinite(loss):
            return
        self._recent.append(loss)
        if not high:
            self._usual.add(loss)

    def accept_level(self) -> None:
        """Makes the last losses the usual ones, if most of them are high.

        Call it where the weights were compared without evidence of damage. Then other data, or
        another scale of the loss, have raised the losses.
        """
        if 2 * sum(self._were_high) > REGULAR_INTERVAL:
            self._usual = copy.deepcopy(self._losses)
            self._were_high.clear()

    def learn_doubtful_norms(self, step: int) -> None:
        """Learns the norms near signs of trouble, at a healthy checkpoint of `step`.

        Without this, a program with an alarm every few steps would have no healthy norm.
        """
        while self._doubtful and self._doubtful[0].index < step - _UNTIL_HEALTHY:
            self._add_norms(self._doubtful.popleft())

    def _add_norms(self, step: TrainedStep) -> None:
        for name, norm in step.norms.items():
            if math.isfinite(norm) and norm <= self.norm_limits.get(name, math.inf):
                self._norms.setdefault(name, _LastValues(_NORMS)).add(norm)
        for name, rate in step.rates.items():
            if math.isfinite(rate):
                known = self._rates.get(name, NumberRange(rate, rate, rate))
                self._rates[name] = NumberRange(min(known.low, rate), max(known.high, rate), rate)

    def _is_unusual(self, step: TrainedStep) -> bool:
        """Whether a gradient norm of the step is unusual."""
        for name, norm in step.norms.items():
            known = self._norms.get(name)
            if known and known.largest * UNUSUAL_NORM < norm < math.inf:
                return True
        return False

    def healthy_rates(self, newest: Mapping[str, float]) -> dict[str, NumberRange]:
        """The healthy learning rates of the steps since the last call.

        A schedule may be at its peak between two checkpoints, for example at the first step.

        Args:
            newest: engine name -> rate of the newest step, at a healthy checkpoint.
        """
        found = {}
        for name, rate in newest.items():
            known = self._rates.get(name, NumberRange(rate, rate, rate))
            found[name] = NumberRange(min(known.low, rate), max(known.high, rate), rate)
        self._rates.clear()
        return found

    def largest_norms(self) -> dict[str, float]:
        """Engine name -> the largest healthy gradient norm, where one is known."""
        return {name: norms.largest for name, norms in self._norms.items()}

    def typical_norms(self) -> dict[str, float]:
        """Engine name -> median of its last `REGULAR_INTERVAL` gradient norms, once there are."""
        return {
            name: statistics.median(norms)
            for name, norms in self._last_norms.items()
            if len(norms) == norms.maxlen
        }

    def mean(self) -> float | None:
        """Mean of the last `RECENT` finite losses, or None before."""
        return statistics.fmean(self._recent) if len(self._recent) == RECENT else None

    def spread(self) -> float:
        """Standard deviation of the losses of `mean`. Slow: not for every step."""
        return statistics.stdev(self._recent)

    @property
    def newest(self) -> int:
        """The newest step, or -1 before the first."""
        return self._newest[-1][0] if self._newest else -1

    def digest(self, first: int) -> str:
        """Digest of the last `REGULAR_INTERVAL` losses and norms, not before step `first`.

        Two passes over the same steps have the same digest if their losses and gradient norms are
        equal bit for bit. Norms count because a loop need not report its losses.
        """
        kept = [number for each in self._newest if each[0] >= first for number in each]
        return hashlib.blake2b(struct.pack(f"<{len(kept)}d", *kept), digest_size=8).hexdigest()

    def suspects(self, onset: int, found: int) -> Suspects | None:
        """The steps that may have caused the trouble that began at `onset`, or None if unknown.

        These are the steps around the sign that is nearest to the onset, of the signs up to step
        `found`, and all steps since the onset with a high loss or an unusual norm.
        """
        windows = [each for each in self._windows if each.start <= found]
        if not windows:
            return None
        window = min(windows, key=lambda each: abs(each.start - onset))
        steps = {step.index: step for step in window.steps}
        for step in self._high:
            if step.index >= onset - STEPS_BEFORE_SIGN:
                steps[step.index] = step
        ordered = [steps[index] for index in sorted(steps)]
        return Suspects(
            start=min(window.start, onset),
            steps=ordered,
            around=window.steps,
        )
