"""What comparisons of weights remember: anchors and their evidence, the verdict, the credit.

The evidence is an e-detector (Shin, Ramdas and Rinaldo 2022, arXiv:2203.03532). Each comparison
multiplies it by 1 + STAKE * b, where b, within [-1, 1], is the rise of the loss divided by the
usual rise. In a healthy run the expected b is at most 0, whatever happened before. Then a healthy
run needs on average at least c comparisons to reach a threshold c.

An anchor is a copy of earlier weights. The functions at the end of this file say which anchors are
compared, and which are kept. They are pure functions of the anchors.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pydantic import ConfigDict

from healcore.runtime.run.healthy_ranges import HealthyRanges, HealthyValues

STAKE = 0.6
"""Lambda of the e-detector, in (0, 1), for any value of which the bound above holds. With 0.6 the
evidence is multiplied by 0.4 to 1.6, and 20 times 1.6 in a row exceeds 1e4."""
RECENT = 20
"""Number of recent comparisons whose rises give the usual rise, and of losses in a mean loss."""
_64_BITS = (1 << 64) - 1
SAMPLE_SIZE = 8
"""Steps whose batches each anchor keeps: a uniform sample of the steps trained since the anchor."""


FIRST_PAUSE = RECENT // 2
"""Steps after a high mean loss without evidence until the next comparison because of the mean. Each
such comparison doubles the pause, up to `REGULAR_INTERVAL`."""


class ObservedBatch(NamedTuple):
    """A batch, or a part of one, and its weight in the loss of its step.

    Comparisons evaluate the `content` again. The loss of the step is the weighted mean of its
    batches, so the parts of a batch that was split for memory add up to the same loss as the whole
    batch.
    """

    content: Any
    weight: float = 1.0


class TrainedStep(NamedTuple):
    """One step of the run, or one dispatch of a compiled loop, and its batches.

    Comparisons evaluate the batches again, with the current and with earlier weights.
    """

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
    """The weights after `step` steps.

    The fields are saved; a restart takes the weights from the checkpoint of `step`.

    Attributes:
        weights: result of `Driver.copy_weights`.
        sample: some of the `trained` steps that the model has trained on since the anchor.
        usual: some of the steps at which nothing was unusual. Steps of a long trouble fill
            `sample`; the batches of `usual` say which losses are ordinary.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    step: int
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
    healthy: HealthyValues = field(default_factory=HealthyValues)
    """What was known as healthy when the copy was made."""
    trained: int = 0
    """Number of steps trained since."""
    usual_seen: int = 0
    """Number of these at which nothing was unusual."""
    drawn: int = 0
    """Number of calls of `draw`."""
    sampled: tuple[list[int], list[int]] = ([], [])
    """The steps of `sample` and of `usual`, in a record."""

    def __post_init__(self) -> None:
        self.weights: Any = None
        self.sample: list[TrainedStep] = []
        self.usual: list[TrainedStep] = []

    def to_save(self) -> Anchor:
        """A copy for a record, in which `sampled` has the numbers of the sampled steps.

        The steps themselves with their batches are large, and a record is JSON. The batches are
        saved with the arrays, and `restore_samples` puts both together.
        """
        numbers = [each.index for each in self.sample], [each.index for each in self.usual]
        return replace(self, sampled=numbers)

    def restore_samples(self, steps: Mapping[int, TrainedStep]) -> None:
        """Takes the sampled steps of a record, as far as their batches are known.

        Steps that `steps` lacks are dropped. Then `draw` has fewer steps to choose from.

        Args:
            steps: number of a step -> the step with its batches.
        """
        of_sample, of_usual = self.sampled
        self.sample = [steps[index] for index in of_sample if index in steps]
        self.usual = [steps[index] for index in of_usual if index in steps]

    @property
    def level_or_inf(self) -> float:
        """`level`, or Inf if it is unknown."""
        return math.inf if self.level is None else self.level

    def add(self, step: TrainedStep, *, is_usual: bool = True) -> None:
        """Adds a later step that the model has trained on.

        Args:
            step: the step. Whether it is kept in the sample follows from its number only.
            is_usual: whether nothing was unusual at the step.
        """
        self.trained += 1
        _add_to_sample(self.sample, step, self.trained, self.step)
        if is_usual:
            self.usual_seen += 1
            _add_to_sample(self.usual, step, self.usual_seen, self.step)

    def draw(self, number: int) -> list[TrainedStep]:
        """Draws past steps on which the current weights are compared.

        They are usual steps, where there are enough: on a bad batch that the model has trained on,
        the current weights are better however damaged they are.

        Args:
            number: how many.

        Returns:
            That many steps, or one if there are fewer; empty if no step was trained since the
            anchor. A restart draws the same steps as a run that was not killed.
        """
        steps = self.usual if len(self.usual) >= number else self.sample
        if not steps:
            return []
        if number > len(steps):
            number = 1  # a median needs an odd number
        self.drawn += 1
        return random.Random(_mixed(self.step, self.drawn)).sample(steps, number)

    def learn(self, index: int, rise: float, *, is_retest: bool = False) -> None:
        """Updates the evidence with the comparison at step `index`.

        A rise is measured in the median of the recent positive rises. Without one, only its sign
        counts.

        Args:
            index: the step.
            rise: the smaller rise of its two batches.
            is_retest: whether a verdict is pending. Then the rise is measured from the lead that
                the run had before the trouble: as good as at the anchor is not yet recovered.
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
        unit = statistics.median([e for e in self.rises if e > 0] or [0.0])
        if unit:
            bet = excess / unit
        else:
            bet = math.inf if excess > 0 else -math.inf
        self.evidence = max(1.0, self.evidence) * (1 + STAKE * max(-1.0, min(1.0, bet)))
        if math.isfinite(rise):
            self.rises = [*self.rises, rise][-RECENT:]
        if self.evidence <= 1:
            self.onset = None

    def rewind(self, target: int) -> None:
        """Drops the evidence, and the sampled steps from step `target` on.

        The run repeats these steps, and adds them again. The counts of steps are lowered with the
        samples, because the probability that a step stays in a sample depends on them.

        Args:
            target: the step at which the run continues.
        """
        self.evidence, self.onset = 1.0, None
        self.leads.clear()
        self.sample = [each for each in self.sample if each.index < target]
        self.trained = max(target - self.step, len(self.sample))
        self.usual = [each for each in self.usual if each.index < target]
        self.usual_seen = max(min(self.usual_seen, target - self.step), len(self.usual))


def _add_to_sample(sample: list[TrainedStep], step: TrainedStep, seen: int, seed: int) -> None:
    """Adds the step number `seen` to a uniform sample (reservoir sampling, algorithm R).

    The place follows from the two numbers. So a restart has nothing to restore but these, and every
    rank samples the same steps.
    """
    if len(sample) < SAMPLE_SIZE:
        sample.append(step)
        return
    place = _mixed(seed, seen) % seen
    if place < SAMPLE_SIZE:
        sample[place] = step


def _mixed(seed: int, number: int) -> int:
    """64 bits that look random, of two whole numbers (the finalizer of SplitMix64)."""
    bits = (seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03) & _64_BITS
    bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) & _64_BITS
    bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) & _64_BITS
    return bits ^ bits >> 31


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
    """The same difference for a batch trained on since the anchor, or None if it is not finite."""
    healthy_rates: dict[str, float]
    """Engine name -> highest learning rate at which the run was healthy, if known."""
    rates: tuple[dict[str, float], ...]
    """Learning rates in force at the comparisons that found the trouble; empty if unknown."""
    losses: str = ""
    """Digest of the losses up to step `found`, see `StepHistory.digest`."""
    recurred: bool = False
    """Whether a repeat had the same losses up to `found`, bit for bit, so that it is found at once:
    the program causes the trouble, and what the repeat has changed had no effect."""

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
    """What a checkpoint holds of the comparisons: the anchors, and the current suspicion.

    A restart in the middle of a suspicion continues it with the evidence so far. Without that, a
    run that is killed often would never collect enough evidence for a rollback.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    anchors: list[Anchor] = field(default_factory=list)
    """At most `MAX_ANCHORS`, oldest first: the weights with the lowest mean loss when they were
    copied, and the weights at the last two checkpoints. The first weights of a process have no
    mean: they stay for two checkpoints, and for as long as they have evidence."""
    ranges: HealthyRanges = field(default_factory=HealthyRanges)
    """Rates and numbers with which the run was healthy, and what is held in these ranges."""
    rates: list[dict[str, float]] = field(default_factory=list)
    """Learning rates in force at the comparisons of the suspicion."""
    bursts: list[tuple[int, int]] = field(default_factory=list)
    """First and last step of the latest bursts of steps with an alarm or a loss above the usual
    losses. The gaps within a burst have at most `STEPS_AFTER_SIGN` steps."""
    first_losses: list[float] = field(default_factory=list)
    """The first `RECENT` finite losses of the run."""
    verdict: Verdict | None = None
    """The pending verdict, until the run rolls back or recovers, or None."""
    repeated: Verdict | None = None
    """The verdict whose rollback has led to the current repeat, or None."""
    silent_until: int = 0
    """Step before which weights are neither compared nor copied."""
    mean_quiet_until: int = 0
    """Step before which a high mean loss is no reason to compare: it was compared."""
    pause: int = FIRST_PAUSE
    """Steps of the next such pause."""
    intended: dict[str, float] = field(default_factory=dict)
    """Name -> value of each number that has turned out to be intended, until it is taken."""
    gives_loss: bool = False
    """See `LossFunction`."""
    credit: float | None = None
    """`Credit.left`, in a record."""
    history: str = ""
    """Text of `StepHistory.to_text`, in a record."""
    numbers: str = ""
    """Text of the ranges of the optimizers' numbers since something was last held, in a record."""

    def needed(self) -> list[int]:
        """Steps of the weights that a restart loads."""
        return [each.step for each in self.anchors]


