"""Earlier weights (anchors), and the evidence that they are better than the current weights.

The evidence is an e-detector (Shin, Ramdas and Rinaldo 2022, arXiv:2203.03532). Each comparison
multiplies it by 1 + STAKE * b, where b, within [-1, 1], is the rise of the loss divided by the
usual rise. In a healthy run the expected b is at most 0, whatever happened before. Then a healthy
run needs on average at least c comparisons to reach a threshold c.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import ConfigDict

from healcore.runtime.run.trouble import Trouble

STAKE = 0.6
"""Lambda of the e-detector, in (0, 1), for any value of which the bound above holds. With 0.6 the
evidence is multiplied by 0.4 to 1.6, and 20 times 1.6 in a row exceeds 1e4."""
RECENT = 20
"""Number of recent comparisons whose rises give the usual rise, and of losses in a mean loss."""
SAMPLE_SIZE = 8
"""Steps whose batches each anchor keeps: a uniform sample of the steps trained since the anchor."""
MEDIAN_OF = 3
"""Past batches of a comparison while there is evidence. The median of their rises is steadier than
a single rise, and bad batches in the sample do not dominate the median as they dominate a mean."""
MAX_ANCHORS = 3
"""Max number of anchors."""
MIN_AGE = 0.5
"""Min age of a compared anchor, as a share of the run so far, up to one checkpoint interval."""
ROUNDING = 1e-6
"""Relative difference up to which two float32 losses are equal."""
_64_BITS = (1 << 64) - 1


class ObservedBatch(NamedTuple):
    """A batch, or a part of one, and its weight in the loss of its step.

    The loss of the step is the weighted mean of its batches, so the parts of a batch that was split
    for memory add up to the same loss as the whole batch.
    """

    content: Any
    """The batch as the loop has it, or a part of the batch."""
    weight: float = 1.0
    """Its share in the loss of the step; only the ratio of weights matters."""


class TrainedStep(NamedTuple):
    """One step of the run, or one dispatch of a compiled loop, and its batches."""

    index: int
    """Number of the step, from 0; of the last step of a dispatch."""
    batches: tuple[ObservedBatch, ...]
    """All batches of an accumulation."""
    norms: Mapping[str, float] = {}
    """Engine name -> gradient norm before any clip of healcore, where it is known."""
    rates: Mapping[str, float] = {}
    """Engine name -> the learning rate in force, where the step's record has it."""


