"""Assesses, before a run goes back or stops, whether the model is damaged or the data differ.

A rollback heals a damaged model and costs a healthy one its progress, so it needs evidence of
damage (docs/detectors.md has the reasons):

* *Instability*: loss and gradient norm have grown from update to update (the engine's detector of
  that name).
* *Non-finite weights*. Steps that are not finite are skipped and change nothing: while the weights
  are finite there is no reason to go back.
* *Batches from before the trouble*, if the user has passed a `loss_fn`. With the present weights a
  damaged model is worse on each, on average as much as on the step in alarm, within a factor of
  two; different data leave these losses unchanged. In between neither is shown: the model may have
  forgotten them for the sake of new data, or its rate may be too high. They are evaluated at the
  first alarm, before different data can make the model forget, and again if it may recover by
  itself.
* *The weights from before the trouble*, while a loss attributed to different data stays high
  (`HighLossPeriod`). Damage: they are better than the present ones on each batch from before it and
  on each of the latest ones. On a new task they are worse. They also show what did it: if they find
  the first batches of the period like those before it, not the data are at fault but the rate.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from healcore.core.signals import SignalError, check_scalar
from healcore.core.step_record import StepRecord
from healcore.core.verdict import NONFINITE, Cause
from healcore.runtime.driver import Driver
from healcore.runtime.faults import classify
from healcore.runtime.incidents.monitor import ActionRequest

HIGH_LOSS = Cause.LOSS_SPIKE | Cause.DIVERGENCE
"""Causes that different data have too."""
_BATCHES = 4
_APART = 16  # steps from one remembered batch to the next
# Damage: the mean rise of the remembered batches is at least this share of the step's own rise, and
# at most the inverse (if they alone rise, the model has forgotten them).
_SHARE = 0.5
# Damage: each of them has risen by this share of the step's rise (if only some have, the model has
# forgotten one domain).
_EACH = 0.25
# Noise units. A broken model is so far above the level that it may halve its loss and be lost.
# Oscillations at the edge of stability come as high; they do not last.
_FAR = 32.0
_WAIT = 16  # steps after the first alarm; such an oscillation takes fewer
_PATIENCE = 3  # orders for non-finite steps in a row with finite weights; then it is damage
_ROW = 64  # steps without such an order that end the row
_CLEAR = 2.0  # standard errors of the mean difference between present and earlier weights
# Batches whose differences are alike to this share are one and the same, as in full-batch gradient
# descent, and of one there is no error. (In units of the loss's noise such a run, in a swing, was
# 1.8 worse than its earlier weights, and one that 40 corrupt batches had damaged 1.4.)
_ALIKE = 1e-3
_REVIEWS = (16, 24, 32, 48, 64, 96, 128)  # steps; what lasts longer is this run's data
_LATEST = 4
_LOSSES = 4096  # steps whose losses are kept, to know the level at a checkpoint
_MEDIAN_OF = 8  # losses whose median shows whether the loss is back


class DamageVerdict(enum.Enum):
    """Whether the model is damaged; the values are those of the events."""

    DAMAGE = "damage"
    """The model is worse: go back."""
    DATA = "data"
    """The model is unchanged: the data are different, or the step's arithmetic overflowed."""
    OPEN = "open"
    """The model is slightly worse and may recover by itself: assessed again if it lasts."""
    UNKNOWN = "unknown"
    """Nothing could be evaluated, or damage and different data would both look like this."""


class AssessmentResult(NamedTuple):
    """A verdict, and the numbers behind it."""

    verdict: DamageVerdict
    by: str
    """Evidence: instability, weights, remembered_batches, earlier_weights, repetition, budget or
    nothing."""
    rise: float | None = None
    """Loss of the step in alarm minus that of the remembered batches. With `earlier_weights`: loss
    of the evaluated batches with the present weights minus their loss with the earlier ones."""
    rise_remembered: float | None = None
    """Loss of the remembered batches with the present weights minus their loss before."""
    far_rise: float = math.inf
    """A rise far beyond the loss's noise, in units of the loss."""
    data_ordinary: bool = False
    """The earlier weights find the data of the trouble like those before it."""


