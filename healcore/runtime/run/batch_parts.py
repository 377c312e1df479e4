"""`BatchParts`: the size of the parts in which steps and comparisons use a batch.

`PartGrowth`: when larger parts are tried again after memory ran out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import ConfigDict, Field, NonNegativeInt

from healcore.runtime.faults.microbatches import (
    Count,
    UnsplittableBatch,
    count_samples,
    part_weights,
    split,
)

if TYPE_CHECKING:
    from healcore.runtime.run.run_record import RunRecord

WeightedParts: TypeAlias = list[tuple[Any, float]]
"""The parts of a batch, and the share of each in a mean loss of the batch."""


class BatchParts:
    """How the batches of a run are split since memory ran out.

    The parts of a batch are halved, and grow again as `PartGrowth` says. Their number is a power of
    two, so that a compiled step sees few shapes. A comparison evaluates the parts that a step
    trains on: a whole batch would run out of memory again.

    Attributes:
        count: what the loss of the newest batch averages over, see `Healer.microbatches`.
        obstacle: why the batches cannot be split, or an empty string.
    """

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self.count: Count = None
        self.obstacle = ""
        self._to_split: Callable[[Any], Any] = lambda batch: batch
        self._to_evaluate_from: Callable[[Any], Any] = lambda part: part

    def split_as(
        self, to_split: Callable[[Any], Any], to_evaluate_from: Callable[[Any], Any]
    ) -> None:
        """Splits batches in another form, for a trainer whose batches have another order of rows.

        Args:
            to_split: makes of a batch of the `loss_fn` what is split and counted.
            to_evaluate_from: makes of a part of the result of `to_split` a batch of the `loss_fn`.
        """
        self._to_split = to_split
        self._to_evaluate_from = to_evaluate_from

    def number(self, batch: Any) -> int:
        """The number of parts in which a step trains on a batch.

        The number is a power of two, and 1 while memory suffices.

        Args:
            batch: a batch of the loop. A batch that cannot be split has one part.

        Returns:
            The number of parts, >= 1.
        """
        return self._number(batch, self._record.part_limit)

    def gains_from(self, batch: Any, limit: int) -> bool:
        """Whether a batch would have fewer parts if a part could have `limit` samples.

        A trial of larger parts teaches nothing with a small batch, which fits into one part
        already. `OutOfMemory` postpones the trial if no rank's batch gains from it.

        Args:
            batch: the first batch of the step that may try larger parts.
            limit: largest number of samples in a part during the trial.
        """
        return self._number(batch, limit) < self.number(batch)

    def to_evaluate(self, batch: Any) -> WeightedParts:
        """The parts in which the `loss_fn` evaluates a batch.

        Args:
            batch: a batch of the `loss_fn`.

        Returns:
            The parts and their weights, which sum to 1; without parts of weight 0.
        """
        form = self._to_split(batch)
        parts = self._number(form, self._evaluation_limit)
        if parts == 1:
            return [(batch, 1.0)]
        pieces = split(form, parts)
        weights = part_weights(pieces, self.count)
        # A part without tokens has a mean loss of NaN, and so is 0 times NaN.
        weighted = []
        for piece, weight in zip(pieces, weights, strict=True):
            if weight:
                weighted.append((self._to_evaluate_from(piece), weight))
        return weighted

    def evaluation_gains_from(self, batch: Any, limit: int) -> bool:
        """Whether the `loss_fn` would evaluate a batch in fewer parts of up to `limit` samples.

        Args:
            batch: a batch of the `loss_fn`.
            limit: largest number of samples in a part during a trial of larger parts.
        """
        form = self._to_split(batch)
        larger = self._number(form, self._limit_with(limit))
        return larger < self._number(form, self._evaluation_limit)

    def size_to_evaluate(self, batch: Any) -> int:
        """Number of samples in the largest part of `to_evaluate`.

        When memory runs out while weights are compared, the largest such part of all batches is the
        size that is halved.

        Args:
            batch: a batch as the `loss_fn` receives it.

        Returns:
            The number of samples, or 1 if the batch cannot be split: then nothing can be halved.
        """
        if self.obstacle:
            return 1
        form = self._to_split(batch)
        try:
            samples = count_samples(form)
        except UnsplittableBatch:
            return 1
        return largest_part(samples, self._number(form, self._evaluation_limit))

    @property
    def _evaluation_limit(self) -> int | None:
        """Largest number of samples in a part that the `loss_fn` evaluates, or None without one."""
        return self._limit_with(self._record.evaluation_limit)

    def _limit_with(self, of_evaluations: int | None) -> int | None:
        """The smaller of the limit of the steps and a limit of evaluations, or None without one."""
        of_steps = self._record.part_limit
        if of_steps is None:
            return of_evaluations
        if of_evaluations is None:
            return of_steps
        return min(of_steps, of_evaluations)

    def _number(self, batch: Any, limit: int | None) -> int:
        """The smallest power of two, or one part a sample, with which no part exceeds a limit."""
        if limit is None or self.obstacle:
            return 1
        try:
            samples = count_samples(batch)
        except UnsplittableBatch:
            return 1  # the whole batch may fit
        parts = 1
        while largest_part(samples, parts) > limit:
            parts = min(2 * parts, samples)
        return parts


def largest_part(samples: int, parts: int) -> int:
    """Samples of the largest part of a batch that is split evenly: the quotient, rounded up."""
    return -(-samples // parts)


FIRST_WAIT = 100
"""Steps after memory ran out until larger parts are tried again."""
_Size = Annotated[int, Field(ge=1)]


@dataclass
class PartGrowth:
    """When larger parts are tried, and what happens if they do not fit.

    The parts of steps and the parts of comparisons each have a `PartGrowth`. The text describes
    steps. A comparison that does not fit is evaluated again, and costs no step.

    Memory may run out in one step of thousands, because of one long sequence or of another program
    on the device. Parts that stay small after such a step cost time until the end of the run. So
    `wait` steps after memory ran out, a step begins with parts of twice the size. If they fit, the
    run keeps this size, and tries twice that after as many steps. If they do not, the step is
    repeated with the size that fits. If the larger size has lasted for fewer steps than the wait
    before it, the next wait is twice as long, so that a size that never fits costs few repeats.

    Every value depends on the number of the step, never on the clock. The values are part of the
    run's record, so a restart tries the same sizes in the same steps as a run that was not killed.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    since: NonNegativeInt = 0
    """Step at which the size has last changed or was last tried."""
    wait: NonNegativeInt = FIRST_WAIT
    """Steps from `since` to the next try of larger parts."""
    smaller: _Size | None = None
    """Size before the last try, which fits; or None if memory ran out since the last try."""
    trying: bool = False
    """Whether `since` is the first step with larger parts, whose end is not known yet."""
    smallest: _Size | None = None
    """Smallest size of the run, or None if memory never ran out."""

    def is_due(self, step: int) -> bool:
        """Whether larger parts may be tried at a step.

        They may if `wait` steps have passed since the size last changed or was last tried, unless
        a trial is still running.

        Args:
            step: number of the step that is about to begin.
        """
        return not self.trying and step - self.since >= self.wait

    def postpone(self, step: int) -> None:
        """Postpones a try from which nothing can be learnt at this step.

        Larger parts then become due `wait` steps later. The batch of the step may be too small to
        have fewer parts, or the step could not be repeated if the larger parts do not fit.

        Args:
            step: number of the step at which the try was due.
        """
        self.since = step

    def begin_larger(self, step: int, size: int) -> int:
        """Begins to try parts of twice the size.

        The current size is kept in `smaller`, to which `go_back` returns if the larger parts do not
        fit.

        Args:
            step: number of the step that tries the larger parts.
            size: samples in a part so far.

        Returns:
            The size to try, in samples.
        """
        self.since = step
        self.smaller = size
        self.trying = True
        return 2 * size

    def accept_larger(self, step: int) -> bool:
        """Keeps the larger size if the step that tried it has fitted.

        Args:
            step: the step that begins.

        Returns:
            Whether the size is accepted by this call, once for each try.
        """
        if not self.trying or step == self.since:
            return False
        self.trying = False
        return True

    def go_back(self, step: int) -> int:
        """Returns to the size before the last try, because a larger part has not fitted.

        Args:
            step: the step at which memory ran out. If the larger size has lasted for less than the
                wait, the next wait is twice as long.

        Returns:
            The size, in samples.
        """
        assert self.smaller is not None
        has_lasted = step - self.since >= self.wait
        if has_lasted:
            self.wait = FIRST_WAIT
        else:
            self.wait *= 2
        size = self.smaller
        self.since = step
        self.smaller = None
        self.trying = False
        return size

    def shrink(self, step: int, size: int) -> None:
        """Notes that memory ran out, and that the run continues with smaller parts.

        The wait for the next trial begins again with `FIRST_WAIT` steps. The size before is
        forgotten, because it does not fit any more.

        Args:
            step: number of the step at which memory ran out.
            size: samples in a part from now on.
        """
        self.since = step
        self.wait = FIRST_WAIT
        self.smaller = None
        self.trying = False
        if self.smallest is None or size < self.smallest:
            self.smallest = size

    def is_new(self, size: int) -> bool:
        """Whether a size is smaller than all sizes of the run so far.

        Only such a size counts in the policy's budget of halvings. A return to a size that the run
        has had before costs one repeated step, and must not use up the budget.

        Args:
            size: samples in a part.
        """
        return self.smallest is None or size < self.smallest

    def on_rollback(self, step: int) -> None:
        """Counts the wait from the step to which the run was rolled back.

        Without this, `since` would lie in the future of the repeated steps, and the next trial
        would be late by the number of undone steps.

        Args:
            step: the step at which the run continues.
        """
        self.since = min(self.since, step)
