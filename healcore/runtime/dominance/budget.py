"""`Budget`: how many evaluations of a batch comparisons may cost."""

from __future__ import annotations

import math
import time
from collections import deque

from healcore.runtime.dominance.history import HEARTBEAT
from healcore.runtime.store.ranks import Ranks

MAX_SHARE = 0.01
"""Max share of a healthy run's time that comparisons may cost."""
STEP_COST = 3.0
"""Cost of a training step in evaluations: a forward pass, and a backward pass of twice its cost."""
MAX_CREDIT = 30.0
"""Max credit of evaluations: the cost of 1,000 steps. A run starts with this credit, because a
learning rate that is too high shows in the first steps."""
MAX_DEBT = 40.0
"""Max debt of evaluations after a suspicion: ten comparisons, half of what a verdict needs."""
PRICED = 3
"""Last comparisons, of which the cheapest sets the price: the first ones compile."""


class Budget:
    """Credit of evaluations, and the price of an evaluation in time.

    The price only lengthens the regular distance: comparisons at alarms do not depend on the clock,
    so that a repeated run makes the same comparisons.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.credit = MAX_CREDIT
        self._ranks = ranks
        self._prices: deque[int] = deque([1] * PRICED, maxlen=PRICED)
        self._step_s = 0.0
        """Seconds of a step without comparison, a moving average over a heartbeat."""
        self._last_time: float | None = None
        self._began = 0.0

    def refill(self) -> None:
        """Restores the credit of a run's start."""
        self.credit = MAX_CREDIT

    def after_step(self) -> None:
        """Adds the credit of a step, and measures its time."""
        self.credit = min(MAX_CREDIT, self.credit + MAX_SHARE * STEP_COST)
        self._measure_step()

    def _measure_step(self) -> None:
        now = time.monotonic()
        if self._last_time is not None:
            taken = now - self._last_time
            self._step_s += (taken - self._step_s) * (1 / HEARTBEAT if self._step_s else 1.0)
        self._last_time = now

    @property
    def distance(self) -> int:
        """Steps between two regular comparisons."""
        return HEARTBEAT * min(self._prices)

    def begin(self) -> None:
        """Begins to measure the time of evaluations."""
        self._began = time.monotonic()

    def charge(self, evaluations: int) -> None:
        """Subtracts the evaluations since `begin` from the credit, and measures their price."""
        seconds = time.monotonic() - self._began
        self.credit = max(-MAX_DEBT, self.credit - evaluations)
        self._last_time = None
        if not evaluations:
            return
        share = STEP_COST * seconds / evaluations / self._step_s if self._step_s else 1.0
        price = 1 << max(0, round(math.log2(max(share, 1.0))))
        self._prices.append(max(self._ranks.gather(price)))  # times differ between ranks
