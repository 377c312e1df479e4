"""`EpochRange`: the epochs that the user's loop reads of a loader."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class EpochRange:
    """The epochs that the user's loop has asked for.

    A program calls `batches` once for all epochs, or once in each epoch of its own loop. The second
    kind of program also calls `set_epoch` itself, before each of these calls. `requested` is the
    epoch for which the program has called it.
    """

    requested: float = 0
    """The epoch that the user's loop requested last, so that the user has set its number."""
    end: float = 0
    """Reading ends before this epoch. Infinity for no end."""

    @property
    def has_end(self) -> bool:
        """Whether the number of epochs is limited."""
        return self.end < math.inf

    def extend(self, epochs: int | None) -> None:
        """Adds further epochs, or removes the end.

        Args:
            epochs: number of further epochs, >= 1, or None for no end.
        """
        if epochs is None:
            self.end = math.inf
        elif self.has_end:
            self.requested = self.end
            self.end += epochs

    def select(self, epoch: int) -> None:
        """Makes one epoch the only epoch: reading begins and ends with it.

        Called for a loop of the program over its epochs, which asks for the batches of each epoch
        by its number.

        Args:
            epoch: the epoch, for which the user's loop has called `set_epoch` already.
        """
        self.requested = epoch
        self.end = epoch + 1

    def end_before(self, epoch: int) -> None:
        """Makes reading end before an epoch, unless it has no end.

        Without this, a rollback into an earlier epoch would read on into the epoch that the
        program's own loop is about to begin, and its batches would come twice.

        Args:
            epoch: the epoch at which the program's own loop continues.
        """
        if self.has_end:
            self.end = epoch
