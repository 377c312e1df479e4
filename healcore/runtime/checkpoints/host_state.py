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

from healcore.runtime.store import values
from healcore.runtime.store.errors import StoreError

ITEM = "healcore"
"""Name of the item in a checkpoint."""

_GENERATORS = ("python", "numpy", "framework")
_DATA = "data"


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
        generators: Any,
    ) -> None:
        """Takes a function that returns the loaders' positions, and the framework's generators."""
        self._position = position
        self._generators = generators
        self._after_step: dict[str, Any] | None = None
        self._earlier: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Generators of Python, NumPy and the framework, and positions of the loaders."""
        if self._earlier is not None:
            return self._earlier
        # Positions first, because a loader may draw random numbers to give its position.
        data = self._position()
        return _as_text(self._current()) | {_DATA: data}

    def after_step(self) -> None:
        """Keeps the random states after a step."""
        self._after_step = self._current()

    @contextmanager
    def before_batches(self, data: dict[str, Any]) -> Iterator[None]:
        """Within the block `state_dict` returns the state of the last `after_step`.

        Args:
            data: the loaders' positions after that step.

        Raises:
            StoreError: no step was taken.
        """
        if self._after_step is None:
            raise StoreError("no step was taken since the start or the last rollback")
        self._earlier = _as_text(self._after_step) | {_DATA: data}
        try:
            yield
        finally:
            self._earlier = None

    def _current(self) -> dict[str, Any]:
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(),  # noqa: NPY002 (the global generator)
            "framework": None if self._generators is None else self._generators.state_dict(),
        }

    def read(self, state: Mapping[str, Any] | None) -> HostParts | None:
        """Decodes and checks a checkpoint's item; None without an item. Sets nothing.

        Raises StoreError if healcore cannot have written the content.
        """
        if state is None:
            return None
        try:
            generators = {name: values.loads(state[name], (ITEM, name)) for name in _GENERATORS}
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
        """Sets the generators, except those without a state.

        Call it after moving the loaders, because that draws numbers.
        """
        self._after_step = None
        if parts.python is not None:
            random.setstate(parts.python)
        if parts.numpy is not None:
            np.random.set_state(parts.numpy)  # noqa: NPY002
        if parts.framework is not None and self._generators is not None:
            self._generators.load_state_dict(parts.framework)


def _as_text(states: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values.dumps(state, (ITEM, name)) for name, state in states.items()}


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
