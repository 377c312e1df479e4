"""`DataState`: where the program is in its data and its random numbers, an item of a checkpoint.

Its values are plain, so that reading them runs no code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from healcore.runtime.data.random_states import random_states, set_random_states
from healcore.runtime.store import values
from healcore.runtime.store.checkpoints import StoreError

DATA_STATE_ITEM = "healcore"
"""Name of the item in a checkpoint. A checkpoint without the item can be restored too."""


class SavedDataState(NamedTuple):
    """The content of a saved `DataState`.

    The names of the fields are the names in the saved item. A random state of None is not restored:
    the program's own state stays.
    """

    python: Any
    """State of Python's module `random`."""
    numpy: Any
    """State of NumPy's global generator."""
    framework: Any
    """States of the generators of torch on all devices; empty in a program without torch."""
    at_pass: dict[str, Any]
    """Random states before the pass over the data, by the names above."""
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
        states: dict[str, Any] = {}
        for name in ("python", "numpy", "framework", "at_pass"):
            states[name] = values.loads(item[name], (DATA_STATE_ITEM, name))
        return cls(**states, data=dict(item["data"]))


class DataState:
    """Random states and loader positions, saved like any object with `state_dict`.

    A step can raise after it has read batches and drawn random numbers. To save the state after the
    previous step, `after_step` keeps the random states, and `before_batches` makes `state_dict`
    return them:

        after_step()          batches are read, numbers are drawn       exception
        ---- kept --------------------------------------------------    with before_batches(...):
                                                                            state_dict(): the kept
    """

    per_rank = True
    """Each rank saves its own part."""
    optional = True
    """A checkpoint without this item can be restored."""

    def __init__(self, position: Callable[[], dict[str, Any]]) -> None:
        """Keeps the random states of this moment as the states before the first pass.

        Args:
            position: returns the positions of the loaders, which may draw random numbers.
        """
        self._position = position
        self._after_step: dict[str, Any] | None = None
        """Random states after the last step, or None if no step was taken."""
        self._earlier: dict[str, Any] | None = None
        """What `state_dict` returns within `before_batches`, or None outside."""
        self._texts: dict[str, tuple[Any, str]] = {}
        """Name of a random state -> the state that was saved last, and its text."""
        self.begin_pass()

    def state_dict(self) -> dict[str, Any]:
        """Returns the random states of Python, NumPy and torch, and the positions of the loaders.

        Returns:
            Name of a field of `SavedDataState` -> its value; random states as text.
        """
        if self._earlier is not None:
            return self._earlier
        # Positions first, because a loader may draw random numbers to give its position.
        data = self._position()
        return self._as_text(random_states(), data)

    def begin_pass(self) -> None:
        """Keeps the random states from which the program may draw the order of its next pass.

        Called before each pass over the data. A restart within the pass sets them, so that the
        program draws the same order again and the position within the pass is right.
        """
        self._at_pass = random_states()

    def after_step(self) -> None:
        """Keeps the random states after a step, for a save at a later exception.

        Called after each step of a run that can resume exactly. It is cheap, because a state that
        has not changed is not read again.
        """
        self._after_step = random_states()

    @property
    def keeps_states(self) -> bool:
        """Whether the random states after the last step are kept."""
        return self._after_step is not None

    def put_back_after_step(self) -> None:
        """Sets the random states after the last step, from which a loader reads its next batch.

        Called before the loader reads the next batch again, after a failed read. The failed read
        may have drawn numbers, and the order or the augmentation would differ. States are kept, see
        `keeps_states`.
        """
        assert self._after_step is not None
        set_random_states(self._after_step)

    @contextmanager
    def before_batches(self, data: dict[str, Any]) -> Iterator[None]:
        """Within the block `state_dict` returns the state of the last `after_step`.

        Args:
            data: positions of the loaders after that step.

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
        """The content of a checkpoint's item, from random states and positions of the loaders."""
        states = {**states, "at_pass": self._at_pass}
        content: dict[str, Any] = {}
        for name, state in states.items():
            content[name] = self._text_of(name, state)
        content["data"] = data
        return content

    def _text_of(self, name: str, state: Any) -> str:
        """The text of a random state. `random_states` returns the same object until a draw."""
        last = self._texts.get(name)
        if last is None or last[0] is not state:
            last = state, values.dumps(state, (DATA_STATE_ITEM, name))
            self._texts[name] = last
        return last[1]

    def set_random_states(self, parts: SavedDataState) -> None:
        """Sets the random states that are not None.

        Called after the loaders are moved, because a move draws numbers.

        Args:
            parts: the content of a checkpoint's item.
        """
        self._after_step = None
        self._at_pass = parts.at_pass or self._at_pass
        set_random_states(parts._asdict())
