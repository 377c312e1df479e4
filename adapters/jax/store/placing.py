"""Host copies of the parts of an array, and an array out of them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

Index = tuple[tuple[int, int], ...]
"""Where a part lies in its array: (start, stop) per axis."""


class Part(NamedTuple):
    """One distinct part of an array on this process."""

    index: Index
    data: Any
    """A jax.Array on one device, or a NumPy array."""


def parts(array: Any) -> Iterator[Part]:
    """The distinct parts that this process has: of replicas one, or a copy would cost several."""
    if not isinstance(array, jax.Array):
        yield Part(_index(tuple(slice(None) for _ in array.shape), array.shape), array)
        return
    seen = set()
    for shard in array.addressable_shards:
        index = _index(shard.index, array.shape)
        if index not in seen:
            seen.add(index)
            yield Part(index, shard.data)


def as_array(
    shape: tuple[int, ...],
    sharding: jax.sharding.Sharding,
    part: Callable[[Index], np.ndarray],
) -> jax.Array:
    """An array from host memory, each device with its part.

    XLA on a CPU uses well-aligned memory as it is, so `part` must return memory that nobody writes
    to as long as the array lives.

    Args:
        shape: global.
        sharding: of the result.
        part: the data of a place, with the right shape and dtype; asked once for each device.
    """
    local = sharding.addressable_devices_indices_map(shape)
    pieces = [
        jax.device_put(part(_index(index, shape)), device)
        for device, index in local.items()
        if index is not None
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def whole(shape: tuple[int, ...], dtype: Any, known: dict[Index, np.ndarray]) -> np.ndarray | None:
    """The whole array from its parts; None if some lie on other processes."""
    result = np.empty(shape, dtype)
    filled = 0
    for index, data in known.items():
        result[tuple(slice(start, stop) for start, stop in index)] = data
        filled += data.size
    return result if filled == result.size else None


def _index(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))
