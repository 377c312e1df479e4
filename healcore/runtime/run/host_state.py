"""`HostState`: random states and loader positions, an optional item of a checkpoint.

Its values are plain, so that reading them runs no code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from healcore.runtime.data.random_states import random_states, set_random_states
from healcore.runtime.store import values
from healcore.runtime.store.checkpoints import StoreError
from healcore.runtime.store.packed_values import PackedValues

HOST_ITEM = "healcore"
"""Name of the item in a checkpoint."""


class HostParts(NamedTuple):
    """The content of a saved `HostState`. A random state of None is not restored."""

    python: Any
    numpy: Any
    framework: Any
    at_pass: dict[str, Any]  # random states before the pass over the data
    data: dict[str, Any]  # positions of the loaders
    batches: Mapping[int, Any]  # by step, see `Comparisons.batches_to_save`


class HostState:
    """Random states and loader positions, saved like any object with `state_dict`.

    A step can raise after it has read batches and drawn random numbers. To save the state after the
    previous step, `after_step` keeps the random states, and `before_batches` makes `state_dict`
    return them.
    """

    per_rank = True
    optional = True

    def __init__(self, position: Callable[[], dict[str, Any]]) -> None:
        """Takes a function that returns the loaders' positions."""
        self._position = position
        self.pack_batches: Callable[[], PackedValues | None] = lambda: None
        """Returns the batches that comparisons may evaluate, see `Comparisons.batches_to_save`."""
        self._after_step: dict[str, Any] | None = None
        self._earlier: dict[str, Any] | None = None
        self._texts: dict[str, tuple[Any, str]] = {}
        """Name of a random state -> the state that was saved last, and its text."""
        self.begin_pass()

    def state_dict(self) -> dict[str, Any]:
        """Generators of Python, NumPy and torch, and positions of the loaders."""
        if self._earlier is not None:
            return self._earlier
        # Positions first, because a loader may draw random numbers to give its position.
        data = self._position()
        return self._as_text(random_states(), data)

    def begin_pass(self) -> None:
        """Keeps the random states from which the program may draw the order of its next pass."""
        self._at_pass = random_states()

    def after_step(self) -> None:
        """Keeps the random states after a step."""
        self._after_step = random_states()

    @property
    def keeps_states(self) -> bool:
        """Whether the random states after the last step are kept."""
        return self._after_step is not None

    def put_back_after_step(self) -> None:
        """Sets the random states after the last step, from which a loader reads its next batch."""
        assert self._after_step is not None
        set_random_states(self._after_step)

    @contextmanager
    def before_batches(self, data: dict[str, Any]) -> Iterator[None]:
        """Within the block `state_dict` returns the state of the last `after_step`.

        `data` are the loaders' positions after that step. Raises StoreError if no step was taken.
        """
        if self._after_step is None:
            raise StoreError("no step was taken since the start or the last rollback")
        self._earlier = self._as_text(self._after_step, data)
        try:
            yield
        finally:
            self._earlier = None

    def _as_text(self, states: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
        states = {**states, "at_pass": self._at_pass}
        texts = {name: self._text_of(name, state) for name, state in states.items()}
        batches = self.pack_batches()
        return {**texts, "data": data, "batches": None if batches is None else batches.state()}

    def _text_of(self, name: str, state: Any) -> str:
        """The text of a random state. `random_states` returns the same object until a draw."""
        last = self._texts.get(name)
        if last is None or last[0] is not state:
            last = state, values.dumps(state, (HOST_ITEM, name))
            self._texts[name] = last
        return last[1]

    def read(self, state: Mapping[str, Any] | None) -> HostParts | None:
        """Decodes a checkpoint's item, or returns None if it is missing. Sets nothing.

        Content that healcore cannot have written may raise any exception.
        """
        if state is None:
            return None
        *generators, _, _ = HostParts._fields
        states = {name: values.loads(state[name], (HOST_ITEM, name)) for name in generators}
        packed = state["batches"]
        batches = {} if packed is None else PackedValues.read(packed, (HOST_ITEM, "batches"))
        return HostParts(**states, data=dict(state["data"]), batches=batches)

    def put_back(self, parts: HostParts) -> None:
        """Sets the generators, except those without a state.

        Call it after moving the loaders, because that draws numbers.
        """
        self._after_step = None
        self._at_pass = parts.at_pass or self._at_pass
        set_random_states(parts._asdict())
