"""Copies a JAX state to host memory, and describes its structure as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from healcore.runtime.store import structure
from healcore.runtime.store.copies import Copier
from healcore.runtime.store.errors import UnsavableState
from healcore.runtime.store.host_memory import allocate
from healcore.runtime.store.inspection import map_in_threads
from healcore.runtime.store.structure import Flat, Leaf

PINNED = "pinned_host"
"""Name of the memory of the host that an accelerator copies to without waiting."""

Index = tuple[tuple[int, int], ...]
"""Position of a shard in its array: (start, stop) per axis."""


class Placement(NamedTuple):
    """Layout of a leaf: how its shards make an array."""

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding | None
    """Sharding, or None for a NumPy array."""
    numpy: bool
    """Whether it is a NumPy array."""
    committed: bool
    """Whether JAX may not move the array to another device."""

    @property
    def spans(self) -> bool:
        """Whether other processes hold shards of the array."""
        return self.sharding is not None and not self.sharding.is_fully_addressable

    @classmethod
    def of(cls, value: Any) -> Placement:
        """The placement of an array."""
        numpy = isinstance(value, np.ndarray)
        sharding = None if numpy else value.sharding
        return cls(tuple(value.shape), sharding, numpy, numpy or value.committed)


class JaxCopier(Copier):
    """Copies JAX states to host memory. The parts of a leaf are this process's distinct shards.

    Shards on a CPU are copied before `copy` returns, because the next step may reuse donated
    memory. JAX copies shards on a GPU to pinned host memory asynchronously, and handles donation.
    """

    def flatten(self, state: Mapping[str, Any]) -> Flat:
        """Returns a state's structure and arrays. See `Copier.flatten`."""
        encoder = _Encoder()
        entries = {
            name: encoder.encode(name, value)
            for name, value in structure.checked_names(state).items()
        }
        return Flat(entries, encoder.leaves, encoder.treedefs)

    def on_cpu(self, part: Any) -> bool:
        """Whether a shard is in host memory. Empty shards count as such."""
        on_device = isinstance(part, jax.Array) and part.size
        return not on_device or next(iter(part.devices())).platform == "cpu"

    def copy_parts(
        self, parts: Sequence[Any], old: Sequence[Any]
    ) -> tuple[list[Any], Callable[[], None]]:
        """Copies shards. See `Copier.copy_parts`."""
        copies = [
            None
            if self.on_cpu(part)
            else jax.device_put(part, part.sharding.with_memory_kind(PINNED))
            for part in parts
        ]
        pinned = [copy for copy in copies if copy is not None]
        here = [index for index, copy in enumerate(copies) if copy is None]
        sources = [np.asarray(parts[index]) for index in here]
        old = [part for part in old if isinstance(part, np.ndarray)]
        if [(each.shape, each.dtype) for each in old] != [(s.shape, s.dtype) for s in sources]:
            old = [self.view(allocate(source.nbytes), source) for source in sources]
        pairs = list(zip(old, sources, strict=True))
        map_in_threads(lambda pair: np.copyto(*pair), pairs, sum(part.nbytes for part in old))
        for index, copy in zip(here, old, strict=True):
            copies[index] = copy
        return copies, lambda: jax.block_until_ready(pinned) and None

    def raw(self, part: Any) -> np.ndarray:
        """The bytes of a shard in host memory."""
        return np.ascontiguousarray(part).reshape(-1).view(np.uint8)

    def view(self, raw: np.ndarray, part: Any) -> np.ndarray:
        """Bytes as an array with the dtype and shape of a shard."""
        return raw.view(part.dtype).reshape(part.shape)

    def array(self, leaf: Leaf, live: Leaf | None) -> Any:
        """The array of shards in NumPy's memory, placed like the live or else the saved array."""
        shape: tuple[int, ...] = leaf.layout.shape
        like: Placement = leaf.layout if live is None else live.layout
        if like.numpy:
            return _assembled(leaf)
        if like.sharding is None or (live is not None and not like.committed):
            return jax.device_put(_assembled(leaf))

        def shard(slices: Any) -> np.ndarray:
            saved = leaf.parts.get(index_of(slices, shape))
            return _assembled(leaf)[slices] if saved is None else saved

        # Replicas on a CPU share memory. This is safe with donation, because XLA never writes to
        # memory that belongs to NumPy.
        return jax.make_array_from_callback(shape, like.sharding, shard)

    def fetch(
        self, name: str, tag: str, content: Any, arrays: Mapping[str, Any], live: Flat | None
    ) -> Any:
        """Returns an array, a NumPy scalar, or a random key."""
        array = arrays[content["name"]]
        if content["kind"] == "key":
            return jax.random.wrap_key_data(array, impl=content["impl"])
        if content["kind"] == "scalar" and isinstance(array, np.ndarray):
            return array[()]
        return array