REGULAR_INTERVAL = 100
"""Steps between two regular comparisons, more if `loss_fn` is dear; and the last losses that a loss
has to exceed to be a sign of trouble."""
MAX_SHARE = 0.01
"""Max share of a healthy run's work that comparisons may cost."""
STEP_COST = 3.0
"""Cost of a training step in evaluations: a forward pass, and a backward pass of twice its cost."""
FORWARD_PASS = 1 / STEP_COST
"""Cost of an evaluation in training steps, unless the user states another one."""
CREDIT_STEPS = 1000
"""A run can save up the evaluations that it earns in this number of steps. It starts with them,
because a learning rate that is too high shows in the first steps."""
MAX_DEBT = 40.0
"""Max debt of evaluations after a suspicion: ten comparisons, half of what a verdict needs."""


class Credit:
    """Credit of evaluations: comparisons may cost `MAX_SHARE` of the work of a healthy run.

    The price of an evaluation is a number of steps that the user may state. It is not measured:
    the same program makes the same comparisons on any machine, under any load.

    Args:
        cost: price of one evaluation of one batch, in training steps.
    """

    def __init__(self, cost: float) -> None:
        self._per_step = MAX_SHARE / cost
        self._most = CREDIT_STEPS * self._per_step
        self._interval = REGULAR_INTERVAL * max(1, round(cost * STEP_COST))
        self.left = self._most

    def refill(self) -> None:
        """Grants the whole credit, as at the start of a run.

        Called when a suspicion ends or is dropped, so that the debts of deciding about it do not
        delay the discovery of the next trouble.
        """
        self.left = self._most

    def after_step(self) -> None:
        """Adds the credit of one step, up to the largest credit.

        The credit is the number of evaluations that cost `MAX_SHARE` of the work of a step, usually
        less than one. Called once for each step that is observed, whether or not weights are
        compared at it.
        """
        self.left = min(self._most, self.left + self._per_step)

    def is_regular(self, index: int) -> bool:
        """Whether step `index` has a regular comparison, which needs no sign of trouble.

        There is one at every `REGULAR_INTERVAL`-th step, or less often if `loss_fn` costs more than
        a forward pass. Regular comparisons find damage that raises no alarm and no loss.

        Args:
            index: number of the step, from 0.
        """
        return index % self._interval == self._interval - 1

    def charge(self, evaluations: int) -> None:
        """Subtracts evaluations. The debt is bounded.

        Args:
            evaluations: number of evaluations of a batch. A suspicion may make debts, because it
                has to be decided; the healthy run then compares less until they are paid.
        """
        self.left = max(-MAX_DEBT, self.left - evaluations)


