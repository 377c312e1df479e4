"""Is the model worse, or are the data different? What is asked before a run goes back.

An alarm says that a step is unlike those before it. A rollback heals a damaged model, and costs a
healthy one its progress, so it needs evidence of damage:

* *Instability*: loss and gradient norm have grown from update to update (the engine's detector of
  that name). That is evidence in itself.
* *Weights that are not finite.* Steps that are not finite are skipped and change nothing; as long
  as the weights are finite there is nothing to go back from.
* *Batches from before the trouble*, evaluated with the present weights, where the user has given a
  `loss_fn`: a damaged model has become worse on each of them, on average as much as on the step in
  alarm, give or take a factor of two; different data have not changed them. They are asked at the
  first alarm, before different data can make a model forget, and once more where the model may
  come back by itself.
* *The weights from before the trouble*, where it was taken for different data and the loss is not
  back (`stretch`): if they are better than the present ones on each batch from before it and on
  each of the latest ones, what came between has only done damage. On a new task they are worse.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from healcore.core.step_record import StepRecord
from healcore.core.verdict import Cause
from healcore.runtime.driver import Driver
from healcore.runtime.incidents.judge import Order
from healcore.runtime.incidents.stretch import Remembered, Stretch

HIGH = Cause.LOSS_SPIKE | Cause.DIVERGENCE
"""What different data look like too."""
_NONFINITE = Cause.NONFINITE_LOSS | Cause.NONFINITE_GRAD
_BATCHES = 4
_APART = 16  # steps from one remembered batch to the next
# Damage: the remembered batches have risen by this share of the step's own rise or more, and the
# step by this share of theirs (what is worse on them alone is forgotten, not broken) ...
_SHARE = 0.5
# ... and each of them by this share of the step's: some alone are another domain being forgotten.
_EACH = 0.25
_FAR = 32.0  # noise units above the level that no loss comes back from unharmed
_WAIT = 16  # steps after the first alarm; a swing at the edge of stability takes fewer
_PATIENCE = 3  # orders for non-finite steps in one stretch with finite weights; then it is damage
_STRETCH = 64  # steps without such an order that end the stretch
_CLEAR = 2.0  # standard errors of the mean difference between present and earlier weights


class Verdict(enum.Enum):
    """The answer."""

    DAMAGE = "damage"
    """The model is worse: go back."""
    DATA = "data"
    """The model is what it was: the data are different, or the step's arithmetic overflowed."""
    OPEN = "open"
    """The model is worse, by so little that it may come back by itself: asked again if it lasts."""
    UNKNOWN = "unknown"
    """Nothing speaks for damage, and there was nothing to ask."""


class Finding(NamedTuple):
    """An answer, and the numbers behind it."""

    verdict: Verdict
    by: str
    """What it rests on: instability, weights, remembered_batches, earlier_weights, budget or
    nothing."""
    rise: float | None = None
    """How far the loss of the step in alarm is above the remembered ones; with `earlier_weights`
    how far the latest batches are above what they are with those."""
    rise_remembered: float | None = None
    """How far the remembered batches are above what they were, with the present weights."""
    far: bool = False
    """The rise was so far beyond the loss's noise that it need not last to be damage."""


class Alarm(NamedTuple):
    """The first one of an incident."""

    batch: Any
    z: float
    """How far its loss is above the level, in units of the loss's noise."""


