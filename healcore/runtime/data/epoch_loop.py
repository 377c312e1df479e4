"""`EpochLoop`: the program's own loop over epochs, and its return to an earlier epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healcore.runtime.data.positions import EPOCH
from healcore.runtime.data.rewind_obstacle import RewindObstacle
from healcore.runtime.data.run_loader import RunLoader

MODEL_CHANGED = RewindObstacle(
    "the program would change the structure of its model again at the beginning of that epoch"
)
"""Reason of a rollback after which a loop over `Healer.epochs` does not return."""


class EpochLoop:
    """The program's own loop over epochs, and what decides about its return to an earlier epoch.

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

    A rollback cannot jump out of the loop body of the program. So a return has two ends:

        body of epoch 3
          │  a rollback to a checkpoint of epoch 1: the loaders are rewound, `begin_return`
          │  the passes over loaders end, and the rest of the body runs (an evaluation, say)
        end of the body: `end_return`, and `Healer.epochs` yields 1
          │
        body of epoch 1: `begin`
          │  each loader that the loop begins takes over its position in `returned`, as after a
          │  restart from the checkpoint
        body of epoch 2: `begin`, which forgets `returned`

    Attributes:
        next_epoch: epoch at which the program's own loop continues after a restart. While the code
            after the batches of an epoch runs, this is still the same epoch, with no batch left.
        names_epochs: whether the program's loop passes the number of its epoch.
        can_return: whether a loop over `Healer.epochs` runs, which can return to an earlier epoch.
        returns_to: epoch to which this loop returns because of a rollback, or None. Until then the
            passes of the loaders that were rewound have no further batch.
        returned: the positions of the last return while its epoch runs, otherwise empty.
        crossed: epoch that a loop was in when the last rewind has led it into an earlier epoch, to
            which it does not return, or None.
        total_epochs: number of the epoch at which a loop over `Healer.epochs` ends.
        changed_in: epoch in which the program has last changed the structure of its model, or None
            without a change. A loop over `Healer.epochs` returns to later epochs only.
    """

    def __init__(self) -> None:
        self.next_epoch = 0
        self.names_epochs = False
        self.can_return = False
        self.returns_to: int | None = None
        self.returned: Mapping[str, Any] = {}
        self.crossed: int | None = None
        self.total_epochs = 0
        self.changed_in: int | None = None

    def begin(self, epoch: int) -> None:
        """Begins an epoch of a loop over `Healer.epochs`.

        Args:
            epoch: number of the epoch. After a return it is an earlier one.
        """
        self.next_epoch = epoch
        self.can_return = True
        if epoch != self.returned.get(EPOCH):  # the positions are of that epoch only
            self.returned = {}

    @property
    def has_more_epochs(self) -> bool:
        """Whether another epoch follows the current epoch of a loop over `Healer.epochs`.

        The end of a loader is the end of a pass then, and not of the run. False if the number of
        epochs is unknown, as in the program's own `for epoch in range(n)`: any end of a loader may
        be the end of the run.
        """
        return self.can_return and self.next_epoch + 1 < self.total_epochs

    def known_epoch(self, named: int | None) -> int | None:
        """The epoch that the program's loop is in, as far as healcore knows it.

        Args:
            named: the epoch that the program has passed, or None.

        Returns:
            The epoch that the program names, or the epoch that `Healer.epochs` has yielded. None if
            healcore knows neither.
        """
        if named is not None:
            return named
        if self.can_return:
            return self.next_epoch
        return None

    # -- returns --------------------------------------------------------------------------------

    def returns_with(self, position: Mapping[str, Any], trained: RunLoader) -> bool:
        """Whether a loop over `Healer.epochs` has to return after a rewind to this position.

            the position is in              does the loop return?
            ------------------------------  ------------------------------------------------------
            an earlier epoch                yes
            an earlier pass of the epoch    yes: the pass has a loader of its own
            an earlier batch of the pass    yes if the loader has a length. Without a return the
                                            program would count more batches than the loader has,
                                            and many programs divide by this length, or index with
                                            the count. A stream without a length just continues.

        Args:
            position: the positions of the checkpoint.
            trained: the loader of the last step.
        """
        if not self.can_return:
            return False
        if position.get(EPOCH, self.next_epoch) < self.next_epoch:
            return True
        is_earlier_pass = self.names_epochs and str(trained.number) not in position
        return is_earlier_pass or trained.length is not None

    def return_obstacle(self, position: Mapping[str, Any]) -> RewindObstacle | None:
        """Why the loop must not return to the epoch of a position, or None."""
        if self.changed_in is not None and position[EPOCH] <= self.changed_in:
            return MODEL_CHANGED
        return None

    def begin_return(self, position: Mapping[str, Any]) -> None:
        """Makes the loop return to the epoch of a position, whose loaders were rewound to it."""
        self.returned = position
        self.returns_to = int(position[EPOCH])

    def end_return(self) -> int:
        """Ends a return after the body of the current epoch.

        Returns:
            The epoch that the loop yields next.
        """
        assert self.returns_to is not None
        epoch, self.returns_to = self.returns_to, None
        return epoch
