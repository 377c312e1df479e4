"""`Verdict`: the finding that earlier weights are better than the current weights."""

from __future__ import annotations

from typing import NamedTuple


class Verdict(NamedTuple):
    """The finding that earlier weights are better than the current weights."""

    roll_back_at: int
    """Index of the newest step when the run rolls back."""
    found_at: int
    """Index of the first step with enough evidence."""
    anchor_step: int
    """Step of the earlier weights, see `Anchor.step`."""
    onset: int
    """Index of the first step of the trouble: its first sign, or the first comparison with
    evidence."""
    evidence: float
    """Lower bound on the mean number of comparisons until a healthy run has this evidence."""
    rise: float | None
    """Loss of the step's batch, current minus earlier weights, or None if it is not finite."""
    rise_remembered: float | None
    """The same difference for a batch trained on since the anchor, or None if it is not finite."""

    @property
    def due(self) -> int:
        """Step at which the run rolls back unless it has recovered.

        The wait begins at the onset, and has as many steps as lie between the anchor and the onset.
        A run that recovers during the wait loses fewer steps than by the rollback. A run that does
        not recover loses about twice as many (rent or buy: Karlin et al. 1988, "Competitive snoopy
        caching"). Thus a learning rate that is raised on purpose gets time to recover.
        """
        return self.onset + (self.onset - self.anchor_step)
