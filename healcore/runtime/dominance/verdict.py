"""`Verdict`: the finding that earlier weights are better, and when it is carried out."""

from __future__ import annotations

from typing import NamedTuple


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
    rise: float
    """Loss of the step's batch, current minus earlier weights."""
    rise_remembered: float
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
