"""The global random generators of Python, NumPy and torch."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np


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
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 -- users do
    torch = torch_states()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        set_torch_states(torch)