class TrainedBatch(NamedTuple):
    """A batch that step `index` was trained on, and its loss then."""

    index: int
    batch: Any
    loss: float


class HighLossPeriod:
    """The steps since an alarm that was attributed to different data, and when to review them.

    A bad part of the data looks like a new task at first: the loss is high at once, and the model
    begins to fit it. Only later data show the difference (`Assessor.review`), and nobody knows when
    they come. So the period is reviewed several times until the loss is back. `before` has at least
    one healthy batch from before the alarm.
    """

    def __init__(self, onset: int, before: Sequence[TrainedBatch]) -> None:
        self.onset = onset
        self.before = tuple(before)
        self.first: list[TrainedBatch] = []
        """The first few steps."""
        self._latest: deque[TrainedBatch] = deque(maxlen=_LATEST)
        self._losses: deque[float] = deque(maxlen=_MEDIAN_OF)
        self._steps = 0

    def add(self, index: int, batch: Any, loss: float, *, skipped: bool) -> None:
        """Adds the next step; the model has not seen the batch of a skipped one."""
        self._steps += 1
        if skipped:
            return
        self._latest.append(TrainedBatch(index, batch, loss))
        self._losses.append(loss)
        if len(self.first) < _LATEST:
            self.first.append(self._latest[-1])

    @property
    def latest(self) -> tuple[TrainedBatch, ...]:
        """The last few steps."""
        return tuple(self._latest)

    @property
    def over(self) -> bool:
        """Whether the loss is back within its noise, or has been high for too long to come back."""
        losses = [each.loss for each in self.before]
        usual = max(losses) + (max(losses) - min(losses))
        back = len(self._losses) == _MEDIAN_OF and median(self._losses) <= usual
        return back or self._steps > _REVIEWS[-1]

    @property
    def due(self) -> bool:
        """Whether a review is due at this step."""
        return self._steps in _REVIEWS


