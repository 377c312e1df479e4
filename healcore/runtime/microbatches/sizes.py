"""Learns the size of a micro-batch that fits into memory.

The number of parts is a power of two, so that a compiled step sees few shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healcore.core.errors import HealcoreError


class CannotShrink(HealcoreError, RuntimeError):
    """A part does not fit into memory and cannot be made smaller."""


class MicrobatchSizes:
    """Decides into how many parts a batch is split. Parts are halved, and never grow again.

    Args:
        shrinks: largest number of halvings in the run (`budget.shrinks` of a policy).

    Attributes:
        used: number of halvings so far.
        limit: largest number of samples in a part, or None while all batches have fitted.
    """

    def __init__(self, *, shrinks: int) -> None:
        self.shrinks = shrinks
        self.used = 0
        self.limit: int | None = None

    def parts(self, samples: int, most: int | None = None) -> int:
        """Number of parts of a batch of `samples`: 1, 2, 4, ..., at most one part per sample.

        `most` is a further limit on the samples in a part, or None.
        """
        limit = min(each for each in (self.limit, most, samples) if each is not None)
        parts = 1
        while parts < samples and -(-samples // parts) > limit:
            parts = min(2 * parts, samples)
        return parts

    def shrink(self, samples: int, parts: int) -> int:
        """Halves the size of parts after one of `parts` parts of a batch did not fit.

        Returns:
            The largest number of samples in a part from now on.

        Raises:
            CannotShrink: a part was one sample, or all shrinks are used. Changes nothing.
        """
        largest = -(-samples // parts)
        if largest == 1:
            raise CannotShrink("a single sample does not fit into memory")
        if self.used >= self.shrinks:
            raise CannotShrink(
                f"{largest} samples do not fit into memory, and the batch is not halved again: "
                f"the policy permits it {self.shrinks} times ([budget] shrinks = {self.shrinks})"
            )
        self.used += 1
        self.limit = -(-samples // min(2 * parts, samples))
        return self.limit

    def to_dict(self) -> dict[str, Any]:
        """The limit as JSON-safe values, for `load`."""
        return {"used": self.used, "limit": self.limit}

    def load(self, data: Mapping[str, Any]) -> None:
        """Restores the result of `to_dict`; ValueError for an invalid value."""
        used, limit = data.get("used"), data.get("limit")
        if type(used) is not int or type(limit) is not int or used < 0 or limit < 1:
            raise ValueError(f"used and limit are whole numbers, not {dict(data)!r:.100}")
        self.used, self.limit = used, limit
