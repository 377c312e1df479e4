"""`Anchor`: a copy of earlier weights, and the evidence that they are better than the current.

The evidence is an e-detector (Shin, Ramdas and Rinaldo 2022, arXiv:2203.03532). Each comparison
bets on the rise of the loss, in units of the rises before it and within [-1, 1]. While the model is
healthy, the mean of this number is 0 at most, after any history. Then the mean number of
comparisons until the evidence reaches a threshold c is at least c.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import ConfigDict

from healcore.runtime.recovery.orders import HealthyRange

STAKE = 0.6
"""Share of the evidence that each comparison stakes (lambda), in (0, 1). With 0.6 the evidence is
multiplied by 0.4 to 1.6, and 20 full wins in a row reach 1e4. Any value is valid."""
RECENT = 20
"""Comparisons whose rises are the unit of a bet; losses in a mean."""
SAMPLE = 8
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


@dataclass
class Anchor:
    """The weights after `step` steps.

    The fields are saved; a restart takes the weights from the checkpoint of `step`.

    Attributes:
        weights: result of `Driver.copy_weights`.
        sample: steps that the model has trained on since the anchor.
        trained: number of these steps.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    step: int
    learning_rate: float | None
    """Learning rate at that step, multiplier included, or None if unknown."""
    evidence: float = 1.0
    """Evidence that these weights are better than the current ones; 1 means no evidence."""
    onset: int | None = None
    """Step of the comparison at which the current evidence began, or None without evidence."""
    level: float | None = None
    """Mean of the last training losses when the copy was made, or None if unknown."""
    spread: float = 0.0
    """Their standard deviation."""
    numbers: dict[str, HealthyRange] = field(default_factory=dict)
    """Number of an optimizer -> its values at the healthy checkpoints up to this step."""
    rises: list[float] = field(default_factory=list)
    """Finite rises of the last comparisons since the evidence began."""

    def __post_init__(self) -> None:
        self.weights: Any = None
        self.sample: list[TrainedStep] = []
        self.trained = 0
        self._random = random.Random(self.step)  # the same on every rank

    @property
    def mean(self) -> float:
        """`level`, or Inf if it is unknown."""
        return math.inf if self.level is None else self.level

    def add(self, step: TrainedStep) -> None:
        """Adds a later step that the model has trained on (reservoir sampling, algorithm R)."""
        self.trained += 1
        if len(self.sample) < SAMPLE:
            self.sample.append(step)
        elif (place := self._random.randrange(self.trained)) < SAMPLE:
            self.sample[place] = step

    def draw(self) -> TrainedStep | None:
        """Draws one of the sampled steps, or returns None without a sample."""
        return self._random.choice(self.sample) if self.sample else None

    def learn(self, index: int, rise: float) -> None:
        """Updates the evidence with the comparison at step `index`.

        The unit of a rise is the median of the recent positive ones. Without one only its sign
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
    healthy_rate: float
    """Highest learning rate at which the run was healthy, or 0 if unknown."""
    rates: tuple[float, ...]
    """Learning rates in force at the comparisons that found the trouble; empty if unknown."""

    @property
    def due(self) -> int:
        """Step at which the run rolls back unless it has recovered.

        The run waits as many steps as the rollback repeats, those from the anchor to the onset. A
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
    healthy_rate: float = 0.0
    """Highest learning rate at which the run was healthy, or 0 if unknown."""
    rates: list[float] = field(default_factory=list)
    """Learning rates in force at the comparisons of the suspicion."""
    alarms: tuple[int, int] = (-1, -1)
    """First and last step of the latest alarms, with gaps of at most `SAMPLE` steps."""
    verdict: Verdict | None = None
    """The pending verdict, until the run rolls back or recovers, or None."""
    numbers: dict[str, HealthyRange] = field(default_factory=dict)
    """Values of the optimizers' numbers since the suspicion began, or in repeated steps."""

    def needed(self) -> list[int]:
        """Steps of the weights that a restart loads: with evidence, or with the lowest mean."""
        known = [each for each in self.anchors if each.level is not None]
        best = min(known, key=lambda each: each.mean, default=None)
        return [each.step for each in self.anchors if each.evidence > 1 or each is best] or [
            each.step for each in self.anchors[:1]
        ]
