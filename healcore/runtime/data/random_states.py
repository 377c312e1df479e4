"""The states of random generators: of the global ones of Python, NumPy and torch, and of others.

After a restart, and when a batch is read again, the program has to draw the same numbers as before.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

_MT19937_BYTES = 4 * 624 + 4
"""Size of a Mersenne Twister: a key of 624 uint32, and a position, int32."""


def _view_at(address: int) -> Any:
    """The memory of a Mersenne Twister. Its `raw` is a copy, which takes less than 0.1 µs."""
    return (ctypes.c_char * _MT19937_BYTES).from_address(address)


RandomStates = dict[str, Any]
"""The states of the global generators: "python", "numpy", and "framework", see `torch_states`.

Each is what the generator's own function returns, and None or empty for no state.
"""


def random_states() -> RandomStates:
    """The states of the global generators of Python, NumPy and torch.

    Takes a few microseconds if no number was drawn since the last call, because it is called after
    each step.

    Returns:
        The states, for `set_random_states`. They are not copied: change none of them.
    """
    return {"python": _python.read(), "numpy": _numpy.read(), "framework": torch_states()}


class _PythonState:
    """The state of Python's global generator, read again only after a draw.

    `random.getstate` makes a tuple of 625 numbers in 16 µs, and it is called after each step.
    Comparing the memory of the generator takes 1 µs. Only CPython has the generator's numbers right
    after the head of the object; elsewhere the state is read at each call.
    """

    def __init__(self) -> None:
        self._getstate: Any = random.getstate
        self._generator: Any = getattr(random.getstate, "__self__", None)
        self._view = _view_at(id(self._generator) + object.__basicsize__)
        self._memory: bytes | None = None
        self._state: Any = None
        self._has_known_layout = self._finds_numbers()

    def read(self) -> Any:
        """What `random.getstate()` returns."""
        if not self._has_known_layout or random.getstate is not self._getstate:
            return random.getstate()
        memory = self._view.raw
        if memory != self._memory or self._generator.gauss_next != self._state[2]:
            self._state = random.getstate()
            self._memory = memory
        return self._state

    def _finds_numbers(self) -> bool:
        """Whether the memory has the numbers of the state."""
        if sys.implementation.name != "cpython" or not isinstance(self._generator, random.Random):
            return False
        if type(self._generator).__basicsize__ < object.__basicsize__ + _MT19937_BYTES:
            return False
        _, (*key, position), _ = random.getstate()
        expected = np.array([position, *key], np.uint32).tobytes()
        return self._view.raw == expected


_python = _PythonState()


class _NumpyState:
    """The state of NumPy's global generator, read again only after a draw.

    `np.random.get_state` takes 0.08 ms, and it is called after each step. Comparing the memory of
    the generator takes a hundredth of it.
    """

    def __init__(self) -> None:
        self._bits: Any = None
        """The bit generator that `_view` belongs to. A program may replace NumPy's."""
        self._view: Any = None
        self._memory = b""
        self._state: Any = None

    def read(self) -> Any:
        """What `np.random.get_state()` returns."""
        bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined] -- since 1.24
        if type(bits) is not np.random.MT19937:
            return np.random.get_state(legacy=False)  # noqa: NPY002 -- users do
        if bits is not self._bits:
            self._bits, self._view = bits, _view_at(bits.ctypes.state_address)
        memory = self._view.raw
        if memory != self._memory or self._has_spare_normal():
            self._state = np.random.get_state()  # noqa: NPY002 -- users do
            self._memory = memory
        return self._state

    def _has_spare_normal(self) -> bool:
        """Whether the second number of a pair of normals was left over.

        This number is outside of the compared memory, so a program may have taken it unnoticed.
        """
        return bool(self._state[3])


_numpy = _NumpyState()


def set_random_states(states: Mapping[str, Any]) -> None:
    """Sets the global generators of Python, NumPy and torch.

    Args:
        states: result of `random_states`. A generator whose state is None or empty stays as it is.
            States of devices that the process does not have are ignored.
    """
    if states["python"] is not None:
        random.setstate(states["python"])
    if states["numpy"] is not None:
        np.random.set_state(states["numpy"])  # noqa: NPY002
    set_torch_states(states["framework"] or {})


def torch_states() -> dict[str, Any]:
    """Torch's states, arrays of NumPy: `{"cpu": uint8 (n,), "cuda": [uint8 (m,) of each device]}`.

    Empty in a program without torch. A JAX run may read from a shuffled loader of torch. Reading
    the states does not wait for a device: a CUDA generator's seed and offset are on the host.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    cuda: list[Any] = []
    if torch.cuda.is_initialized():  # a process that only uses the CPU must not initialise CUDA
        cuda = [each.numpy() for each in torch.cuda.get_rng_state_all()]
    return {"cpu": torch.get_rng_state().numpy(), "cuda": cuda}


def set_torch_states(states: Mapping[str, Any]) -> None:
    """Sets torch's random generators, if the program uses torch, on the devices that it has.

    A run that continues on fewer devices ignores the states of the missing devices.

    Args:
        states: result of `torch_states`. If it is empty, nothing is set.
    """
    torch = sys.modules.get("torch")
    if torch is None or not states:
        return
    torch.set_rng_state(torch.as_tensor(states["cpu"]))
    for device, state in zip(range(torch.cuda.device_count()), states["cuda"], strict=False):
        torch.cuda.set_rng_state(torch.as_tensor(state), device)


def generator_state(generator: Any) -> Any:
    """The state of a generator of the program, which is not changed by the call.

    Args:
        generator: a generator of `random`, NumPy or torch.

    Returns:
        A state for `set_generator_state`, in this or in a later process.
    """
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def set_generator_state(generator: Any, state: Any) -> None:
    """Sets what `generator_state` has returned for a generator of the same kind."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


@contextmanager
def isolated() -> Iterator[None]:
    """Restores all generators after the block.

    healcore evaluates losses and makes dry runs in such a block. Otherwise a run with healcore
    would draw other numbers for dropout and shuffling than a run without healcore.
    """
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)
