"""Copies a JAX state to host memory, and describes its structure as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from healcore.runtime.store import structure
from healcore.runtime.store.copies import Copier, Snapshot
from healcore.runtime.store.errors import UnsavableState
from healcore.runtime.store.host_memory import Arena, Block, CopyBlocks, rounded
from healcore.runtime.store.inspection import map_in_threads
from healcore.runtime.store.structure import Flat

_PINNED = "pinned_host"

Index = tuple[tuple[int, int], ...]
"""Position of a shard in its array: (start, stop) per axis."""


class HostArray(NamedTuple):
    """One array in host memory."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Any
    """Sharding of the saved array, or None for a NumPy array."""
    shards: dict[Index, np.ndarray]
    """The distinct shards of this process, or empty if `pinned` holds them."""
    pinned: jax.Array | None = None
    """Copy of a GPU array in pinned host memory, possibly incomplete, or None."""

    def data(self) -> dict[Index, np.ndarray]:
        """The distinct shards of this process. Waits until the copies are complete."""
        if self.pinned is None:
            return self.shards
        return {index: np.asarray(data) for index, data in shards_of(self.pinned)}

    def array(self) -> Any:
        """The array in the snapshot's own memory, with its saved type and sharding."""
        if self.pinned is not None:
            return self.pinned
        if self.sharding is None:
            return next(iter(self.shards.values()))
        return as_array(self.shape, self.sharding, self.shards.__getitem__)


class JaxSnapshot(Snapshot):
    """A JAX state in host memory. Leaves are `HostArray`s."""

    @property
    def nbytes(self) -> int:
        """Size of the snapshot in host memory, in bytes."""
        return self.arena.nbytes + sum(
            data.nbytes for array in self._pinned for _, data in shards_of(array)
        )

    @property
    def _pinned(self) -> list[jax.Array]:
        return [leaf.pinned for leaf in self.flat.leaves.values() if leaf.pinned is not None]

    def settle(self) -> None:
        """Waits for copies from a GPU."""
        jax.block_until_ready(self._pinned)

    def blocks(self) -> Iterator[Block]:
        """Yields the bytes of every shard of every array."""
        for leaf in self.flat.leaves.values():
            for index, data in leaf.data().items():
                yield _block(leaf, index, data)


class JaxCopier(Copier):
    """Copies JAX states to host memory.

    Arrays on a CPU are copied into one block of memory before `take` returns, because the next step
    may reuse donated memory. JAX copies arrays on a GPU to pinned host memory asynchronously, and
    handles donation. `pinned` also does this on a CPU, for tests.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        super().__init__()
        self._pinned = pinned

    def flatten(self, state: Mapping[str, Any], *, live: bool = False) -> Flat:
        """Returns a state's structure and arrays. A live state may hold ShapeDtypeStructs."""
        encoder = _Encoder(shapes=live)
        entries = {
            name: encoder.encode(name, value)
            for name, value in structure.checked_names(state).items()
        }
        return Flat(entries, encoder.leaves, encoder.treedefs)

    def take(self, state: Mapping[str, Any], recycled: JaxSnapshot | None = None) -> JaxSnapshot:
        """Takes a snapshot of a state, in the memory of `recycled` if possible."""
        flat = self.flatten(state)
        pinned = self._copy_to_pinned(flat)
        sources = {
            name: [(index, np.asarray(data)) for index, data in shards_of(leaf)]
            for name, leaf in flat.leaves.items()
            if name not in pinned
        }
        size = sum(rounded(data.nbytes) for shards in sources.values() for _, data in shards)
        arena = Arena.reusing(recycled.arena if recycled is not None else None, size)
        leaves, pending = {}, []
        for name, leaf in flat.leaves.items():
            copies = {}
            for index, data in sources.get(name, ()):
                copies[index] = arena.deal(data.nbytes).view(data.dtype).reshape(data.shape)
                pending.append((copies[index], data))
            sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
            shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
            leaves[name] = HostArray(name, shape, dtype, sharding, copies, pinned.get(name))
        map_in_threads(lambda pair: np.copyto(*pair), pending, size)
        return JaxSnapshot(flat._replace(leaves=leaves), arena)

    def arrays(self, snapshot: JaxSnapshot) -> dict[str, Any]:
        """Name -> array in the snapshot's own memory."""
        return {name: leaf.array() for name, leaf in snapshot.flat.leaves.items()}

    def copies(
        self, snapshot: JaxSnapshot, names: set[str], live: Flat, copy: CopyBlocks
    ) -> dict[str, Any]:
        """Name -> copy of the array in new memory, with the sharding of the live array."""
        needed = [leaf for name, leaf in snapshot.flat.leaves.items() if name in names]
        saved = [(entry, *shard) for entry in needed for shard in entry.data().items()]
        copies = copy([_block(*arguments) for arguments in saved])
        fresh: dict[str, dict[Index, np.ndarray]] = {entry.name: {} for entry in needed}
        for (entry, index, data), raw in zip(saved, copies, strict=True):
            fresh[entry.name][index] = raw.view(entry.dtype).reshape(data.shape)
        return {
            entry.name: _restored(entry, fresh[entry.name], live.leaves.get(entry.name))
            for entry in needed
        }

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

    def _copy_to_pinned(self, flat: Flat) -> dict[str, jax.Array]:
        """Starts to copy GPU arrays to pinned host memory. Returns the copies by name."""
        arrays = {
            name: leaf
            for name, leaf in flat.leaves.items()
            if isinstance(leaf, jax.Array) and leaf.size and (self._pinned or not _on_cpu(leaf))
        }
        shardings = [leaf.sharding.with_memory_kind(_PINNED) for leaf in arrays.values()]
        return dict(zip(arrays, jax.device_put(list(arrays.values()), shardings), strict=True))


