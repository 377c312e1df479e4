"""What comparisons of weights remember: anchors and their evidence, the last steps, the credit.

The evidence is an e-detector (Shin, Ramdas and Rinaldo 2022, arXiv:2203.03532). Each comparison
multiplies it by 1 + STAKE * b, where b, within [-1, 1], is the rise of the loss divided by the
usual rise. In a healthy run the expected b is at most 0, whatever happened before. Then a healthy
run needs on average at least c comparisons to reach a threshold c.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import ConfigDict

from healcore.runtime.store.ranks import Ranks

STAKE = 0.6
"""Lambda of the e-detector, in (0, 1), for any value of which the bound above holds. With 0.6 the
evidence is multiplied by 0.4 to 1.6, and 20 times 1.6 in a row exceeds 1e4."""
RECENT = 20
"""Number of recent comparisons whose rises give the usual rise, and of losses in a mean loss."""
SAMPLE_SIZE = 8
"""Steps whose batches each anchor keeps: a uniform sample of the steps trained since the anchor."""


class ObservedBatch(NamedTuple):
    """A batch, or a part of one, and its weight in the loss of its step."""

    content: Any
    weight: float = 1.0


class TrainedStep(NamedTuple):
    """One step of the run, or one dispatch of a compiled loop, and its batches."""

    index: int
    batches: tuple[ObservedBatch, ...]
    """All batches of an accumulation."""
    norm: float = math.nan
    """Gradient norm, or NaN if unknown."""


@dataclass
class Anchor:
    """The weights after `step` steps.

    The fields are saved; a restart takes the weights from the checkpoint of `step`.

    Attributes:
        weights: result of `Driver.copy_weights`.
        sample: some of the `trained` steps that the model has trained on since the anchor.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    step: int
    evidence: float = 1.0
    """Evidence that these weights are better than the current ones; 1 means no evidence."""
    onset: int | None = None
    """Step of the comparison at which the current evidence began, or None without evidence."""
    level: float | None = None
    """Mean of the last training losses when the copy was made, or None if unknown."""
    spread: float = 0.0
    """Their standard deviation."""
    rises: list[float] = field(default_factory=list)
    """Finite rises of the last comparisons since the evidence began."""

    def __post_init__(self) -> None:
        self.weights: Any = None
        self.sample: list[TrainedStep] = []
        self.trained = 0
        self._random = random.Random(self.step)  # the same on every rank

    @property
    def level_or_inf(self) -> float:
        """`level`, or Inf if it is unknown."""
        return math.inf if self.level is None else self.level

    def add(self, step: TrainedStep) -> None:
        """Adds a later step that the model has trained on (reservoir sampling, algorithm R)."""
        self.trained += 1
        if len(self.sample) < SAMPLE_SIZE:
            self.sample.append(step)
        elif (place := self._random.randrange(self.trained)) < SAMPLE_SIZE:
            self.sample[place] = step

    def draw(self) -> TrainedStep | None:
        """Draws one of the sampled steps, or returns None without a sample."""
        return self._random.choice(self.sample) if self.sample else None

    def learn(self, index: int, rise: float) -> None:
        """Updates the evidence with the comparison at step `index`.

        A rise is measured in the median of the recent positive rises. Without one, only its sign
        counts.
        """
        if self.evidence <= 1:
            self.onset = index
            self.rises.clear()
        unit = statistics.median([e for e in self.rises if e > 0] or [0.0])
        bet = rise / unit if unit else math.inf if rise > 0 else -math.inf
        self.evidence = max(1.0, self.evidence) * (1 + STAKE * max(-1.0, min(1.0, bet)))
        if math.isfinite(rise):
            self.rises = [*self.rises, rise][-RECENT:]
        if self.evidence <= 1:
            self.onset = None

    def rewind(self, target: int) -> None:
        """Drops the evidence, and the sampled steps from step `target` on."""
        self.evidence, self.onset = 1.0, None
        self.sample = [each for each in self.sample if each.index < target]
        self.trained = max(target - self.step, len(self.sample))


