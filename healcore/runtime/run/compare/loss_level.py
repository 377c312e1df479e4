"""`LossLevel`: the losses of the last steps, and which of them are usual."""

from __future__ import annotations

import copy
import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from healcore.runtime.run.compare.evidence import RECENT, REGULAR_INTERVAL
from healcore.runtime.run.compare.last_values import LastValues


class LossLevel:
    """Which losses a run has had, and which of them are usual.

    A loss is *usual* unless it exceeds each of the last `REGULAR_INTERVAL` usual losses. High
    losses do not become usual, so that trouble which lasts cannot hide its own begin. Only
    `accept` makes them usual, after a comparison of weights that shows no damage.

    Attributes:
        last: the last `REGULAR_INTERVAL` losses. A loss that is not finite is -Inf here.
        usual: the last `REGULAR_INTERVAL` usual losses.
    """

    def __init__(self) -> None:
        self.last = LastValues(REGULAR_INTERVAL)
        self.usual = LastValues(REGULAR_INTERVAL)
        self._were_high: deque[bool] = deque(maxlen=REGULAR_INTERVAL)
        """Whether each of the last losses was high."""
        self._recent: deque[float] = deque(maxlen=RECENT)
        """The last finite losses, including high losses."""

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
        self._recent.append(loss)
        if not high:
            self.usual.add(loss)

    def accept(self) -> None:
        """Makes the last losses the usual losses, if most of them are high.

        Called where a comparison of weights has shown no damage. Otherwise a change of the data
        that raises the loss would make every later step a sign of trouble.
        """
        if 2 * sum(self._were_high) > REGULAR_INTERVAL:
            self.usual = copy.deepcopy(self.last)
            self._were_high.clear()

    def mean(self) -> float | None:
        """Returns the mean of the last `RECENT` finite losses, high losses included.

        Returns:
            The mean, or None before there are `RECENT` finite losses: a mean of few losses varies
            too much to
            be compared.
        """
        if len(self._recent) < RECENT:
            return None
        return statistics.fmean(self._recent)

    def spread(self) -> float:
        """Returns the standard deviation of the losses of `mean`.

        It tells a mean that has risen from a mean that varies by chance. The computation is slow,
        so it is not for every step.

        Raises:
            statistics.StatisticsError: there are fewer than two losses.
        """
        return statistics.stdev(self._recent)

    def to_values(self) -> dict[str, Any]:
        """Returns what `restore` takes, for the text of a checkpoint.

        Returns:
            Name -> a series of losses or flags, which `store.values` can write as text.
        """
        return {
            "losses": self.last.values,
            "usual": self.usual.values,
            "were_high": self._were_high,
            "recent": self._recent,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Takes what `to_values` has returned, into a level without a loss.

        Called when a run resumes. Without it, no loss would be high during the first
        `REGULAR_INTERVAL` steps, because a short series exceeds nothing.

        Args:
            saved: the values.
        """
        self.last = LastValues(REGULAR_INTERVAL, saved["losses"])
        self.usual = LastValues(REGULAR_INTERVAL, saved["usual"])
        self._were_high.extend(saved["were_high"])
        self._recent.extend(saved["recent"])