class Assessor:
    """Remembers a few batches, and answers.

    Args:
        driver: of the run.
        loss_fn: the loss of one batch, see `Healer`; None: batches cannot be evaluated. One that
            raises is not called again: it must not end the run that it is to protect.
        warn: writes a warning to the console log.
    """

    def __init__(
        self,
        driver: Driver,
        loss_fn: Callable[..., Any] | None,
        warn: Callable[[str], object],
    ) -> None:
        self._driver = driver
        self._loss_fn = loss_fn
        self._warn = warn
        self._batches: deque[Remembered] = deque(maxlen=_BATCHES)
        self._asked: Finding | None = None
        """What the remembered batches said at the first alarm of the incident under way."""
        self._stretch: Stretch | None = None
        """High losses that different data may explain, until they end."""
        self._nonfinite = 0
        self._nonfinite_at = -_STRETCH

    def see(self, index: int, batch: Any, records: list[StepRecord]) -> None:
        """Takes a step that was judged, and its batch; references to a few batches are kept."""
        loss = records[0].loss
        if not any(each.incident_open or each.cause for each in records):
            self._asked = None
            if not self._batches or index - self._batches[-1].index >= _APART:
                self._batches.append(Remembered(index, batch, loss))
        elif self._asked is None and any(each.cause & HIGH for each in records):
            self._asked = self._of_batches(loss, Alarm(batch, records[0].z_loss))
            known = len(self._batches) == _BATCHES  # fewer show too little of the noise
            if self._stretch is None and known and self._asked.verdict is Verdict.DATA:
                self._stretch = Stretch(index, tuple(self._batches))
        if self._stretch is not None:
            self._stretch.see(index, batch, loss)

    def to_look_back_at(self) -> Stretch | None:
        """High losses that were taken for different data, when it is time to look at them again."""
        stretch = self._stretch
        if stretch is not None and stretch.over:
            stretch = self._stretch = None
        return stretch if stretch is not None and stretch.due else None

    def look_back(self, stretch: Stretch, earlier: Mapping[str, Any]) -> Finding:
        """Whether high losses have made the model worse for the data that come now.

        Args:
            stretch: of `to_look_back_at`.
            earlier: the state of a checkpoint from before it.
        """
        before, latest = stretch.before, stretch.latest
        batches = [each.batch for each in (*before, *latest)]
        now, then = self._losses(batches), self._losses(batches, earlier)
        if not now or not then:
            return Finding(Verdict.UNKNOWN, "nothing")
        rises = np.subtract(now, then)
        parts = rises[: len(before)], rises[len(before) :]
        worse = all(
            part.min() > 0 and part.mean() > _CLEAR * part.std(ddof=1) / math.sqrt(len(part))
            for part in parts
        )
        remembered, rise = (float(part.mean()) for part in parts)
        verdict = Verdict.DAMAGE if worse else Verdict.DATA
        return Finding(verdict, "earlier_weights", rise, remembered)

    def went_back(self, target: int) -> None:
        """Steps from `target` on are taken again."""
        kept = [each for each in self._batches if each.index < target]
        self._batches = deque(kept, maxlen=_BATCHES)
        self._asked = self._stretch = None

    def forget(self) -> None:
        """The data are different from now on: older batches say nothing about them."""
        self._batches.clear()

    def ask(self, order: Order) -> Finding:
        """Whether the model is worse.

        Args:
            order: of a rollback or a stop.
        """
        if order.cause & Cause.INSTABILITY:
            return Finding(Verdict.DAMAGE, "instability")
        if not self._driver.finite():
            return Finding(Verdict.DAMAGE, "weights")
        if order.cause & _NONFINITE:
            return self._of_nonfinite(order)
        return self._if_it_lasts(order, self._asked or self._of_batches(order.loss))

    # -- within ---------------------------------------------------------------------------------

    def _losses(
        self, batches: Iterable[Any], state: Mapping[str, Any] | None = None
    ) -> list[float]:
        """Of each batch, with the present weights or a state's; empty: cannot be evaluated."""
        if self._loss_fn is None:
            return []
        try:
            return self._driver.losses_of(self._loss_fn, batches, state)
        except Exception as error:
            self._loss_fn = None
            self._warn(f"loss_fn raised {type(error).__name__}: {error}; it is not asked again")
            return []

    def _rises(self) -> list[float]:
        """How far each remembered batch is above what it was, with the present weights."""
        now = self._losses(each.batch for each in self._batches)
        return [loss - each.loss for loss, each in zip(now, self._batches, strict=False)]

    def _of_batches(self, loss: float, alarm: Alarm | None = None) -> Finding:
        """What the remembered batches say of a step.

        Args:
            loss: its own, when it was taken.
            alarm: its batch is evaluated with the same weights as the remembered ones. Where a
                model breaks, its loss changes by orders of magnitude within the steps that are
                still on their way to the host.
        """
        rises = self._rises()
        if not rises:
            return Finding(Verdict.UNKNOWN, "nothing")
        usual = sum(each.loss for each in self._batches) / len(rises)
        rise = then = loss - usual
        if alarm is not None:
            rise = next(iter(self._losses([alarm.batch])), loss) - usual
        mean = sum(rises) / len(rises)
        alike = _SHARE * rise <= mean <= rise / _SHARE and min(rises) >= _EACH * rise > 0
        broken = not math.isfinite(mean)
        far = broken or (alarm is not None and alarm.z * rise >= _FAR * then)
        # A loss that is on its way back by itself, as in swings at the edge of stability, is none.
        worse = alike and (far or rise >= _SHARE * then)
        verdict = Verdict.DAMAGE if worse or broken else Verdict.DATA
        return Finding(verdict, "remembered_batches", rise, mean, far)

    def _if_it_lasts(self, order: Order, found: Finding) -> Finding:
        """Damage that is not far beyond the noise has to be there still some steps later."""
        then = found.rise_remembered
        if found.verdict is not Verdict.DAMAGE or then is None or found.far:
            return found
        if order.index - order.onset < _WAIT:
            return found._replace(verdict=Verdict.OPEN)
        rises = self._rises()
        if not rises:
            return found._replace(verdict=Verdict.UNKNOWN)
        now = sum(rises) / len(rises)
        lasts = not now < _SHARE * then  # NaN lasts
        verdict = Verdict.DAMAGE if lasts else Verdict.OPEN
        return found._replace(verdict=verdict, rise_remembered=now)

    def _of_nonfinite(self, order: Order) -> Finding:
        rises = self._rises()
        if rises:
            finite = math.isfinite(sum(rises))
            verdict = Verdict.DATA if finite else Verdict.DAMAGE
            return Finding(verdict, "remembered_batches")
        again = order.index - self._nonfinite_at < _STRETCH
        self._nonfinite = self._nonfinite + 1 if again else 1
        self._nonfinite_at = order.index
        # Weights can be finite and so large that every step overflows.
        verdict = Verdict.DAMAGE if self._nonfinite > _PATIENCE else Verdict.DATA
        return Finding(verdict, "weights")