class Verdict(NamedTuple):
    """The finding that earlier weights are better than the current weights."""

    index: int
    """Step of the rollback."""
    found: int
    """First step with enough evidence."""
    anchor: int
    """Step of the earlier weights."""
    onset: int
    """First step of the trouble: its first alarm, or the first comparison that found it."""
    evidence: float
    """Lower bound on the mean number of comparisons until a healthy run has this evidence."""
    rise: float | None
    """Loss of the step's batch, current minus earlier weights, or None if it is not finite."""
    rise_remembered: float | None
    """The same difference for a batch trained on since the anchor."""
    healthy_rates: dict[str, float]
    """Engine name -> highest learning rate at which the run was healthy, if known."""
    rates: tuple[dict[str, float], ...]
    """Learning rates in force at the comparisons that found the trouble; empty if unknown."""

    @property
    def due(self) -> int:
        """Step at which the run rolls back unless it has recovered.

        Waits from the onset as many steps as lie between the anchor and the onset. A
        run that recovers earlier loses fewer steps than by the rollback. A run that does not
        recover loses about twice as many (rent or buy: Karlin et al. 1988, "Competitive snoopy
        caching"). Thus a learning rate that is raised on purpose gets time to recover.
        """
        return self.onset + (self.onset - self.anchor)


@dataclass
class ComparisonState:
    """What a checkpoint holds of the comparisons: the anchors, and the current suspicion."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    anchors: list[Anchor] = field(default_factory=list)
    """At most `MAX_ANCHORS`, oldest first: the weights with the lowest mean loss when they were
    copied, and those at the last two checkpoints. The first weights of a process have no mean: they
    stay for two checkpoints, and for as long as they have evidence."""
    healthy_rates: dict[str, float] = field(default_factory=dict)
    """Engine name -> highest learning rate at which the run was healthy, if known."""
    rates: list[dict[str, float]] = field(default_factory=list)
    """Learning rates in force at the comparisons of the suspicion."""
    alarms: tuple[int, int] = (-1, -1)
    """First and last step of the latest alarms, with gaps of at most `SAMPLE_SIZE` steps."""
    verdict: Verdict | None = None
    """The pending verdict, until the run rolls back or recovers, or None."""

    def needed(self) -> list[int]:
        """Steps of the weights that a restart loads: with evidence, or with the lowest mean."""
        best = min(self.anchors, key=lambda each: each.level_or_inf, default=None)
        return [each.step for each in self.anchors if each.evidence > 1 or each is best]


REGULAR_INTERVAL = 100
"""Steps between two regular comparisons, more if a comparison is slow; and the last losses that a
loss has to exceed to be a sign of trouble."""
STEPS_BEFORE_SIGN = 4
"""Steps of a window before the first sign of trouble."""
STEPS_AFTER_SIGN = 12
"""Steps of a window from the first sign on."""
_WINDOWS = 4
_NORMS = 500
"""Healthy gradient norms whose maximum is known."""

MAX_SHARE = 0.01
"""Max share of a healthy run's time that comparisons may cost."""
STEP_COST = 3.0
"""Cost of a training step in evaluations: a forward pass, and a backward pass of twice its cost."""
MAX_CREDIT = 30.0
"""Max credit of evaluations: the cost of 1,000 steps. A run starts with this credit, because a
learning rate that is too high shows in the first steps."""
MAX_DEBT = 40.0
"""Max debt of evaluations after a suspicion: ten comparisons, half of what a verdict needs."""
PRICE_WINDOW = 3
"""Last comparisons, of which the cheapest sets the price: the first ones compile."""


class TroubleWindow(NamedTuple):
    """The steps around the first sign of some trouble."""

    start: int
    """Step of the sign."""
    largest_norm: float
    """The largest healthy gradient norm before, or Inf if none is known."""
    steps: list[TrainedStep]