@dataclass
class Anchor:
    """The weights after `step` steps, and the evidence that they are better than the current ones.

    A checkpoint holds the fields. A restart loads the weights from the checkpoint of `step`, and
    samples only steps after the restart.

    Attributes:
        weights: result of `Driver.copy_weights`, or None in a record.
        sample: some of the usual steps trained since the copy was made, or since the restart.
        seen: number of these steps.
        drawn: number of calls of `draw`.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    step: int
    """Steps done when the copy was made."""
    evidence: float = 1.0
    """Evidence that these weights are better than the current weights; 1 means no evidence."""
    onset: int | None = None
    """Step of the comparison at which the current evidence began, or None without evidence."""
    level: float = math.inf
    """Mean of the last training losses when the copy was made, or Inf if unknown."""
    spread: float = 0.0
    """Standard deviation of the losses of `level`."""
    rises: list[float] = field(default_factory=list)
    """Finite rises of the last comparisons since the evidence began."""
    leads: list[float] = field(default_factory=list)
    """How much better the current weights were at the last comparisons without evidence."""

    def __post_init__(self) -> None:
        self.weights: Any = None
        self.sample: list[TrainedStep] = []
        self.seen = self.drawn = 0

    def add(self, trained: TrainedStep, *, is_usual: bool) -> None:
        """Adds a later step that the model has trained on, by reservoir sampling (algorithm R).

        The steps seen and the anchor's step alone decide the place in the sample, so every rank
        samples the same steps. On a bad batch that the model has trained on, the current weights
        are better, however damaged they are. So other steps are taken only where usual steps are
        missing.

        Args:
            trained: the step.
            is_usual: whether nothing was unusual at the step.
        """
        place = len(self.sample)
        if not is_usual and place >= MEDIAN_OF:
            return
        self.seen += 1
        if place == SAMPLE_SIZE:
            place = _mixed(self.step, self.seen) % self.seen
        if place < SAMPLE_SIZE:
            self.sample[place : place + 1] = [trained]

    def draw(self, number: int) -> list[TrainedStep]:
        """Draws past steps: `number` of them, or one if there are fewer, or none.

        Args:
            number: an odd number, because the median of their rises counts.
        """
        if len(self.sample) < number:
            number = min(1, len(self.sample))
        self.drawn += 1
        return random.Random(_mixed(self.step, self.drawn)).sample(self.sample, number)

    def forget(self) -> None:
        """Forgets the evidence."""
        self.evidence, self.onset = 1.0, None

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
        lead = 0.0
        if is_retest:
            lead = statistics.median(self.leads or [0.0])
        if self.evidence <= 1:
            if not is_retest and -math.inf < rise < 0:
                self.leads = [*self.leads, -rise][-RECENT:]
            self.onset, self.rises = index, []
        usual = statistics.median([each for each in self.rises if each > 0] or [math.ulp(0.0)])
        bet = max(-1.0, min(1.0, (rise + lead) / usual))
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
        self.seen = max(min(live.seen, before - self.step), len(self.sample))


def _mixed(seed: int, number: int) -> int:
    """64 bits that look random, of two whole numbers (the finalizer of SplitMix64)."""
    bits = (seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03) & _64_BITS
    bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) & _64_BITS
    bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) & _64_BITS
    return bits ^ bits >> 31


@dataclass
class ComparisonState:
    """What a checkpoint holds of the comparisons: the anchors, and the current suspicion.

    A restart in the middle of a suspicion continues it with the evidence so far. Without that, a
    run that is killed often would never collect enough evidence for a rollback.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    anchors: list[Anchor] = field(default_factory=list)
    """At most `MAX_ANCHORS`, oldest first: the weights with the lowest mean loss when they were
    copied, and the weights at the last two checkpoints. The first weights of a process have no
    mean: they stay for two checkpoints, and for as long as they have evidence."""
    verdict: Trouble | None = None
    """The pending verdict, until the run rolls back or recovers, or None."""
    silent_until: int = 0
    """Step before which weights are neither compared nor copied."""
    spent: float = 0.0
    """Evaluations of batches that the run has made and not yet earned."""
    parts: int = 1
    """Least parts in which the `loss_fn` evaluates a batch since memory ran out in it."""
    gives_loss: bool = False
    """Whether the training loss is the result of `loss_fn`. Comparisons then do not evaluate the
    current weights on the batch of the step, which they have been trained on meanwhile."""
    first_losses: list[float] = field(default_factory=list)
    """The first `RECENT` finite losses of the run."""
    recent: list[float] = field(default_factory=list)
    """The last `RECENT` finite losses. This and the next two are kept by `RecentSteps`."""
    usual: list[float] = field(default_factory=list)
    """The last losses that were not high."""
    bursts: list[tuple[int, int]] = field(default_factory=list)
    """First and last step of the latest bursts of high steps."""

    @property
    def has_evidence(self) -> bool:
        """Whether an anchor has evidence, or a verdict is pending.

        While this is true, no anchor is added and nothing is learnt as healthy: the current weights
        may be the damaged ones.
        """
        for anchor in self.anchors:
            if anchor.evidence > 1:
                return True
        return self.verdict is not None

    def anchor_of(self, step: int | None) -> Anchor | None:
        """The anchor of a step, or None if its weights are not kept.

        Args:
            step: step of the checkpoint at which the weights were copied.
        """
        for anchor in self.anchors:
            if anchor.step == step:
                return anchor
        return None

    def forget_trouble(self) -> None:
        """Forgets the suspicion and its verdict.

        The debt of evaluations is remitted. It must not delay the discovery of the next trouble.
        """
        self.verdict = None
        self.bursts.clear()
        self.spent = 0.0


def with_new(anchors: Sequence[Anchor], new: Anchor) -> list[Anchor]:
    """The anchors to keep after another checkpoint, oldest first.

    The anchor with the lowest mean loss stays, and the anchors of the last two checkpoints. Two
    recent anchors are not enough: after slow damage both of them would already have a part of it.

    Args:
        anchors: the anchors so far, oldest first.
        new: the anchor of the current weights.
    """
    if len(anchors) < MAX_ANCHORS:
        return [*anchors, new]
    *older, last = anchors
    best = min(older, key=lambda anchor: (anchor.level, -anchor.step))
    return [best, last, new]


def to_compare(
    anchors: Sequence[Anchor], index: int, *, every: int, best: Anchor | None = None
) -> list[Anchor]:
    """Anchors to compare with: the newest old enough, `best`, and old anchors with evidence.

    Weights of a few steps ago differ too little, and are as damaged as the current weights. After
    `SAMPLE_SIZE` steps an anchor's sample is full.

    Args:
        anchors: all anchors, oldest first.
        index: the step at which weights are compared.
        every: steps of a checkpoint interval.
        best: an anchor to compare with at any age, or None.
    """
    age = max(SAMPLE_SIZE, min(every, int(MIN_AGE * index)))
    old = [anchor for anchor in anchors if index + 1 - anchor.step >= age]
    return [
        anchor
        for anchor in anchors
        if anchor is best or (anchor in old and (anchor is old[-1] or anchor.evidence > 1))
    ]


def rise_of(now: float, then: float) -> float:
    """The current loss minus the loss of the earlier weights.

    Args:
        now: loss with the current weights. NaN and Inf count as the highest loss.
        then: loss with the earlier weights.

    Returns:
        The difference, which may be infinite. NaN if neither loss is finite: a bad batch is not
        evidence.
    """
    if math.isfinite(now) == math.isfinite(then):
        if math.isfinite(now):
            return now - then
        return math.nan
    if math.isfinite(then):
        return math.inf
    return -math.inf
