"""What a checkpoint holds of the comparisons, so that a restart continues a suspicion."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from healcore.runtime.healthy_range import HealthyRange


@dataclass
class SavedCopy:
    """An `Anchor` without weights and sample: the weights are those of the checkpoint of `step`."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    step: int
    learning_rate: float | None
    evidence: float
    onset: int | None
    level: float | None
    """Mean loss, or None if unknown."""
    spread: float
    numbers: dict[str, HealthyRange] = field(default_factory=dict)
    rises: list[float] = field(default_factory=list)


@dataclass
class SavedVerdict:
    """A pending verdict."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    found: int
    anchor: int
    onset: int
    evidence: float
    rates: list[float]


@dataclass
class SavedComparisons:
    """The state of `Dominance`."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    copies: list[SavedCopy]
    healthy_rate: float
    rates: list[float]
    alarms: tuple[int, int]
    """First and last step of the latest alarms."""
    verdict: SavedVerdict | None
    numbers: dict[str, HealthyRange] = field(default_factory=dict)
    """Values of the optimizers' numbers in the steps of the suspicion."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe values."""
        return asdict(self)

    def needed(self) -> list[int]:
        """Steps of the copies to load: those with evidence, and the one with the lowest mean."""
        known = [each for each in self.copies if each.level is not None]
        best = min(known, key=lambda each: each.level or 0.0, default=None)
        return [e.step for e in self.copies if e.evidence > 1 or e is best] or [
            each.step for each in self.copies[:1]
        ]


_SAVED = TypeAdapter(SavedComparisons)


def read(data: Any) -> SavedComparisons:
    """Inverse of `to_dict`. Raises ValueError for malformed data."""
    return _SAVED.validate_json(json.dumps(data), strict=True)
