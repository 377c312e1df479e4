"""Is the model worse, or are the data different? What is asked before a run goes back.

An alarm says that a step is unlike those before it. A rollback heals a damaged model, and costs a
healthy one its progress, so it needs evidence of damage:

* *Instability*: loss and gradient norm have grown from update to update (the engine's detector of
  that name). That is evidence in itself.
* *Weights that are not finite.* Steps that are not finite are skipped and change nothing; as long
  as the weights are finite there is nothing to go back from.
* *Batches from before the trouble*, evaluated with the present weights, where the user has given a
  `loss_fn`: a damaged model has become worse on them, different data have not changed them. Of the
  rise of the loss at least half has to be found on them. They also find the damage that a stretch
  of bad data has left behind, once it is over (`excursion`).
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from healcore.core.verdict import Cause
from healcore.runtime.driver import Driver, Told
from healcore.runtime.incidents.excursion import Excursions, Stretch
from healcore.runtime.incidents.judging import Order

_NONFINITE = Cause.NONFINITE_LOSS | Cause.NONFINITE_GRAD
_BATCHES = 4
_APART = 16  # steps from one remembered batch to the next
_SHARE = 0.5  # of the rise of the loss that is found on remembered batches, to be damage
_FEWEST = 3  # batches that have to speak for damage after a stretch of bad data
_LEAST = 0.02  # of the rise of the loss that is left on each of them
_PATIENCE = 3  # orders for non-finite steps in one stretch with finite weights; then it is damage
_STRETCH = 64  # steps without such an order that end the stretch


class Verdict(enum.Enum):
    """The answer."""

    DAMAGE = "damage"
    """The model is worse: go back."""
    DATA = "data"
    """The model is what it was: the data are different, or the step's arithmetic overflowed."""
    UNKNOWN = "unknown"
    """Nothing speaks for damage, and there was nothing to ask."""


class Finding(NamedTuple):
    """An answer, and the numbers behind it."""

    verdict: Verdict
    by: str
    """What it rests on: instability, weights, remembered_batches, budget or nothing."""
    rise: float | None = None
    """How far the loss of the step that was judged is above the remembered ones."""
    rise_remembered: float | None = None
    """How far the remembered batches are above what they were, with the present weights."""


class Remembered(NamedTuple):
    """One batch from a healthy step."""

    index: int
    batch: Any
    loss: float
    """When it was trained on."""


class Evidence:
    """Remembers a few batches, and answers.

    Args:
        driver: of the run.
        loss_fn: the loss of one batch, see `Healer`; None: batches cannot be evaluated.
    """

    def __init__(self, driver: Driver, loss_fn: Callable[..., Any] | None) -> None:
        self._driver = driver
        self._loss_fn = loss_fn
        self._batches: deque[Remembered] = deque(maxlen=_BATCHES)
        self._before: list[Remembered] = []
        """The batches from before the excursion of the loss that is under way."""
        self._excursions = Excursions()
        self._nonfinite = 0
        self._nonfinite_at = -_STRETCH

    def see(self, index: int, batch: Any, told: list[Told]) -> tuple[Stretch, Finding] | None:
        """Takes a step that was judged, and its batch; references to a few batches are kept.

        Returns:
            A stretch of bad data that is over and has damaged the model.
        """
        loss = told[0].loss
        calm = not self._excursions.under_way
        stretch = self._excursions.see(index, loss)
        if calm and self._excursions.under_way:
            self._before = list(self._batches)
        healthy = not any(each.incident_open or int(each.decision.cause) for each in told)
        far = not self._batches or index - self._batches[-1].index >= _APART
        if healthy and far and not self._excursions.under_way:
            self._batches.append(Remembered(index, batch, loss))
        return None if stretch is None else self._of_stretch(stretch)

    def went_back(self, target: int) -> None:
        """Steps from `target` on are taken again."""
        kept = [each for each in self._batches if each.index < target]
        self._batches = deque(kept, maxlen=_BATCHES)
        self._excursions.restart()

    def resumed(self) -> None:
        """The run goes on from an earlier process."""
        self._excursions.resumed()

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
        now = self._evaluate(self._batches)
        if order.cause & _NONFINITE:
            return self._of_nonfinite(order, now)
        if now is None:
            return Finding(Verdict.UNKNOWN, "nothing")
        then = sum(each.loss for each in self._batches) / len(self._batches)
        rise, risen = order.loss - then, now - then
        damaged = not math.isfinite(risen) or (rise > 0 and risen >= _SHARE * rise)
        verdict = Verdict.DAMAGE if damaged else Verdict.DATA
        return Finding(verdict, "remembered_batches", rise, risen)

    # -- within ---------------------------------------------------------------------------------

    def _evaluate(self, batches: Sequence[Remembered]) -> float | None:
        """Mean loss of remembered batches with the present weights."""
        losses = self._losses(batches)
        return sum(losses) / len(losses) if losses else None

    def _losses(self, batches: Sequence[Remembered]) -> list[float]:
        if self._loss_fn is None:
            return []
        return [self._driver.loss_of(self._loss_fn, each.batch) for each in batches]

    def _of_stretch(self, stretch: Stretch) -> tuple[Stretch, Finding] | None:
        """Whether every batch from before has become worse, and how far."""
        rises = [
            now - each.loss
            for now, each in zip(self._losses(self._before), self._before, strict=True)
        ]
        if len(rises) < _FEWEST or not min(rises) > 0:
            return None
        mean = sum(rises) / len(rises)
        if mean < _LEAST * stretch.rise:
            return None
        return stretch, Finding(Verdict.DAMAGE, "remembered_batches", stretch.rise, mean)

    def _of_nonfinite(self, order: Order, now: float | None) -> Finding:
        if now is not None:
            verdict = Verdict.DATA if math.isfinite(now) else Verdict.DAMAGE
            return Finding(verdict, "remembered_batches", None, now)
        again = order.index - self._nonfinite_at < _STRETCH
        self._nonfinite = self._nonfinite + 1 if again else 1
        self._nonfinite_at = order.index
        # Weights can be finite and so large that every step overflows.
        verdict = Verdict.DAMAGE if self._nonfinite > _PATIENCE else Verdict.DATA
        return Finding(verdict, "weights")
