"""Random generators of the program in a state: saved by value, and restored in place.

The loop, a sampler and an augmentation may hold the same generator, so a restore sets the state of
the live object. The global generators are not in the state of a program: `DataState` saves them.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch


class GeneratorState(NamedTuple):
    """The state of a generator, for generators of the same kind."""

    kind: str
    """See `kind_of`."""
    state: Any
    """See `random_states.generator_state`."""


def kind_of(value: Any) -> str:
    """The kind of a generator, with the name of its algorithm or the type of its device.

    Args:
        value: any value.

    Returns:
        For example "torch cpu" or "Generator PCG64". A state fits every generator of the same kind.
        Empty for another value, also for a subclass, which may have a state of its own.
    """
    if type(value) is torch.Generator:
        return f"torch {value.device.type}"
    if type(value) in (np.random.Generator, np.random.RandomState):
        return f"{type(value).__name__} {type(value._bit_generator).__name__}"
    if type(value) is random.Random:
        return "python"
    return ""
