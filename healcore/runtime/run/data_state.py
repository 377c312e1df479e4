"""`DataState`: where the program is in its data and its random numbers, an item of a checkpoint.

Its values are plain, so that reading them runs no code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from healcore.runtime.data.random_states import RandomStates, random_states, set_random_states
from healcore.runtime.data.sources import Sources
from healcore.runtime.store import values
from healcore.runtime.store.checkpoints import StoreError

DATA_STATE_ITEM = "healcore"
"""Name of the item in a checkpoint. A checkpoint without the item can be restored too."""
_STATES = "random", "at_pass"
"""Names of the random states in the item."""


class SavedDataState(NamedTuple):
    """The content of a saved `DataState`.

    Random states that are empty are not restored: the program's own states stay.
    """

    random: RandomStates
    """Random states of Python, NumPy and torch."""
    at_pass: RandomStates
    """Random states before the pass over the data."""
    data: dict[str, Any]
    """Positions of the loaders."""

    @classmethod
    def read(cls, item: Mapping[str, Any] | None) -> SavedDataState | None:
        """Decodes a checkpoint's item. Sets nothing.

        Args:
            item: what `DataState.state_dict` has returned, or None if the checkpoint has no such
                item.

        Returns:
            The decoded content, or None without an item.

        Raises:
            Exception: of any type, for content that healcore cannot have written.
        """
        if item is None:
            return None
        random, at_pass = (values.loads(item[name], (DATA_STATE_ITEM, name)) for name in _STATES)
        return cls(random, at_pass, dict(item["data"]))


class DataState:
    """Random states and positions of the sources, saved like any object with `state_dict`.

    A step can raise after it has read batches and drawn random numbers. To save the state after the
    previous step, `after_step` keeps the random states, and `before_batches` makes `state_dict`
    return them:

        after_step()          batches are read, numbers are drawn       exception
        ---- kept --------------------------------------------------    with before_batches(...):
                                                                            state_dict(): the kept

    A loader that shuffles draws its order when a pass over the data begins. A restart within the
    pass needs the states from before this draw for the order (`begin_pass`), and the states of the
    checkpoint for all later numbers, such as dropout:

        start                     states of the checkpoint are kept (`resume`)
        begin of a loader         they are set, because the seek of a loader draws numbers
        first batch, first step   they are dropped, and numbers continue from here

    Args:
        sources: the sources of the run, whose positions may draw random numbers.

    Attributes:
        is_restored: whether the random states of `resume` were set for the loop that runs.
        of_checkpoint: the content of the checkpoint until the first batch or step, which continue
            to draw numbers, or None.
    """

    per_rank = True
    """Each rank saves its own part."""
    optional = True
    """A checkpoint without this item can be restored."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._after_step: dict[str, Any] | None = None
        """Random states after the last step, or None if no step was taken."""
        self._earlier: dict[str, Any] | None = None
        """What `state_dict` returns within `before_batches`, or None outside."""
        self.of_checkpoint: SavedDataState | None = None
        self._at_pass = random_states()
        """Random states from before the newest pass."""
        self.is_restored = False

    # -- saves ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the random states of Python, NumPy and torch, and the positions of the sources.

        Returns:
            Name of a field of `SavedDataState` -> its value; random states as text.
        """
        if self._earlier is not None:
            return self._earlier
        # Positions first, because a loader may draw random numbers to give its position.
        data = self._sources.position()
        return self._as_text(random_states(), data)

    def after_step(self) -> None:
        """Keeps the random states after a step, for a save at a later exception.

        Called after each step of a run that can resume exactly. It is cheap, because a state that
        has not changed is not read again.
        """
        self._after_step = random_states()

    @contextmanager
    def before_batches(self, data: dict[str, Any]) -> Iterator[None]:
        """Within the block `state_dict` returns the state of the last `after_step`.

        Args:
            data: positions of the sources after that step.

        Raises:
            StoreError: no step was taken since the start or the last rollback.
        """
        if self._after_step is None:
            raise StoreError("no step was taken since the start or the last rollback")
        self._earlier = self._as_text(self._after_step, data)
        try:
            yield
        finally:
            self._earlier = None

    def _as_text(self, states: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
        """The content of a checkpoint's item, from random states and positions of the sources."""
        both = zip(_STATES, (states, self._at_pass), strict=True)
        texts = {name: values.dumps(each, (DATA_STATE_ITEM, name)) for name, each in both}
        return {**texts, "data": data}

    # -- restores -------------------------------------------------------------------------------

    def set_random_states(self, parts: SavedDataState) -> None:
        """Sets the random states that are not None.

        Called after the loaders are moved, because a move draws numbers.

        Args:
            parts: the content of a checkpoint's item.
        """
        self._after_step = None
        self._at_pass = parts.at_pass or self._at_pass
        set_random_states(parts.random)

    def resume(self, states: SavedDataState | None) -> None:
        """Keeps the random states of the checkpoint from which the loop continues.

        Args:
            states: the content of the checkpoint, or None to leave the program's states as they
                are.
        """
        self.of_checkpoint = states

    def restore(self) -> None:
        """Sets the random states of `resume`, because the seek of a loader has drawn from them.

        Called for each loader until the first batch, and when a loop with its own data begins.
        Without the call, dropout would use other random numbers than in a run that was not
        interrupted.
        """
        self.is_restored = True
        if self.of_checkpoint is not None:
            self.set_random_states(self.of_checkpoint)

    def begin_pass(self, *, ended: bool = False) -> None:
        """Keeps the random states before a pass over the data, or restores them after a restart.

        Args:
            ended: whether the previous pass has ended. The checkpoint may be from after that end:
                then its own random states are restored. Otherwise the states at the start of its
                pass are restored, from which the program draws the same order of the data again.
        """
        saved = self.of_checkpoint
        if saved is not None:
            if ended and self._sources.passes and self._sources.is_caught_up:
                self.set_random_states(saved)
                self.of_checkpoint = None
            else:
                self.set_random_states(saved._replace(random=saved.at_pass))
        self._at_pass = random_states()
