"""`ComparisonState`: what a checkpoint holds of the comparisons, so that a restart continues."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic import ConfigDict

from healcore.runtime.dominance.anchor import Anchor
from healcore.runtime.healthy_range import HealthyRange


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
    """The same difference for a batch trained on since the anchor."""
    healthy_rate: float
    """Highest learning rate at which the run was healthy, or 0 if unknown."""
    rates: tuple[float, ...]
    """Learning rates in force at the comparisons that found the trouble; empty if unknown."""

    @property
    def due(self) -> int:
        """Step at which the run rolls back unless it has recovered.

        The run waits as many steps as the rollback repeats, those from the anchor to the onset. A
        run that recovers earlier loses fewer steps than by the rollback. A run that does not
        recover loses about twice as many (rent or buy: Karlin et al. 1988, "Competitive snoopy
        caching"). Thus a learning rate that is raised on purpose gets time to recover.
        """
        return self.onset + (self.onset - self.anchor)


@dataclass
class ComparisonState:
    """The anchors, and the current suspicion."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    anchors: list[Anchor] = field(default_factory=list)
    """At most `MAX_ANCHORS`, oldest first: the weights with the lowest mean loss when they were
    copied, and those at the last two checkpoints. The first weights of a process have no mean: they
    stay for two checkpoints, and for as long as they have evidence."""
    healthy_rate: float = 0.0
    """Highest learning rate at which the run was healthy, or 0 if unknown."""
    rates: list[float] = field(default_factory=list)
    """Learning rates in force at the comparisons of the suspicion."""
    alarms: tuple[int, int] = (-1, -1)
    """First and last step of the latest alarms, with gaps of at most `SAMPLE` steps."""
    verdict: Verdict | None = None
    """The pending verdict, until the run rolls back or recovers, or None."""
    numbers: dict[str, HealthyRange] = field(default_factory=dict)
    """Values of the optimizers' numbers since the suspicion began, or in repeated steps."""

    def needed(self) -> list[int]:
        """Steps of the weights that a restart loads: with evidence, or with the lowest mean."""
        known = [each for each in self.anchors if each.level is not None]
        best = min(known, key=lambda each: each.mean, default=None)
        return [each.step for each in self.anchors if each.evidence > 1 or each is best] or [
            each.step for each in self.anchors[:1]
        ]
