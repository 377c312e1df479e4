"""`Anchor`: a copy of earlier weights, and the evidence that they are better than the current ones.

The evidence is an e-detector (Shin, Ramdas and Rinaldo 2022, arXiv:2203.03532). Each comparison
multiplies it by 1 + STAKE * b, where b, within [-1, 1], is the rise of the loss divided by the
usual rise. In a healthy run the expected b is at most 0, whatever happened before. Then a healthy
run needs on average at least c comparisons to reach a threshold c.

`suspicion` says what follows from the evidence, `anchor_choice` which anchors are compared.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, field
from typing import Any

from pydantic import ConfigDict

from healcore.runtime.run.compare.trained_step import TrainedStep

STAKE = 0.6
"""Lambda of the e-detector, in (0, 1), for any value of which the bound above holds. With 0.6 the
evidence is multiplied by 0.4 to 1.6, and 20 times 1.6 in a row exceeds 1e4."""
RECENT = 20
"""Number of recent comparisons whose rises give the usual rise, and of losses in a mean loss."""
_64_BITS = (1 << 64) - 1
SAMPLE_SIZE = 8
"""Steps whose batches each anchor keeps: a uniform sample of the steps trained since the anchor."""


@dataclass
class Anchor:
    """The weights after `step` steps, and the evidence that they are better than the current ones.

    A checkpoint holds the fields. A restart loads the weights from the checkpoint of `step`, and
    samples only steps after the restart.

    Attributes:
        weights: result of `Driver.copy_weights`.
        trained: number of steps trained since the copy was made, or since the restart.
        usual_seen: number of these steps at which nothing was unusual.
        drawn: number of calls of `draw`.
        sample: some of the `trained` steps that the model has trained on since the anchor.
        usual: some of the steps at which nothing was unusual. Steps of a long trouble fill
            `sample`; the batches of `usual` say which losses are ordinary.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    step: int
    """Steps done when the copy was made."""
    evidence: float = 1.0
    """Evidence that these weights are better than the current weights; 1 means no evidence."""
    onset: int | None = None
    """Step of the comparison at which the current evidence began, or None without evidence."""
    level: float | None = None
    """Mean of the last training losses when the copy was made, or None if unknown."""
    spread: float = 0.0
    """Standard deviation of the losses of `level`, or 0 if `level` is None."""
    rises: list[float] = field(default_factory=list)
    """Finite rises of the last comparisons since the evidence began."""
    leads: list[float] = field(default_factory=list)
    """How much better the current weights were at the last comparisons without evidence."""

    def __post_init__(self) -> None:
        self.weights: Any = None
        self.trained = self.usual_seen = self.drawn = 0
        self.sample: list[TrainedStep] = []
        self.usual: list[TrainedStep] = []

    @property
    def level_or_inf(self) -> float:
        """`level`, or Inf if the level is unknown."""
        if self.level is None:
            return math.inf
        return self.level

    def add(self, trained: TrainedStep, *, is_usual: bool = True) -> None:
        """Adds a later step that the model has trained on.

        Args:
            trained: the step. Its index alone decides whether the sample keeps it.
            is_usual: whether nothing was unusual at the step.
        """
        self.trained += 1
        _add_to_sample(self.sample, trained, self.trained, self.step)
        if is_usual:
            self.usual_seen += 1
            _add_to_sample(self.usual, trained, self.usual_seen, self.step)

    def draw(self, number: int) -> list[TrainedStep]:
        """Draws past steps on which the current weights are compared.

        Usual steps are drawn where there are enough. On a bad batch that the model has trained on,
        the current weights are better, however damaged they are.

        Args:
            number: number of steps to draw. It is odd, because the median of their rises counts.

        Returns:
            `number` steps, or one step if there are fewer. Empty if no step was trained since the
            anchor or the restart.
        """
        steps = self.sample
        if len(self.usual) >= number:
            steps = self.usual
        if not steps:
            return []
        if number > len(steps):
            number = 1  # a median needs an odd number
        self.drawn += 1
        return random.Random(_mixed(self.step, self.drawn)).sample(steps, number)

    def learn(self, index: int, rise: float, *, is_retest: bool = False) -> None:
        """Updates the evidence with the comparison at step `index`.

        The bet is the rise divided by the median of the recent positive rises. Without a positive
        rise so far, only the sign of the rise counts.

        Args:
            index: index of the step whose batch was compared.
            rise: the smaller rise of the two batches of the comparison.
            is_retest: whether a verdict is pending. Then the lead that the run had before the
                trouble is added to the rise: weights that are only as good as the anchor have not
                recovered yet.
        """
        if is_retest:
            excess = rise + statistics.median(self.leads or [0.0])
        else:
            excess = rise
            if self.evidence <= 1 and -math.inf < rise < 0:
                self.leads = [*self.leads, -rise][-RECENT:]
        if self.evidence <= 1:
            self.onset = index
            self.rises.clear()
        unit = statistics.median([each for each in self.rises if each > 0] or [0.0])
        if unit:
            bet = excess / unit
        elif excess > 0:
            bet = math.inf
        else:
            bet = -math.inf
        bet = max(-1.0, min(1.0, bet))
        self.evidence = max(1.0, self.evidence) * (1 + STAKE * bet)
        if math.isfinite(rise):
            self.rises = [*self.rises, rise][-RECENT:]
        if self.evidence <= 1:
            self.onset = None

    def take_samples(self, live: Anchor, *, before: int) -> None:
        """Takes weights and samples of the same anchor in memory, without undone steps.

        Args:
            live: the anchor before the way back.
            before: step from which the run continues.
        """
        self.weights, self.drawn = live.weights, live.drawn
        self.sample = [each for each in live.sample if each.index < before]
        self.trained = max(before - self.step, len(self.sample))
        self.usual = [each for each in live.usual if each.index < before]
        self.usual_seen = max(min(live.usual_seen, before - self.step), len(self.usual))


def _add_to_sample(sample: list[TrainedStep], trained: TrainedStep, seen: int, seed: int) -> None:
    """Adds the step number `seen` to a uniform sample (reservoir sampling, algorithm R).

    `seen` and `seed` alone decide the place, so every rank samples the same steps.
    """
    if len(sample) < SAMPLE_SIZE:
        sample.append(trained)
        return
    place = _mixed(seed, seen) % seen
    if place < SAMPLE_SIZE:
        sample[place] = trained


def _mixed(seed: int, number: int) -> int:
    """64 bits that look random, of two whole numbers (the finalizer of SplitMix64)."""
    bits = (seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03) & _64_BITS
    bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) & _64_BITS
    bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) & _64_BITS
    return bits ^ bits >> 31
