"""`HostState`: random states and loader positions, an optional item of a checkpoint.

Its values are plain, so that reading them runs no code.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from healcore.runtime.store import values
from healcore.runtime.store.checkpoints import StoreError

HOST_ITEM = "healcore"
"""Name of the item in a checkpoint."""


class HostParts(NamedTuple):
    """The content of a saved `HostState`. A random state of None is not restored."""

    python: Any
    numpy: Any
    framework: Any
    at_pass: dict[str, Any]  # random states before the pass over the data
    data: dict[str, Any]  # positions of the loaders


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
        self._after_step: dict[str, Any] | None = None
        self._earlier: dict[str, Any] | None = None
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
        return {n: values.dumps(v, (HOST_ITEM, n)) for n, v in states.items()} | {"data": data}

    def read(self, state: Mapping[str, Any] | None) -> HostParts | None:
        """Decodes a checkpoint's item, or returns None if it is missing. Sets nothing.

        Content that healcore cannot have written may raise any exception.
        """
        if state is None:
            return None
        *generators, _ = HostParts._fields
        states = {name: values.loads(state[name], (HOST_ITEM, name)) for name in generators}
        return HostParts(**states, data=dict(state["data"]))

    def put_back(self, parts: HostParts) -> None:
        """Sets the generators, except those without a state.

        Call it after moving the loaders, because that draws numbers.
        """
        self._after_step = None
        self._at_pass = parts.at_pass or self._at_pass
        set_random_states(parts._asdict())


def random_states() -> dict[str, Any]:
    """The states of the global generators of Python, NumPy and torch."""
    numpy = np.random.get_state()  # noqa: NPY002 -- users do
    return {"python": random.getstate(), "numpy": numpy, "framework": torch_states()}


def set_random_states(states: Mapping[str, Any]) -> None:
    """Sets the global generators, except those whose state is None."""
    if states["python"] is not None:
        random.setstate(states["python"])
    if states["numpy"] is not None:
        np.random.set_state(states["numpy"])  # noqa: NPY002
    set_torch_states(states["framework"] or {})


def torch_states() -> dict[str, Any]:
    """Torch's states, arrays of NumPy: `{"cpu": uint8 (n,), "cuda": [uint8 (m,) of each device]}`.

    Empty in a program without torch. A JAX run may read from a shuffled loader of torch. Reading
    the states is no sync: a CUDA generator's seed and offset are on the host.
    """
    if (torch := sys.modules.get("torch")) is None:
        return {}
    # get_rng_state_all would initialise CUDA in a process that only uses the CPU.
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"cpu": torch.get_rng_state().numpy(), "cuda": [each.numpy() for each in cuda]}


def set_torch_states(states: Mapping[str, Any]) -> None:
    """Sets torch's generators, if the program uses torch, on the devices that it has."""
    if (torch := sys.modules.get("torch")) is None or not states:
        return
    torch.set_rng_state(torch.as_tensor(states["cpu"]))
    for device, state in zip(range(torch.cuda.device_count()), states["cuda"], strict=False):
        torch.cuda.set_rng_state(torch.as_tensor(state), device)


@contextmanager
def isolated() -> Iterator[None]:
    """Restores all generators after the block."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)
