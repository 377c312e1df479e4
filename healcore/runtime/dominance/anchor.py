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

from healcore.runtime.healthy_range import HealthyRange

STAKE = 0.6
"""Share of the evidence that each comparison stakes (lambda), in (0, 1). With 0.6 the evidence is
multiplied by 0.4 to 1.6, and 20 full wins in a row reach 1e4. Any value is valid."""
RECENT = 20
"""Comparisons whose rises are the unit of a bet; losses in a mean."""
SAMPLE = 8
"""Steps whose batches each anchor keeps: a uniform sample of the steps trained since the anchor."""
ROUNDING = 1e-6
"""Relative difference up to which two float32 losses are equal."""


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

    def forget(self) -> None:
        """Drops the evidence."""
        self.evidence, self.onset = 1.0, None


def rise_of(now: float, then: float) -> float:
    """The current loss minus the loss of the earlier weights; NaN and Inf count as highest."""
    if math.isfinite(then):
        return now - then if math.isfinite(now) else math.inf
    return -math.inf


def same_data(first: float, second: float) -> bool:
    """Whether two losses of the same weights are equal to rounding: their batches are the same."""
    return math.isclose(first, second, rel_tol=ROUNDING, abs_tol=0.0)
