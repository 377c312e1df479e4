"""All variants over one series in NumPy: an array of variants, one row after another."""

from __future__ import annotations

from typing import Any

import numpy as np

from healcore.core.engine import EngineConfig
from healcore.core.signals import Signals
from healcore.tools.sweep import judging
from healcore.tools.sweep.keys import Place, configure
from healcore.tools.sweep.orders import Orders
from healcore.tools.sweep.reel import Reel
from healcore.tools.sweep.series import Series


class NumpyScan:
    """The variants of one policy; no more than a few thousand at once are worth it."""

    def __init__(self, config: EngineConfig, places: tuple[Place, ...]) -> None:
        """See `healcore.tools.sweep.running`.

        Args:
            config: the base policy's, from `judging.trimmed`.
            places: where the varied numbers stand.
        """
        self._config, self._places = config, places

    def orders(self, numbers: tuple[np.ndarray, ...], reel: Reel) -> list[Orders]:
        """Runs the variants over the reel.

        Args:
            numbers: (variants,) for each place.
            reel: the series.
        """
        return [self._orders(numbers, each) for each in reel.series]

    def _orders(self, numbers: tuple[np.ndarray, ...], series: Series) -> Orders:
        config = configure(self._config, self._places, numbers)
        state: Any = judging.init(config)
        count = len(numbers[0])
        skipped, recovered = np.zeros(count, np.int32), np.zeros(count, np.int32)
        lanes, rows = [], []
        columns, kinds = series.rows.values, series.rows.kind
        with np.errstate(all="ignore"):
            for row in range(series.length):
                names = series.feed.combinations[kinds[row]]
                signals = Signals(**{name: columns[name][row] for name in names})
                state, verdict = judging.step(config, state, signals, series.resumed[row], xp=np)
                if row >= series.own:
                    skipped += verdict.skip
                    recovered += verdict.first
                    ordered = np.flatnonzero(np.broadcast_to(verdict.order, (count,)))
                    lanes.append(ordered)
                    rows.append(np.full(len(ordered), row))
        return Orders.of(np.concatenate(lanes), np.concatenate(rows), skipped, recovered)
