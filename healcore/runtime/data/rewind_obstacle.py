"""`RewindObstacle`: why the data continues forward after a rollback."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RewindObstacle:
    """Why a loader, or the loop over the epochs, cannot be rewound.

    `str(obstacle)` is the whole text, for notices and for the event about the data. Where a
    sentence names the reason of lost steps, the reason alone is enough.
    """

    reason: str
    """The reason, as a clause."""
    detail: str = ""
    """What to write instead, or the error of the loader; or an empty string."""

    def __str__(self) -> str:
        if not self.detail:
            return self.reason
        return f"{self.reason}: {self.detail}"
