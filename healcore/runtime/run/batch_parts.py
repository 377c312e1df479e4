"""`BatchParts`: the parts in which steps and comparisons use a batch; `PartSize`: their size."""

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

    The parts of a batch are halved, and grow again as `PartSize` says. Their number is a power of
    two, so that a compiled step sees few shapes. A comparison evaluates the parts that a step
    trains on: a whole batch would run out of memory again.

    Attributes:
        count: what the loss of the newest batch averages over, see `Healer.microbatches`.
        obstacle: why the batches cannot be split, or an empty string.
        to_split: makes of a batch of the `loss_fn` what is split and counted, for a trainer whose
            batches have another order of rows.
        to_evaluate_from: makes of a part of it a batch of the `loss_fn`.
    """

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self.count: Count = None
        self.obstacle = ""
        self.to_split: Callable[[Any], Any] = lambda batch: batch
        self.to_evaluate_from: Callable[[Any], Any] = lambda part: part

    def of_step(self, batch: Any, count: Count) -> WeightedParts:
        """The parts in which a step trains on a batch, without parts of weight 0.

        A part without tokens has a mean loss of NaN, and so is 0 times NaN.

        Args:
            batch: a batch of the loop. A batch that cannot be split has one part.
            count: see `Healer.microbatches`.
        """
        return _weighted(batch, self.number(batch), count)

    def number(self, batch: Any) -> int:
        """The number of parts in which a step trains on a batch.

        It is 1 while memory suffices, and otherwise the smallest power of two, or one part a
        sample, with which no part exceeds the size that fits.

        Args:
            batch: as for `of_step`.
        """
        limit = self._record.part_size.limit
        samples, parts = self._samples(batch), 1
        while limit is not None and largest_part(samples, parts) > limit:
            parts = min(2 * parts, samples)
        return parts

    def to_evaluate(self, batch: Any, least: int) -> WeightedParts:
        """The parts in which the `loss_fn` evaluates a batch.

        Args:
            batch: a batch of the `loss_fn`.
            least: min number of parts, unless the batch has fewer samples.

        Returns:
            The parts and their weights, which sum to 1; without parts of weight 0.
        """
        form = self.to_split(batch)
        parts = self._number_to_evaluate(form, least)
        if parts == 1:
            return [(batch, 1.0)]
        weighted = _weighted(form, parts, self.count)
        return [(self.to_evaluate_from(piece), weight) for piece, weight in weighted]

    def divisible_parts(self, batch: Any, least: int) -> int:
        """The number of parts of `to_evaluate`, or 0 if they cannot be halved.

        Args:
            batch: a batch of the `loss_fn`.
            least: see `to_evaluate`.
        """
        form = self.to_split(batch)
        parts = self._number_to_evaluate(form, least)
        return parts if parts < self._samples(form) else 0

    def _number_to_evaluate(self, form: Any, least: int) -> int:
        return max(self.number(form), min(least, self._samples(form)))

    def _samples(self, batch: Any) -> int:
        """Number of samples of a batch, or 1 if it cannot be split: the whole batch may fit."""
        try:
            return 1 if self.obstacle else count_samples(batch)
        except UnsplittableBatch:
            return 1


def _weighted(batch: Any, parts: int, count: Count) -> WeightedParts:
    pieces = split(batch, parts)
    pairs = zip(pieces, part_weights(pieces, count), strict=True)
    return [(piece, weight) for piece, weight in pairs if weight]


def largest_part(samples: int, parts: int) -> int:
    """Samples of the largest part of a batch that is split evenly: the quotient, rounded up."""
    return -(-samples // parts)


GOOD_STEPS = 100
"""Steps after a change of the size until parts twice as large are tried."""
_Size = Annotated[int, Field(ge=1)]


@dataclass
class PartSize:
    """Largest number of samples of a part. It is halved when memory runs out.

    Memory may run out in one step of thousands, because of one long sequence or of another program
    on the device. Parts that stay small after such a step cost time until the end of the run. So
    after `GOOD_STEPS` steps, parts twice as large are tried, once: a size that was tried and that
    has not fitted is not tried again.

    Its values are a part of the run's record and depend on the number of the step, never on the
    clock. A comparison of weights follows the same rule.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    limit: _Size | None = None
    """Samples of a part, or None while all batches have fitted."""
    since: NonNegativeInt = 0
    """Step at which the size has last changed."""
    is_tried: bool = False
    """Whether the size is the result of a try."""
    too_large: _Size | None = None
    """Smallest size that was tried and has not fitted."""
    smallest: _Size | None = None
    """Smallest size of the run. A return to a larger one costs no budget."""

    def larger(self, step: int) -> int | None:
        """The size to try at a step, or None if none is due."""
        if self.limit is None or step < self.since + GOOD_STEPS:
            return None
        size = 2 * self.limit
        if self.too_large is not None and size >= self.too_large:
            return None
        return size

    def grow(self, step: int, size: int) -> None:
        """Tries a larger size from a step on."""
        self.limit, self.since, self.is_tried = size, step, True

    def shrink(self, step: int, before: int, after: int) -> None:
        """Takes a smaller size, because a part has not fitted.

        Args:
            step: step at which memory ran out.
            before: samples of the part.
            after: samples of a part from now on.
        """
        if self.is_tried:
            self.too_large = before
        self.limit, self.since, self.is_tried = after, step, False
        self.smallest = min(after, self.smallest or after)

    def is_new(self, size: int) -> bool:
        """Whether a size is smaller than all sizes of the run so far."""
        return self.smallest is None or size < self.smallest