class StepHistory:
    """What a run remembers of its steps for comparisons, in bounded memory."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=_NORMS)
        self.forget()

    def forget(self) -> None:
        """Drops losses and windows, whose steps are repeated. Healthy norms stay."""
        self._losses: deque[float] = deque(maxlen=REGULAR_INTERVAL)
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._last: deque[TrainedStep] = deque(maxlen=STEPS_BEFORE_SIGN)
        self._windows: deque[TroubleWindow] = deque(maxlen=_WINDOWS)
        self._last_sign = -STEPS_AFTER_SIGN - 1

    def is_high(self, loss: float) -> bool:
        """Whether a loss is above the last `REGULAR_INTERVAL` losses."""
        return len(self._losses) == REGULAR_INTERVAL and loss > max(self._losses)

    def add(self, step: TrainedStep, loss: float, *, sign: bool, healthy: bool) -> bool:
        """Adds a step, and returns whether it is the first sign of some trouble.

        Args:
            step: the step.
            loss: its loss, or NaN.
            sign: whether it shows trouble.
            healthy: whether no evidence of damage is pending.
        """
        self._losses.append(loss if math.isfinite(loss) else -math.inf)
        if math.isfinite(loss):
            self._recent.append(loss)
        is_first = sign and step.index - self._last_sign > STEPS_AFTER_SIGN
        if is_first:
            largest = max(self._norms, default=math.inf)
            self._windows.append(TroubleWindow(step.index, largest, [*self._last]))
        if sign:
            self._last_sign = step.index
        if self._windows and step.index < self._windows[-1].start + STEPS_AFTER_SIGN:
            self._windows[-1].steps.append(step)
        elif healthy and math.isfinite(step.norm):
            self._norms.append(step.norm)
        self._last.append(step)
        return is_first

    def mean(self) -> float | None:
        """Mean of the last `RECENT` finite losses, or None before."""
        return statistics.fmean(self._recent) if len(self._recent) == RECENT else None

    def spread(self) -> float:
        """Standard deviation of the losses of `mean`. Slow: not for every step."""
        return statistics.stdev(self._recent)

    def window(self, onset: int, found: int) -> TroubleWindow | None:
        """The window whose sign is nearest to `onset`, of the signs up to step `found`."""
        windows = [each for each in self._windows if each.start <= found]
        return min(windows, key=lambda each: abs(each.start - onset), default=None)


class Credit:
    """Credit of evaluations, and the price of an evaluation in time.

    The price only lengthens the regular distance: comparisons at alarms do not depend on the clock,
    so that a repeated run makes the same comparisons.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.left = MAX_CREDIT
        self._ranks = ranks
        self._prices: deque[int] = deque([1] * PRICE_WINDOW, maxlen=PRICE_WINDOW)
        self._step_s = 0.0
        """Seconds of a step without comparison, a moving average over a regular interval."""
        self._last_time: float | None = None

    def after_step(self) -> None:
        """Adds the credit of a step, and measures its time."""
        self.left = min(MAX_CREDIT, self.left + MAX_SHARE * STEP_COST)
        now = time.monotonic()
        if self._last_time is not None:
            taken = now - self._last_time
            self._step_s += (taken - self._step_s) * (1 / REGULAR_INTERVAL if self._step_s else 1.0)
        self._last_time = now

    def is_regular(self, index: int) -> bool:
        """Whether step `index` has a regular comparison."""
        return index % (REGULAR_INTERVAL * min(self._prices)) == REGULAR_INTERVAL - 1

    def charge(self, evaluations: int) -> None:
        """Subtracts the evaluations since `after_step` from the credit, and measures their price.

        Their time is no part of the next step's time.
        """
        self.left = max(-MAX_DEBT, self.left - evaluations)
        began, self._last_time = self._last_time, None
        if not evaluations or began is None:
            return
        seconds = time.monotonic() - began
        share = STEP_COST * seconds / evaluations / self._step_s if self._step_s else 1.0
        price = 1 << max(0, round(math.log2(max(share, 1.0))))
        self._prices.append(max(self._ranks.gather(price)))  # times differ between ranks