@dataclass(eq=False)
class Assessor:
    """Remembers a few healthy batches and assesses whether the model is damaged.

    Without a `loss_fn` (see `Healer`) batches cannot be evaluated. One that raises is not called
    again: it must not end the run that it protects.
    """

    driver: Driver
    loss_fn: Callable[..., Any] | None
    warn: Callable[[str], object]

    def __post_init__(self) -> None:
        self._loss_fn_checked = False
        self._batches: deque[TrainedBatch] = deque(maxlen=_BATCHES)
        self._losses: deque[tuple[int, float]] = deque(maxlen=_LOSSES)
        """Step and loss of the latest steps without an alarm."""
        self._at_first_alarm: AssessmentResult | None = None
        """The result at the first alarm of the current incident."""
        self._first_alarm_batch: TrainedBatch | None = None
        """The batch of that alarm."""
        self._of_incident: deque[TrainedBatch] = deque(maxlen=_LATEST)
        """The last few batches of the current incident."""
        self._back_at: int | None = None
        """The last step of the incident at which a remembered batch was not worse than before."""
        self._high_loss: HighLossPeriod | None = None
        self._nonfinite_orders = 0
        self._nonfinite_at = -_ROW

    def check_loss_fn(self, batch: Any) -> None:
        """Calls the `loss_fn` on the first batch: a mistake in it is an error at the start.

        Raises:
            SignalError: `loss_fn` raises, or does not return one number. An exception about memory,
                data or the network is only a warning.
        """
        if self.loss_fn is None or self._loss_fn_checked:
            return
        self._loss_fn_checked = True
        try:
            check_scalar("loss_fn(batch)", self.driver.try_loss_fn(self.loss_fn, batch))
        except SignalError:
            raise
        except Exception as error:
            text = f"loss_fn raised {type(error).__name__} on the first batch: {error}"
            if classify(error).cause is not Cause.UNKNOWN:
                self.warn(text)
                return
            how = "loss_fn(batch), or in JAX with a pytree as state loss_fn(state, batch)"
            raise SignalError(
                f"{text}\nThe Healer calls {how}, with a batch as healer.batches() yields it, and "
                "gets one number: correct the function, or leave loss_fn out"
            ) from error

    def observe(self, index: int, batch: Any, records: list[StepRecord]) -> None:
        """Takes a step and its batch, and keeps references to a few batches."""
        loss = records[0].loss
        in_incident = any(each.incident_open or each.cause for each in records)
        if not in_incident:
            self._at_first_alarm = self._first_alarm_batch = self._back_at = None
            self._of_incident.clear()
            self._losses.append((index, loss))
            if not self._batches or index - self._batches[-1].index >= _APART:
                self._batches.append(TrainedBatch(index, batch, loss))
        elif self._at_first_alarm is None and any(each.cause & HIGH_LOSS for each in records):
            result = self._assess_batches(loss, batch=batch, z=records[0].z_loss)
            self._at_first_alarm = result
            self._first_alarm_batch = TrainedBatch(index, batch, loss)
            enough = len(self._batches) == _BATCHES  # fewer show too little of the noise
            # Not shown to be damage yet: later batches may show it.
            declined = result.verdict in (DamageVerdict.DATA, DamageVerdict.UNKNOWN)
            if self._high_loss is None and enough and declined and result.rise is not None:
                self._high_loss = HighLossPeriod(index, tuple(self._batches))
        elif self._at_first_alarm is not None and self._recovered(index, self._at_first_alarm):
            self._back_at = index
        if in_incident:
            self._of_incident.append(TrainedBatch(index, batch, loss))
        if self._high_loss is not None:
            self._high_loss.add(index, batch, loss, skipped=any(each.skip for each in records))

    def high_loss_to_review(self) -> HighLossPeriod | None:
        """The period of high loss to review now, if any."""
        if self._high_loss is not None and self._high_loss.over:
            self._high_loss = None
        return self._high_loss if self._high_loss is not None and self._high_loss.due else None

    def review(self, period: HighLossPeriod, earlier: Mapping[str, Any]) -> AssessmentResult:
        """Whether the model is worse than the state `earlier`, on the present data too."""
        before, latest = period.before, period.latest
        batches = [each.batch for each in (*before, *latest)]
        now, then = self._evaluate(batches), self._evaluate(batches, earlier)
        if not now or not then or len(latest) < 2:  # of one there is no error of the mean
            return AssessmentResult(DamageVerdict.UNKNOWN, "nothing")
        with np.errstate(invalid="ignore", over="ignore"):  # of losses that are not finite
            rises = np.subtract(now, then)
            parts = rises[: len(before)], rises[len(before) :]
            worse = all(
                part.min() > 0
                and part.mean() > _CLEAR * part.std(ddof=1) / math.sqrt(len(part))
                and part.std(ddof=1) > _ALIKE * part.mean()
                for part in parts
            )
            remembered, rise = (float(part.mean()) for part in parts)
        if not worse and not (np.isfinite(then).all() and not np.isfinite(now).all()):
            return AssessmentResult(DamageVerdict.DATA, "earlier_weights", rise, remembered)
        found = AssessmentResult(DamageVerdict.DAMAGE, "earlier_weights", rise, remembered)
        ordinary = self._data_ordinary(period.first, before, then[: len(before)], earlier)
        return found._replace(data_ordinary=ordinary)

    def on_rollback(self, target: int) -> None:
        """Forgets the steps from `target` on, which are repeated."""
        kept = [each for each in self._batches if each.index < target]
        self._batches = deque(kept, maxlen=_BATCHES)
        self._losses = deque([each for each in self._losses if each[0] < target], maxlen=_LOSSES)
        self._at_first_alarm = self._first_alarm_batch = self._back_at = self._high_loss = None
        self._of_incident.clear()

    def clear_batches(self) -> None:
        """Forgets the batches: the data are different from now on."""
        self._batches.clear()

    def assess(self, request: ActionRequest) -> AssessmentResult:
        """Whether the model is damaged, for a request of a rollback or a stop."""
        if request.cause & Cause.INSTABILITY:
            return AssessmentResult(DamageVerdict.DAMAGE, "instability")
        if not self.driver.finite():
            return AssessmentResult(DamageVerdict.DAMAGE, "weights")
        if request.cause & NONFINITE:
            return self._assess_nonfinite(request)
        result = self._at_first_alarm or self._assess_batches(request.loss)
        return self._require_persistence(request, result)

    def with_earlier(
        self, result: AssessmentResult, step: int, earlier: Mapping[str, Any]
    ) -> AssessmentResult:
        """`result`, unless the data or the loss function have changed and not the model.

        A new term of the loss, its weight or a longer roll-out raise the loss and its gradient step
        by step, as a rate that is too high does, and remembered batches have a higher loss too. The
        weights from before the trouble show it: the same batches are as bad with them.

        Args:
            result: damage, by the remembered batches or by instability.
            step: of the checkpoint.
            earlier: its state.
        """
        batches = {"remembered_batches": self._batches, "instability": self._of_incident}
        tested = batches.get(result.by, ())
        now = self._evaluate(each.batch for each in tested)
        then = self._evaluate((each.batch for each in tested), earlier) if now else []
        if not then or not self._losses:
            return result
        usual = float(np.mean([loss for _, loss in self._losses][-_BATCHES:]))
        # Early in a run the earlier weights are worse by what has been learnt since.
        near = [usual, *(loss for at, loss in self._losses if 0 <= at - step < _APART)]
        with np.errstate(invalid="ignore", over="ignore"):  # of losses that are not finite
            rise, of_weights = float(np.mean(now)) - usual, float(np.mean(now) - np.mean(then))
            by_itself = float(np.mean(then)) - max(near)
        # One that has fallen since its step shows a model that swings.
        high = result.by != "instability" or rise >= _SHARE * (_mean_loss(tested) - usual)
        if (high and by_itself >= _SHARE * rise > 0) or not math.isfinite(by_itself):
            verdict = DamageVerdict.DATA
        elif by_itself >= rise:  # it is back: nothing is better with the earlier weights
            verdict = DamageVerdict.OPEN
        else:
            first = self._first_alarm_batch if result.by == "remembered_batches" else None
            ordinary = first is not None and self._data_ordinary([first], tested, then, earlier)
            return result._replace(data_ordinary=ordinary)
        return AssessmentResult(verdict, "earlier_weights", of_weights)

    # -- within ---------------------------------------------------------------------------------

    def _evaluate(
        self, batches: Iterable[Any], state: Mapping[str, Any] | None = None
    ) -> list[float]:
        """Losses with the present weights or those of `state`; empty: cannot be evaluated."""
        if self.loss_fn is None:
            return []
        try:
            found = self.driver.losses_of(self.loss_fn, batches, state)
            return [float(check_scalar("loss_fn(batch)", loss)) for loss in found]
        except Exception as error:
            self.loss_fn = None
            self.warn(f"loss_fn raised {type(error).__name__}: {error}; it is not called again")
            return []

    def _data_ordinary(
        self,
        first: Sequence[TrainedBatch],
        before: Sequence[TrainedBatch],
        then: Sequence[float],
        earlier: Mapping[str, Any],
    ) -> bool:
        """Whether the weights `earlier` find the first batches of the trouble like those `before`.

        `then` are their losses on `before`.
        """
        of_first = self._evaluate([each.batch for each in first], earlier)
        due_to_data = float(np.mean(of_first or math.inf) - np.mean(then))
        return due_to_data < _SHARE * (_mean_loss(first) - _mean_loss(before))

    def _rises(self) -> list[float]:
        """For each remembered batch: loss with the present weights minus loss when trained on."""
        now = self._evaluate(each.batch for each in self._batches)
        return [loss - each.loss for loss, each in zip(now, self._batches, strict=False)]

    def _assess_batches(
        self, loss: float, *, batch: Any = None, z: float | None = None
    ) -> AssessmentResult:
        """Whether the remembered batches have risen as much as a step's batch.

        `loss` is that of the step when it was taken. The first alarm also gives its `batch`,
        evaluated with the same weights as the remembered ones (when a model breaks, its loss
        changes by orders of magnitude within the steps whose records have not arrived), and `z`:
        the loss above its level, in units of its noise.
        """
        rises = self._rises()
        if not rises:
            return AssessmentResult(DamageVerdict.UNKNOWN, "nothing")
        usual = sum(each.loss for each in self._batches) / len(rises)
        rise = then = loss - usual
        if z is not None:
            rise = next(iter(self._evaluate([batch])), loss) - usual
        mean = sum(rises) / len(rises)
        alike = _SHARE * rise <= mean <= rise / _SHARE and min(rises) >= _EACH * rise > 0
        far_rise = _FAR * then / z if z else math.inf
        # A loss that is already falling, as in oscillations at the edge of stability, is no damage.
        worse = alike and rise >= min(_SHARE * then, far_rise)
        unchanged = mean < _EACH * abs(then)
        verdict = DamageVerdict.DATA if unchanged else DamageVerdict.UNKNOWN
        if worse or not math.isfinite(mean):
            verdict = DamageVerdict.DAMAGE
        return AssessmentResult(verdict, "remembered_batches", rise, mean, far_rise)

    def _require_persistence(
        self, request: ActionRequest, result: AssessmentResult
    ) -> AssessmentResult:
        """Damage has to last for some steps, unless a remembered batch is not finite."""
        least = _lasting_rise(result)
        if least is None:
            return result
        back = self._back_at is not None and request.index - self._back_at < _WAIT
        if back or request.index - request.onset < _WAIT:
            return result._replace(verdict=DamageVerdict.OPEN)
        rises = self._rises()
        if not rises:
            return result._replace(verdict=DamageVerdict.UNKNOWN)
        now = sum(rises) / len(rises)
        lasts = not now < least  # true for NaN
        verdict = DamageVerdict.DAMAGE if lasts else DamageVerdict.OPEN
        return result._replace(verdict=verdict, rise_remembered=now)

    def _recovered(self, index: int, result: AssessmentResult) -> bool:
        """Whether a model found damaged at the first alarm is not worse at this step.

        At the edge of stability the loss may swing for dozens of steps, and 16 steps after an alarm
        is at any point of a swing. One of the remembered batches in turn shows it: the loss of the
        step's own batch would be low by chance now and then.
        """
        least = _lasting_rise(result)
        if least is None or not self._batches:
            return False
        each = self._batches[index % len(self._batches)]
        return any(loss - each.loss < least for loss in self._evaluate([each.batch]))

    def _assess_nonfinite(self, request: ActionRequest) -> AssessmentResult:
        rises = self._rises()
        if rises:
            # The skipped steps have changed nothing, but those before them may have.
            least = _lasting_rise(self._at_first_alarm) if self._at_first_alarm else None
            mean = sum(rises) / len(rises)
            damaged = not math.isfinite(mean) or (least is not None and mean >= least)
            verdict = DamageVerdict.DAMAGE if damaged else DamageVerdict.DATA
            return AssessmentResult(verdict, "remembered_batches", rise_remembered=mean)
        again = request.index - self._nonfinite_at < _ROW
        self._nonfinite_orders = self._nonfinite_orders + 1 if again else 1
        self._nonfinite_at = request.index
        # Weights can be finite and so large that every step overflows.
        too_often = self._nonfinite_orders > _PATIENCE
        return AssessmentResult(
            DamageVerdict.DAMAGE if too_often else DamageVerdict.DATA, "weights"
        )


def _lasting_rise(result: AssessmentResult) -> float | None:
    """The rise of remembered batches below which damage has not lasted; None: not asked."""
    then = result.rise_remembered
    if result.verdict is not DamageVerdict.DAMAGE or then is None or not math.isfinite(then):
        return None
    return min(_SHARE * then, result.far_rise)


def _mean_loss(batches: Sequence[TrainedBatch]) -> float:
    """Mean of the losses in training."""
    return sum(each.loss for each in batches) / len(batches)