MAX_ANCHORS = 3
"""Max number of anchors."""
MIN_AGE = 0.5
"""Min age of a compared anchor, as a share of the run so far, up to one checkpoint interval."""


def with_new(anchors: Sequence[Anchor], new: Anchor) -> list[Anchor]:
    """The anchors to keep after another checkpoint, oldest first.

    The anchor with the lowest mean loss stays, and the anchors of the last two checkpoints. Two
    recent anchors are not enough: after slow damage both of them would already have a part of it.

    Args:
        anchors: the anchors so far, oldest first.
        new: the anchor of the current weights.

    Returns:
        At most `MAX_ANCHORS` anchors.
    """
    if len(anchors) < MAX_ANCHORS:
        return [*anchors, new]
    *older, last = anchors
    best = min(older, key=lambda anchor: (anchor.level_or_inf, -anchor.step))
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
    chosen = []
    for anchor in anchors:
        is_suspect = anchor in old and (anchor is old[-1] or anchor.evidence > 1)
        if anchor is best or is_suspect:
            chosen.append(anchor)
    return chosen


def best_on_average(anchors: Sequence[Anchor], mean: float, index: int) -> Anchor | None:
    """The anchor with the lowest mean loss, if the mean loss is more than its spread above it.

    Args:
        anchors: all anchors, oldest first.
        mean: mean of the last training losses.
        index: the newest step. An anchor of a few steps ago has no sample yet, and is not returned.
    """
    best = min(anchors, key=lambda anchor: anchor.level_or_inf, default=None)
    if best is None or index - best.step < SAMPLE_SIZE:
        return None
    if mean > best.level_or_inf + best.spread:
        return best
    return None


def newest_better(anchors: Sequence[Anchor], anchor: Anchor, strong: float) -> Anchor:
    """The newest anchor up to the onset with strong evidence, or `anchor`.

    A rollback to it repeats fewer steps.

    Args:
        anchors: all anchors, oldest first.
        anchor: the anchor whose evidence is sufficient.
        strong: evidence that an anchor needs in order to take its place.
    """
    onset = anchor.step if anchor.onset is None else anchor.onset
    newest = anchor
    for each in anchors:
        if anchor.step < each.step <= onset and each.evidence >= strong:
            newest = each
    return newest