class _Encoder:
    """Encodes trees and collects their arrays; with `shapes` also ShapeDtypeStructs."""

    def __init__(self, shapes: bool) -> None:
        self.leaves: dict[str, Any] = {}
        self.treedefs: dict[str, Any] = {}
        self._names = structure.Names()
        self._arrays = (jax.Array, jax.ShapeDtypeStruct) if shapes else (jax.Array,)

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
            place = (name, *_readable(path))
            node = structure.encode(leaf, place, self._encode_array)
            leaves.append([jax.tree_util.keystr(path), node])
        return {"leaves": leaves}

    def _encode_array(self, path: tuple[Any, ...], value: Any) -> structure.Node | None:
        """Encodes an array, NumPy scalar or random key. Returns None for any other value."""
        extra = {}
        if isinstance(value, self._arrays):
            kind = "jax"
            if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                if isinstance(value, jax.ShapeDtypeStruct):
                    raise UnsavableState(
                        f"{structure.place(path)} is the shape of a random key: pass a key instead"
                    )
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
        self.leaves[name] = value
        shape, dtype = list(value.shape), np.dtype(value.dtype).name
        return {"array": {"name": name, "kind": kind, "dtype": dtype, "shape": shape, **extra}}


def _readable(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """The key, name or index of each element of a pytree path."""
    return tuple(
        next((getattr(key, name) for name in ("key", "name", "idx") if hasattr(key, name)), key)
        for key in path
    )


def _restored(entry: HostArray, shards: dict[Index, np.ndarray], live: Any) -> Any:
    """Makes an array of shards, with the sharding of the live array, or else of the saved array."""
    target = entry.sharding if live is None else getattr(live, "sharding", None)
    if (live is None and target is None) or isinstance(live, (np.ndarray, np.generic)):
        return _assembled(entry, shards)
    if target is None:  # a jax.ShapeDtypeStruct without a sharding
        return jax.device_put(_assembled(entry, shards))
    wanted = {
        index_of(slices, entry.shape)
        for slices in target.addressable_devices_indices_map(entry.shape).values()
        if slices is not None
    }
    if wanted <= shards.keys():
        if isinstance(live, jax.Array) and not live.committed:
            return jax.device_put(next(iter(shards.values())))
        # Replicas on a CPU share memory. This is safe with donation, because XLA never writes to
        # memory that belongs to NumPy.
        return as_array(entry.shape, target, shards.__getitem__)
    return jax.device_put(_assembled(entry, shards), target)


def _assembled(entry: HostArray, shards: dict[Index, np.ndarray]) -> np.ndarray:
    """The whole array. Raises ValueError if other processes hold some of its shards."""
    if len(shards) == 1 and next(iter(shards.values())).shape == entry.shape:
        return next(iter(shards.values()))
    result = np.empty(entry.shape, entry.dtype)
    filled = 0
    for index, data in shards.items():
        result[slices_of(index)] = data
        filled += data.size
    if filled != result.size:
        raise ValueError(
            f"{entry.name} spans several processes, and its live sharding differs: "
            "restore the array into the sharding in which it was saved"
        )
    return result


def _block(entry: HostArray, index: Index, data: np.ndarray) -> Block:
    whole = tuple((0, size) for size in entry.shape)
    place = "" if index == whole else "[" + ", ".join(f"{a}:{b}" for a, b in index) + "]"
    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return Block(entry.name, entry.dtype.name, raw, place)


def _on_cpu(array: jax.Array) -> bool:
    return next(iter(array.devices())).platform == "cpu"


def shards_of(array: Any) -> Iterator[tuple[Index, Any]]:
    """Yields this process's shards of an array, without replicas. A NumPy array is one shard."""
    if not isinstance(array, jax.Array):
        yield tuple((0, size) for size in array.shape), array
        return
    seen = set()
    for shard in array.addressable_shards:
        index = index_of(shard.index, array.shape)
        if index not in seen:
            seen.add(index)
            yield index, shard.data


def as_array(
    shape: tuple[int, ...],
    sharding: jax.sharding.Sharding,
    shard: Callable[[Index], np.ndarray],
) -> jax.Array:
    """Makes an array of global `shape` from host memory. Calls `shard` once per device.

    XLA on a CPU uses aligned memory without a copy, so nobody may write to the memory that `shard`
    returns while the array exists.
    """
    local = sharding.addressable_devices_indices_map(shape)
    shards = [
        jax.device_put(shard(index_of(slices, shape)), device)
        for device, slices in local.items()
        if slices is not None
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def index_of(slices: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    """Converts the slices of a shard to (start, stop) per axis."""
    return tuple(axis.indices(size)[:2] for axis, size in zip(slices, shape, strict=True))


def slices_of(index: Index) -> tuple[slice, ...]:
    """Converts (start, stop) per axis to slices."""
    return tuple(slice(start, stop) for start, stop in index)
