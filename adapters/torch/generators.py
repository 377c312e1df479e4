"""Random generators of the program in a state: saved by value, and restored in place.

The loop, a sampler and an augmentation may hold the same generator, so a restore sets the state of
the live object. The global generators are not in the state of a program: `DataState` saves them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from healcore.runtime.data.random_states import generator_state, set_generator_state
from healcore.runtime.store import values
from healcore.runtime.store.checkpoints import StoreError

_BIT_GENERATORS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        np.random.PCG64,
        np.random.PCG64DXSM,
        np.random.MT19937,
        np.random.Philox,
        np.random.SFC64,
    )
}
"""Name in a file -> bit generator of NumPy."""
_PATH: values.Path = ("generator",)
"""Place of a state, for the errors of a damaged file."""


def kind_of(value: Any) -> str:
    """The kind of a generator, with the name of its algorithm or the type of its device.

    Args:
        value: any value.

    Returns:
        For example "torch cpu" or "numpy PCG64". A state fits every generator of the same kind.
        Empty for another value, also for a subclass, which may have a state of its own.
    """
    if type(value) is torch.Generator:
        return f"torch {value.device.type}"
    if type(value) is np.random.Generator:
        name = type(value.bit_generator).__name__
        if name in _BIT_GENERATORS:
            return f"numpy {name}"
    if type(value) is np.random.RandomState and _has_twister(value):
        return "numpy RandomState"
    if type(value) is random.Random:
        return "python"
    return ""


def node_of(value: Any) -> dict[str, Any] | None:
    """Encodes a generator.

    Args:
        value: any value.

    Returns:
        A JSON object that `value_of` decodes, or None for another value.
    """
    kind = kind_of(value)
    if not kind:
        return None
    content = {"generator": kind, "state": values.dumps(generator_state(value), _PATH)}
    if type(value) is torch.Generator:
        content["place"] = str(value.device)
    return content


def value_of(content: Mapping[str, Any]) -> Any:
    """Decodes a generator.

    Args:
        content: a JSON object of `node_of`. Names in it are looked up in tables.

    Returns:
        A new generator with the saved state.

    Raises:
        StoreError: this machine lacks the device of the generator.
        Exception: any, for content that `node_of` has not made.
    """
    framework, _, name = content["generator"].partition(" ")
    generator: Any
    if framework == "torch":
        try:
            generator = torch.Generator(torch.device(content["place"]))
        except RuntimeError as error:
            raise StoreError(
                f"the checkpoint holds a torch.Generator on {content['place']}, which this program "
                f"cannot create: {error}"
            ) from error
    elif name == "RandomState":
        generator = np.random.RandomState()
    elif framework == "numpy":
        generator = np.random.Generator(_BIT_GENERATORS[name]())
    else:
        generator = random.Random()
    set_generator_state(generator, values.loads(content["state"], _PATH))
    return generator


def copy_state(live: Any, saved: Any) -> bool:
    """Gives a live generator the state of another, if both are generators of the same kind.

    Args:
        live: any value.
        saved: any value, such as the result of `value_of`.

    Returns:
        Whether `live` has the state of `saved` now. False for other values.
    """
    kind = kind_of(live)
    if not kind or kind != kind_of(saved):
        return False
    set_generator_state(live, generator_state(saved))
    return True


def _has_twister(state: np.random.RandomState) -> bool:
    """Whether a RandomState has the algorithm that NumPy gives it."""
    return state.get_state(legacy=False)["bit_generator"] == "MT19937"
