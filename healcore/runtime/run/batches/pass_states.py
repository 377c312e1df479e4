"""`PassStates`: the random states from which a program draws the order of its passes over the data.

After a restart:

    start                     states of the checkpoint are set, and kept in `_of_checkpoint`
    begin of a loader         they are set again, because the rewind of a loader draws numbers
    first batch, first step   `_of_checkpoint` is dropped, and numbers continue from here
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from healcore.runtime.data.loader_registry import LoaderRegistry
from healcore.runtime.run.data_state import DataState, SavedDataState

if TYPE_CHECKING:
    from healcore.runtime.run.run_record import RunRecord


class PassStates:
    """Restores random states, so that a repeated pass over the data has the same order.

    A pass is one reading of a loader, usually an epoch. A loader that shuffles draws its order when
    a pass begins. A restart within the pass needs the states from before this draw for the order,
    and the states of the checkpoint for all later numbers, such as dropout.

    Args:
        data_state: has the states before the current pass, and sets random states.
        loaders: know which epoch begins.
        record: has the number of passes of earlier processes.

    Attributes:
        passes: number of passes that this process has begun.
    """

    def __init__(
        self, *, data_state: DataState, loaders: LoaderRegistry, record: RunRecord
    ) -> None:
        self._data_state = data_state
        self._loaders = loaders
        self._record = record
        self.passes = 0
        self._of_checkpoint: SavedDataState | None = None
        """Random states of the checkpoint until the first batch or step, or None."""

    def resume(self, states: SavedDataState | None) -> None:
        """Keeps the random states of the checkpoint from which this process continues.

        The states are set by `restore`, once the program's loader is known: moving it draws
        numbers.

        Args:
            states: random states of the checkpoint, or None to leave the program's as they are.
        """
        self._of_checkpoint = states

    def repeat_pass(self, states: SavedDataState) -> None:
        """Begins a pass of the loop again, as a restart from a checkpoint would.

        Sets the random states of the checkpoint, and keeps them until the first step. A loader that
        begins draws its order from them, so the repeated pass has the same order.

        Args:
            states: random states of the checkpoint.
        """
        self._data_state.set_random_states(states)
        self._of_checkpoint = states

    def count_pass(self) -> None:
        """Counts a pass that begins, here and in the record for later processes."""
        self.passes += 1
        self._record.passes = max(self._record.passes, self.passes)

    @property
    def repeated_all_passes(self) -> bool:
        """Whether the loop has repeated all passes of earlier processes.

        A loop that begins at an epoch of its own after a restart makes fewer passes. Random states
        from the end of a pass would then be the states of another epoch, so `begin_pass` restores
        them only if this is true or the loop names its epochs.
        """
        has_repeated = self.passes > 0 and self.passes >= self._record.passes
        return has_repeated and self._loaders.at_epochs

    def begin_pass(self, *, ended: bool = False) -> None:
        """Keeps the random states before a pass over the data, or restores them after a restart.

        Args:
            ended: whether the previous pass has ended. The checkpoint may be from after that end:
                then its own random states are restored. Otherwise the states at the start of its
                pass are restored, from which the program draws the same order of the data again.
        """
        data_state, saved = self._data_state, self._of_checkpoint
        if saved is not None:
            loaders = self._loaders
            caught_up = self.repeated_all_passes or loaders.epoch_loop.names_epochs
            if ended and caught_up and loaders.has_begun_last:
                data_state.set_random_states(saved)
                self._of_checkpoint = None
            else:
                data_state.set_random_states(saved._replace(**saved.at_pass))
        data_state.begin_pass()

    def restore(self) -> None:
        """Restores random states after a restart, because rewinding a loader draws from them.

        Called for each loader until the first batch, and when a loop with its own data begins.
        After the first step it does nothing. Without the call, dropout would use other random
        numbers than in a run that was not interrupted.
        """
        if self._of_checkpoint is not None:
            self._data_state.set_random_states(self._of_checkpoint)

    def forget(self) -> None:
        """Forgets the checkpoint's states. Called at each batch and step, which continue to draw.

        A later `restore` would repeat random numbers that the program has used already.
        """
        self._of_checkpoint = None
