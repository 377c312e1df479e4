"""What every checkpoint holds besides the user's state: random generators and loader positions.

They are an item of their own, per rank, and optional: checkpoints of other programs restore without
it. All values are plain, so that reading runs no code, whichever program wrote the directory.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from healcore.runtime import plain
from healcore.runtime.data import position as positions
from healcore.runtime.driver import Generators
from healcore.runtime.store.errors import StoreError, pickled

ITEM = "healcore"
"""Its name among the saved items."""

_GENERATORS = ("python", "numpy", "framework")
_DATA = "data"
_WATCHED = 3
"""Steps of a process after which all generators are looked at, besides at each save."""


class HostParts(NamedTuple):
    """The content of a saved `HostState`. Random states are None where they are not to be set."""

    python: Any
    numpy: Any
    framework: Any
    data: dict[str, Any]
    """Positions of the loaders."""


class HostState:
    """Saved like any object with `state_dict`; read back by the Healer in parts.

    `position` returns the loaders' positions. `trust` reads the pickles of earlier versions too.

    An exception within a step comes after batches were read for it and random numbers drawn. So
    that the state can still be saved as it was after the step before, `after_step` remembers the
    random states; `before_batches` then makes the next `state_dict` return those.
    """

    per_rank = True
    optional = True

    def __init__(
        self,
        position: Callable[[], dict[str, Any]],
        generators: Generators | None,
        *,
        trust: bool = False,
    ) -> None:
        self._position = position
        self._generators = generators
        self._trust = trust
        self._steps = 0
        self._looked_at: dict[str, str] = {}
        """All random states when they were last compared, as text."""
        self._drawn = {"framework"}
        """Generators that the loop draws from: remembered after each step. To copy the others takes
        100 µs, and most loops never draw from them."""
        self._remembered: dict[str, Any] = {}
        self._earlier: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Generators of Python, NumPy and the framework, and positions of the loaders."""
        if self._earlier is not None:
            return self._earlier
        # Positions first: asking a loader for its own may draw random numbers.
        data = self._position()
        return {**self._compared(), _DATA: data}

    def after_step(self) -> None:
        """Remembers the random states between two steps."""
        self._steps += 1
        if self._steps == 1:
            self._looked_at.clear()  # what was drawn before the loop does not count
        if self._steps <= _WATCHED:
            self._compared()
        self._remembered = self.drawn()

    def drawn(self) -> dict[str, Any]:
        """The present states of the generators that the loop draws from, for `set_generators`."""
        return {name: self._now(name) for name in self._drawn}

    @contextmanager
    def before_batches(self, data: dict[str, Any]) -> Iterator[None]:
        """Within the block `state_dict` returns the state of the last `after_step`.

        Args:
            data: the loaders' positions at that moment.

        Raises:
            StoreError: a random state of that moment is not known.
        """
        states = {name: self._coded(name, state) for name, state in self._remembered.items()}
        for name in set(_GENERATORS) - set(states):
            states[name] = self._coded(name, self._now(name))
            if states[name] != self._looked_at.get(name):
                raise StoreError(
                    f"the random state of {name} after the last step is not known: numbers were "
                    "drawn from it for the first time"
                )
        self._earlier = {**states, _DATA: data}
        try:
            yield
        finally:
            self._earlier = None

    def _compared(self) -> dict[str, str]:
        """All random states now; those that have changed are remembered from now on."""
        now = {name: self._coded(name, self._now(name)) for name in _GENERATORS}
        before, self._looked_at = self._looked_at, now
        changed = {name for name, state in now.items() if before.get(name, state) != state}
        self._drawn = {"framework"} | changed
        return dict(now)

    def _now(self, name: str) -> Any:
        if name == "python":
            return random.getstate()
        if name == "numpy":
            return np.random.get_state()  # noqa: NPY002 (the global one)
        return None if self._generators is None else self._generators.state_dict()

    def _coded(self, name: str, state: Any) -> str:
        return plain.dumps(state, (ITEM, name))

    def read(self, state: Mapping[str, Any] | None) -> HostParts | None:
        """The content of a checkpoint's item, checked; nothing is set. None if it has none.

        Untrusted if it is pickled without `trust`, StoreError if healcore cannot have written it.
        """
        if state is None:
            return None
        try:
            data = state[_DATA]
            if not isinstance(data, Mapping):
                data = self._unpickled(_DATA, data)
            generators = {name: self._generator(state, name) for name in _GENERATORS}
            parts = HostParts(**generators, data=dict(data))
            if not self._trust and any(map(positions.is_pickled, parts.data.values())):
                raise pickled(f"a loader's state in state['{ITEM}']['{_DATA}']", plain.HOW)
            _try_out(parts)
        except StoreError:
            raise
        except Exception as error:  # crafted or damaged: anything at all
            problem = f"{type(error).__name__}: {str(error)[:200]}"
            raise StoreError(f"state['{ITEM}'] is not what healcore writes: {problem}") from error
        return parts

    def put_back(self, parts: HostParts) -> None:
        """Sets the generators; call it after the loaders were moved, which draws from them."""
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

    def _generator(self, state: Mapping[str, Any], name: str) -> Any:
        found = state[name]
        if isinstance(found, str):
            return plain.loads(found, (ITEM, name))
        return self._unpickled(name, found)

    def _unpickled(self, name: str, data: Any) -> Any:
        if not self._trust:
            raise pickled(f"state['{ITEM}']['{name}']", plain.HOW)
        return pickle.loads(data)


def pickled_parts(entry: Mapping[str, Any]) -> Iterator[str]:
    """Names of the pickled parts in a checkpoint, by the item's entry in `state.json`."""
    for key, node in entry.get("tree", {}).get("dict", ()):
        if key in (*_GENERATORS, _DATA) and isinstance(node, dict) and "bytes" in node:
            yield f"state['{ITEM}']['{key}']"
        elif key == _DATA and isinstance(node, dict):
            for number, place in node.get("dict", ()):
                if isinstance(place, dict) and _holds_pickle(dict(place.get("dict", ()))):
                    yield f"the state of loader {number} in state['{ITEM}']['{_DATA}']"


def _holds_pickle(position: Mapping[str, Any]) -> bool:
    state = position.get("state")
    return isinstance(state, dict) or (isinstance(state, str) and '{"pickle":' in state)


def _try_out(parts: HostParts) -> None:
    """Sets unused generators: a state that these refuse would later fail with only some set.

    NumPy checks everything but the position in the Mersenne Twister's numbers, and reads there.
    """
    random.Random().setstate(parts.python)
    numpy = parts.numpy
    inner = numpy.get("state", {}) if isinstance(numpy, dict) else {"pos": numpy[2]}
    if not 0 <= int(inner.get("pos", 0)) <= 624:
        raise ValueError("NumPy's generator has no such position")
    if not isinstance(numpy, dict):
        np.random.RandomState().set_state(numpy)
