"""The size of a micro-batch that fits into memory, learnt from those that did not.

One limit for each kind of batch (names and numbers of axes of its arrays), in array elements of a
part: a batch of short sequences is split less than one of long sequences. A batch is split into a
power of two of parts, so that a compiled step sees few shapes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from healcore.core.errors import HealcoreError
from healcore.runtime.microbatches.splitting import BatchSize

_MOST_FAILED = 3
"""Growths that were undone, after which a limit stays."""


class CannotShrink(HealcoreError, RuntimeError):
    """A part did not fit into memory, and there is no smaller one; the message says why."""


@dataclass
class _Limit:
    elements: int
    """The most array elements of one part."""
    changed: int
    """Step of the last change."""
    growths: int = 0
    """Growths that no shrink has undone."""
    failed: int = 0
    """Growths that a shrink has undone."""


@dataclass
class _Sizes:
    """What `MicrobatchSizes` saves."""

    used: int
    limits: dict[str, _Limit]
    """Kind of a batch -> its limit."""


_SIZES = TypeAdapter(_Sizes)


class Resize(NamedTuple):
    """A change of the number of samples in a part."""

    samples: int
    """Of the batch."""
    before: int
    """Samples in its largest part until now."""
    after: int


class MicrobatchSizes:
    """Into how many parts a batch is split; plain numbers, for any framework and trainer.

    Args:
        shrinks: halvings in the whole run (`budget.shrinks` of a policy). One that undoes a growth
            does not count.
        grow_after: steps without a change until twice the size is tried; doubled by each try
            that failed, and never again after three.
    """

    def __init__(self, *, shrinks: int, grow_after: int) -> None:
        self.shrinks = shrinks
        self.used = 0
        """Shrinks so far."""
        self._grow_after = grow_after
        self._limits: dict[str, _Limit] = {}

    @property
    def limited(self) -> bool:
        """Whether any batch has to be measured; False until something did not fit."""
        return bool(self._limits)

    def parts(self, size: BatchSize, most: int | None = None) -> int:
        """Into how many parts a batch is split: 1, 2, 4, ..., at most one for each sample.

        Args:
            size: `splitting.measure` of the batch.
            most: samples in a part, at most; None: only what has been learnt counts.
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
        """Halves the size, after one of that many parts did not fit; then do the window again.

        Args:
            size: of the batch whose part did not fit.
            parts: into how many it was split.
            step: optimizer steps done.

        Raises:
            CannotShrink: a part was one sample, or all shrinks are used. Nothing has changed then.
        """
        largest = -(-size.samples // parts)
        limit = self._limits.get(size.kind, _Limit(0, step))
        if largest == 1:
            raise CannotShrink("a single sample does not fit into memory")
        if not limit.growths and self.used >= self.shrinks:
            raise CannotShrink(
                f"{largest} samples do not fit into memory, and the budget of {self.shrinks} "
                "shrinks is used"
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
        """Whether it is time to try twice the size, and this batch is split."""
        limit = self._limits.get(size.kind)
        if limit is None or limit.failed >= _MOST_FAILED or self.parts(size) == 1:
            return False
        return step - limit.changed >= self._grow_after * 2**limit.failed

    def grow(self, size: BatchSize, step: int) -> Resize | None:
        """Doubles the size if it `may_grow`. None: it may not.

        Call it before the first part of a batch, where trouble may be risked.
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
        """As JSON-safe values, for `load`."""
        return asdict(_Sizes(self.used, self._limits))

    def load(self, data: Mapping[str, Any]) -> None:
        """Goes on from `to_dict` of an earlier process; ValueError for anything else."""
        saved = _SIZES.validate_json(json.dumps(data), strict=True)
        self.used, self._limits = saved.used, saved.limits


def _elements(size: BatchSize, samples: int) -> int:
    """Array elements of that many samples of the batch, rounded up."""
    return -(-size.elements * samples // size.samples)
