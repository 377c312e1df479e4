"""The states of random generators: of the global ones of Python, NumPy and torch, and of others.

After a restart, and when a batch is read again, the program has to draw the same numbers as before.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

_MT19937_BYTES = 4 * 624 + 4
"""Size of a Mersenne Twister in memory: a key of 624 uint32, and a position, int32."""

RandomStates = dict[str, Any]
"""The states of the global generators: "python", "numpy", and "framework", see `torch_states`.

Each is what the generator's own function returns, and empty for torch in a program without it.
"own" are the states of other generators.
"""
_numpy: tuple[Any, bytes, Any] = None, b"", None
"""NumPy's generator when its state was last read, its memory then, and the state."""


def random_states(generators: Sequence[Any] = ()) -> RandomStates:
    """The states of the global generators of Python, NumPy and torch, and of others.

    Returns:
        The states, for `set_random_states`. They are not copied: change none of them.
    """
    states = {"python": random.getstate(), "numpy": _numpy_state(), "framework": torch_states()}
    return {**states, "own": generator_states(generators)}


def _numpy_state() -> Any:
    """What `np.random.get_state()` returns, read again only after a draw.

    Reading takes 40 µs, and it is done after each step. To compare the memory takes 1 µs.
    """
    global _numpy
    bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined] -- since 1.24
    if type(bits) is not np.random.MT19937:
        return np.random.get_state(legacy=False)  # noqa: NPY002 -- users do
    before, memory, state = _numpy
    now = ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)
    # The second number of a pair of normals is outside of this memory.
    if bits is not before or now != memory or state[3]:
        state = np.random.get_state()  # noqa: NPY002 -- users do
        _numpy = bits, now, state
    return state


def set_random_states(states: Mapping[str, Any], generators: Sequence[Any] = ()) -> None:
    """Sets the global generators of Python, NumPy and torch, and others.

    Args:
        states: result of `random_states`. If they are empty, nothing is set. States of devices that
            the process does not have are ignored.
        generators: the generators of "own".
    """
    if not states:
        return
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
    set_torch_states(states["framework"])
    if generators:
        set_generator_states(generators, states["own"])


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
    """The state of a generator of `random`, NumPy or torch, for `set_generator_state`."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def generator_states(generators: Sequence[Any]) -> list[Any]:
    """The states of several generators."""
    return [generator_state(each) for each in generators]


def set_generator_state(generator: Any, state: Any) -> None:
    """Sets what `generator_state` has returned for a generator of the same kind."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def set_generator_states(generators: Sequence[Any], states: Sequence[Any]) -> None:
    """Sets the states of several generators."""
    for generator, state in zip(generators, states, strict=True):
        set_generator_state(generator, state)


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
