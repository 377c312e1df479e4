"""The item that a Healer adds to every checkpoint: random states and loader positions.

The item is per rank and optional: checkpoints of other programs restore without it. All values are
plain, so that reading them runs no code.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from healcore.runtime import json_codec
from healcore.runtime.driver import Generators
from healcore.runtime.store.errors import StoreError

ITEM = "healcore"
"""Name of the item in a checkpoint."""

_GENERATORS = ("python", "numpy", "framework")
_DATA = "data"
_WATCHED = 3
"""Number of first steps after which all generators are compared. Later only saves compare them."""


class HostParts(NamedTuple):
    """The content of a saved `HostState`. A random state of None is not restored."""

    python: Any
    numpy: Any
    framework: Any
    data: dict[str, Any]
    """Positions of the loaders."""


class HostState:
    """Random states and loader positions, saved like any object with `state_dict`.

    A step can raise after it has read batches and drawn random numbers. To save the state after the
    previous step, `after_step` keeps the random states, and `before_batches` makes `state_dict`
    return them.
    """

    per_rank = True
    optional = True

    def __init__(
        self,
        position: Callable[[], dict[str, Any]],
        generators: Generators | None,
    ) -> None:
        """Takes a function that returns the loaders' positions, and the framework's generators."""
        self._position = position
        self._generators = generators
        self._steps = 0
        self._last_compared: dict[str, str] = {}
        """All random states at the last comparison, as text."""
        self._drawn = {"framework"}
        """Generators that the loop draws from, which are copied after each step. A copy of the
        others takes 100 µs, and most loops never draw from them."""
        self._after_step: dict[str, Any] = {}
        self._earlier: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Generators of Python, NumPy and the framework, and positions of the loaders."""
        if self._earlier is not None:
            return self._earlier
        # Positions first, because a loader may draw random numbers to give its position.
        data = self._position()
        return {**self._compared(), _DATA: data}

    def after_step(self) -> None:
        """Keeps the random states after a step."""
        self._steps += 1
        if self._steps == 1:
            self._last_compared.clear()  # numbers drawn before the loop do not count
        if self._steps <= _WATCHED:
            self._compared()
        self._after_step = self.drawn()

    def drawn(self) -> dict[str, Any]:
        """Current states of the generators that the loop draws from, for `set_generators`."""
        return {name: self._current(name) for name in self._drawn}

    @contextmanager
    def before_batches(self, data: dict[str, Any]) -> Iterator[None]:
        """Within the block `state_dict` returns the state of the last `after_step`.

        Args:
            data: the loaders' positions after that step.

        Raises:
            StoreError: a random state after that step is not known.
        """
        states = {name: self._to_text(name, state) for name, state in self._after_step.items()}
        for name in set(_GENERATORS) - set(states):
            states[name] = self._to_text(name, self._current(name))
            if states[name] != self._last_compared.get(name):
                raise StoreError(
                    f"the random state of {name} after the last step is not known: this step drew "
                    "from it for the first time"
                )
        self._earlier = {**states, _DATA: data}
        try:
            yield
        finally:
            self._earlier = None

    def _compared(self) -> dict[str, str]:
        """All current random states as text; updates the generators that the loop draws from."""
        now = {name: self._to_text(name, self._current(name)) for name in _GENERATORS}
        before, self._last_compared = self._last_compared, now
        changed = {name for name, state in now.items() if before.get(name, state) != state}
        self._drawn = {"framework"} | changed
        return dict(now)

    def _current(self, name: str) -> Any:
        if name == "python":
            return random.getstate()
        if name == "numpy":
            return np.random.get_state()  # noqa: NPY002 (the global generator)
        return None if self._generators is None else self._generators.state_dict()

    def _to_text(self, name: str, state: Any) -> str:
        return json_codec.dumps(state, (ITEM, name))

    def read(self, state: Mapping[str, Any] | None) -> HostParts | None:
        """Decodes and checks a checkpoint's item; None without an item. Sets nothing.

        Raises StoreError if healcore cannot have written the content.
        """
        if state is None:
            return None
        try:
            generators = {name: json_codec.loads(state[name], (ITEM, name)) for name in _GENERATORS}
            parts = HostParts(**generators, data=dict(state[_DATA]))
            _check_generators(parts)
        except StoreError:
            raise
        except Exception as error:  # crafted or damaged values may raise anything
            problem = f"{type(error).__name__}: {str(error)[:200]}"
            raise StoreError(
                f"state['{ITEM}'] is damaged, or healcore did not write it: {problem}"
            ) from error
        return parts

    def put_back(self, parts: HostParts) -> None:
        """Sets the generators. Call it after moving the loaders, because that draws numbers."""
        self._steps = 0
        self.set_generators({name: getattr(parts, name) for name in _GENERATORS})

    def set_generators(self, states: Mapping[str, Any]) -> None:
        """Sets generators by name, except where the state is None."""
        for name, state in states.items():
            if state is None:
                continue
            if name == "python":
                random.setstate(state)
            elif name == "numpy":
                np.random.set_state(state)  # noqa: NPY002
            elif self._generators is not None:
                self._generators.load_state_dict(state)


def _check_generators(parts: HostParts) -> None:
    """Sets temporary generators, so that an invalid state fails before any generator is set.

    NumPy does not check the position in the Mersenne Twister's array, which could be out of range.
    """
    random.Random().setstate(parts.python)
    numpy = parts.numpy
    inner = numpy.get("state", {}) if isinstance(numpy, dict) else {"pos": numpy[2]}
    if not 0 <= int(inner.get("pos", 0)) <= 624:
        raise ValueError("the position of NumPy's generator is out of range")
    if not isinstance(numpy, dict):
        np.random.RandomState().set_state(numpy)
