"""Learns the size of a micro-batch that fits into memory.

Each kind of batch (names and numbers of axes of its arrays) has its own limit, in array elements of
a part. So a batch of short sequences is split less than a batch of long sequences. The number of
parts is a power of two, so that a compiled step sees few shapes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from healcore.core.errors import HealcoreError
from healcore.runtime.microbatches.splitting import BatchSize

_MAX_FAILED_GROWTHS = 3
"""Number of failed growths after which a limit does not grow again."""


class CannotShrink(HealcoreError, RuntimeError):
    """A part does not fit into memory and cannot be made smaller."""


@dataclass
class _Limit:
    elements: int
    """Largest number of array elements in one part."""
    changed: int
    """Step of the last change."""
    growths: int = 0
    """Number of growths that were not undone by a shrink."""
    failed: int = 0
    """Number of growths that were undone by a shrink."""


@dataclass
class _Sizes:
    """The saved form of `MicrobatchSizes`."""

    used: int
    limits: dict[str, _Limit]
    """Kind of a batch -> its limit."""


_SIZES = TypeAdapter(_Sizes)


class Resize(NamedTuple):
    """A change of the number of samples in a part."""

    samples: int
    """Samples in the batch."""
    before: int
    """Samples in its largest part before the change."""
    after: int
    """Samples in its largest part after the change."""


class MicrobatchSizes:
    """Decides into how many parts a batch is split, for any framework and trainer.

    Args:
        shrinks: largest number of halvings in the run (`budget.shrinks` of a policy). A halving
            that undoes a growth does not count.
        grow_after: steps without a change until twice the size is tried. Each failed try doubles
            this number, and three failed tries end the growth.
    """

    def __init__(self, *, shrinks: int, grow_after: int) -> None:
        self.shrinks = shrinks
        self.used = 0
        """Number of shrinks so far."""
        self._grow_after = grow_after
        self._limits: dict[str, _Limit] = {}

    @property
    def limited(self) -> bool:
        """Whether any limit exists, so that batches must be measured."""
        return bool(self._limits)

    def parts(self, size: BatchSize, most: int | None = None) -> int:
        """Number of parts of a batch: 1, 2, 4, ..., at most one part per sample.

        Args:
            size: `splitting.measure` of the batch.
            most: largest number of samples in a part, or None for the learnt limit only.
        """
        limit = self._limits.get(size.kind)
        parts = 1
        while parts < size.samples:
            largest = -(-size.samples // parts)
            fits = limit is None or _elements(size, largest) <= limit.elements
            if fits and (most is None or largest <= most):
                break
            parts = min(2 * parts, size.samples)
        return parts

    def shrink(self, size: BatchSize, parts: int, step: int) -> Resize:
        """Halves the size of parts after a part did not fit.

        Args:
            size: size of the batch.
            parts: number of parts of the batch.
            step: optimizer steps done.

        Raises:
            CannotShrink: a part was one sample, or all shrinks are used. Changes nothing.
        """
        largest = -(-size.samples // parts)
        limit = self._limits.get(size.kind, _Limit(0, step))
        if largest == 1:
            raise CannotShrink("a single sample does not fit into memory")
        if not limit.growths and self.used >= self.shrinks:
            raise CannotShrink(
                f"{largest} samples do not fit into memory, and the batch is not halved again: "
                f"the policy permits it {self.shrinks} times ([budget] shrinks = {self.shrinks})"
            )
        self._limits[size.kind] = limit
        if limit.growths:
            limit.growths, limit.failed = limit.growths - 1, limit.failed + 1
        else:
            self.used += 1
        half = -(-size.samples // min(2 * parts, size.samples))
        limit.elements, limit.changed = _elements(size, half), step
        return Resize(size.samples, largest, half)

    def may_grow(self, size: BatchSize, step: int) -> bool:
        """Whether `grow` would double the size of the parts of a batch."""
        limit = self._limits.get(size.kind)
        if limit is None or limit.failed >= _MAX_FAILED_GROWTHS or self.parts(size) == 1:
            return False
        return step - limit.changed >= self._grow_after * 2**limit.failed

    def grow(self, size: BatchSize, step: int) -> Resize | None:
        """Doubles the size if it `may_grow`, else returns None.

        Call it before the first part of a batch.
        """
        if not self.may_grow(size, step):
            return None
        limit, parts = self._limits[size.kind], self.parts(size)
        double = -(-size.samples // (parts // 2))
        limit.elements = max(_elements(size, double), 2 * limit.elements)
        limit.changed, limit.growths = step, limit.growths + 1
        return Resize(size.samples, -(-size.samples // parts), double)

    # -- saving ---------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The limits as JSON-safe values, for `load`."""
        return asdict(_Sizes(self.used, self._limits))

    def load(self, data: Mapping[str, Any]) -> None:
        """Restores the result of `to_dict`; ValueError for an invalid value."""
        saved = _SIZES.validate_json(json.dumps(data), strict=True)
        self.used, self._limits = saved.used, saved.limits


def _elements(size: BatchSize, samples: int) -> int:
    """Array elements of a number of samples of the batch, rounded up."""
    return -(-size.elements * samples // size.samples)
