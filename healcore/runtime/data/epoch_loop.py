"""`EpochLoop`: what the loaders of a run know of the program's own loop over epochs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EPOCH = "epoch"
"""Key next to the positions of loaders: the epoch of the program's loop."""


class EpochLoop:
    """The program's own loop over epochs, and the return to an earlier epoch of it.

    Three kinds of programs train for epochs:

        for batch in healer.batches(loader, epochs=3)       healcore counts the epochs
        for epoch in range(3): ... batches(loader)          the program counts, healcore cannot
                                                            change its number (`crossed`)
        for epoch in healer.epochs(3): ... batches(loader)  healcore yields the numbers, and can
                                                            return to an earlier one

    The third kind is in one of these states:

        `can_return`  `returns_to`  state
        ------------  ------------  ------------------------------------------------------------
        False         None          no loop over `Healer.epochs` runs
        True          None          the body of an epoch runs
        True          a number      a rollback has led before this epoch: its passes have no further
                                    batch, and `Healer.epochs` yields this number next

    Attributes:
        next_epoch: epoch at which the program's own loop continues after a restart. While the code
            after an epoch runs, still that epoch, which has no batch left.
        names_epochs: whether the program's loop passes the number of its epoch.
        can_return: whether a loop over `Healer.epochs` runs, which can return to an earlier epoch.
        returns_to: epoch to which this loop returns because of a rollback, or None. Until then the
            passes of the loaders that were rewound have no further batch.
        crossed: epoch that a loop was in when the last rewind has led it into an earlier epoch, to
            which it does not return, or None.
        changed_in: epoch in which the program has last changed the structure of its model, or -1. A
            loop over `Healer.epochs` returns to later epochs only.
    """

    def __init__(self) -> None:
        self.next_epoch = 0
        self.names_epochs = False
        self.can_return = False
        self.returns_to: int | None = None
        self.crossed: int | None = None
        self.changed_in = -1
        self._returned: Mapping[str, Any] = {}
        """The positions of the last return, as long as its epoch runs; otherwise empty."""
        self._new_in_epoch = 0
        """Number of loaders that were first used since the epoch has begun."""

    def begin_epoch(self, epoch: int) -> None:
        """Begins an epoch of a loop over `Healer.epochs`.

        Args:
            epoch: number of the epoch. After a return it is an earlier one.
        """
        self.next_epoch = epoch
        self.can_return = True
        if epoch != self._returned.get(EPOCH):  # the positions are of that epoch only
            self._returned = {}
        self._new_in_epoch = 0

    def _begin_return(self, position: Mapping[str, Any]) -> None:
        """Makes the loop return to the epoch of a position."""
        self._returned = position
        self.returns_to = int(position[EPOCH])

    def _end_return(self) -> int:
        """Ends a return. Returns the epoch that the loop yields next."""
        assert self.returns_to is not None
        epoch, self.returns_to = self.returns_to, None
        return epoch