class _Encoder:
    """Encodes trees and collects their arrays."""

    def __init__(self) -> None:
        self.leaves: dict[str, Leaf] = {}
        self.treedefs: dict[str, Any] = {}
        self._names = structure.Names()

    def encode(self, name: str, value: Any) -> dict[str, Any]:
        if hasattr(value, "state_dict"):
            node = structure.encode(value.state_dict(), (name,), self._encode_array)
            if not structure.attribute(value, "per_rank"):
                return {"tree": node}
            if any(structure.arrays_of(node)):
                raise UnsavableState(
                    f'state["{name}"] is saved by each process separately and contains an array: '
                    "Orbax writes such an array from one process only; make it a list of numbers"
                )
            return {"tree": node, "per_rank": True}
        paths, self.treedefs[name] = jax.tree_util.tree_flatten_with_path(value)
        leaves = []
        for path, leaf in paths:
            readable = jax.tree_util.keystr(path, simple=True, separator=".")
            place = (name, readable) if path else (name,)
            node = structure.encode(leaf, place, self._encode_array)
            leaves.append([jax.tree_util.keystr(path), node])
        return {"leaves": leaves}

    def _encode_array(self, path: tuple[Any, ...], value: Any) -> structure.Node | None:
        """Encodes an array, NumPy scalar or random key. Returns None for any other value."""
        extra = {}
        if isinstance(value, jax.Array):
            kind = "jax"
            if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                kind, extra = "key", {"impl": str(jax.random.key_impl(value))}
                value = jax.random.key_data(value)
        elif (
            type(value) in (np.ndarray, np.memmap) or isinstance(value, np.generic)
        ) and not value.dtype.hasobject:
            kind = "scalar" if isinstance(value, np.generic) else "numpy"
            if value.dtype.names is not None or value.dtype.kind in "SUMm":
                return None
            value = np.asarray(value, value.dtype.newbyteorder("="))
        else:
            return None
        name = self._names.at(path)
        shape, dtype = list(value.shape), np.dtype(value.dtype).name
        self.leaves[name] = Leaf(name, dtype, _shards_of(value), Placement.of(value))
        return {"array": {"name": name, "kind": kind, "dtype": dtype, "shape": shape, **extra}}


def _assembled(leaf: Leaf) -> np.ndarray:
    """The whole array. Raises ValueError if other processes hold some of its shards."""
    shape, shards = leaf.layout.shape, leaf.parts
    first = next(iter(shards.values()))
    if first.shape == shape:
        return first
    if sum(shard.size for shard in shards.values()) != np.prod(shape):
        raise ValueError(
            f"{leaf.name} spans several processes, and its live sharding differs: "
            "restore the array into the sharding in which it was saved"
        )
    result = np.empty(shape, first.dtype)
    for index, shard in shards.items():
        result[tuple(slice(start, stop) for start, stop in index)] = shard
    return result


def _shards_of(array: Any) -> dict[Index, Any]:
    """This process's shards of an array, without replicas. A NumPy array is one shard."""
    if not isinstance(array, jax.Array):
        return {tuple((0, size) for size in array.shape): array}
    return {index_of(shard.index, array.shape): shard.data for shard in array.addressable_shards}


def index_of(slices: Any, shape: tuple[int, ...]) -> Index:
    """Converts the slices of a shard to (start, stop) per axis."""
    return tuple(axis.indices(size)[:2] for axis, size in zip(slices, shape, strict=True))
