"""`BatchParts`: the size of the parts in which steps and comparisons use a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from healcore.runtime.faults.microbatches import (
    Count,
    UnsplittableBatch,
    count_samples,
    part_weights,
    split,
)
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
        to_split: makes of a batch of the `loss_fn` what is split and counted. Both are the same
            except in a trainer whose batches have another order of rows.
        to_evaluate_from: makes of a part of the result of `to_split` a batch of the `loss_fn`.
        largest_evaluated: samples at most in a part that the `loss_fn` evaluates, or None for no
            limit besides that of the steps.
    """

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self.count: Count = None
        self.obstacle = ""
        self.to_split: Callable[[Any], Any] = lambda batch: batch
        self.to_evaluate_from: Callable[[Any], Any] = lambda part: part
        self.largest_evaluated: int | None = None

    def number(self, batch: Any) -> int:
        """The number of parts in which a step trains on a batch."""
        return self._number(batch, self._record.part_limit)

    def gains_from(self, batch: Any, limit: int) -> bool:
        """Whether a batch has fewer parts if they may have `limit` samples."""
        return self._number(batch, limit) < self.number(batch)

    def to_evaluate(self, batch: Any) -> WeightedParts:
        """The parts in which the `loss_fn` evaluates a batch, without parts of weight 0."""
        form = self.to_split(batch)
        parts = self._number(form, self._evaluation_limit)
        if parts == 1:
            return [(batch, 1.0)]
        pieces = split(form, parts)
        weights = part_weights(pieces, self.count)
        # A part without tokens has a mean loss of NaN, and so is 0 times NaN.
        pairs = [pair for pair in zip(pieces, weights, strict=True) if pair[1]]
        return [(self.to_evaluate_from(piece), weight) for piece, weight in pairs]

    def size_to_evaluate(self, batch: Any) -> int:
        """Samples of the largest part of `to_evaluate`, or 1 if it cannot be split."""
        form = self.to_split(batch)
        try:
            samples = 1 if self.obstacle else count_samples(form)
        except UnsplittableBatch:
            return 1
        return -(-samples // self._number(form, self._evaluation_limit))

    @property
    def _evaluation_limit(self) -> int | None:
        limits = self._record.part_limit, self.largest_evaluated
        return min((each for each in limits if each is not None), default=None)

    def _number(self, batch: Any, limit: int | None) -> int:
        if limit is None or self.obstacle:
            return 1
        try:
            samples = count_samples(batch)
        except UnsplittableBatch:
            return 1  # the whole batch may fit
        parts = 1
        while -(-samples // parts) > limit:
            parts = min(2 * parts, samples)
        return parts
