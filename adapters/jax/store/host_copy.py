"""Copies of a JAX state in host memory, and the JSON structure of a state."""

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
"""Place of a part in its array: (start, stop) per axis."""


class HostArray(NamedTuple):
    """One array in host memory."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Any
    """None for a NumPy array."""
    parts: dict[Index, np.ndarray]
    """The distinct parts of this process; empty while `pinned` holds them."""
    pinned: jax.Array | None = None
    """The copy of an accelerator's array in pinned host memory, perhaps still incomplete."""

    def data(self) -> dict[Index, np.ndarray]:
        """The parts; waits until they are complete."""
        if self.pinned is None:
            return self.parts
        return {index: np.asarray(data) for index, data in parts(self.pinned)}

    def array(self) -> Any:
        """The array in the snapshot's own memory, sharded as it was; NumPy where it was NumPy."""
        if self.pinned is not None:
            return self.pinned
        if self.sharding is None:
            return next(iter(self.parts.values()))
        return as_array(self.shape, self.sharding, self.parts.__getitem__)


class JaxSnapshot(Snapshot):
    """A JAX state in host memory. Leaves are `HostArray`s."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return self.arena.nbytes + sum(
            data.nbytes for array in self._pinned for _, data in parts(array)
        )

    @property
    def _pinned(self) -> list[jax.Array]:
        return [each.pinned for each in self.flat.leaves.values() if each.pinned is not None]

    def settle(self) -> None:
        """Waits for copies off an accelerator."""
        jax.block_until_ready(self._pinned)

    def blocks(self) -> Iterator[Block]:
        """The bytes of every part of every array."""
        for each in self.flat.leaves.values():
            for index, data in each.data().items():
                yield _block(each, index, data)


class JaxCopier(Copier):
    """Copies JAX states to host memory.

    Arrays on a CPU are copied into one block of memory before `take` returns, because their own
    memory may be donated to the next step. JAX copies arrays on an accelerator to pinned host
    memory asynchronously, and handles donation. `pinned` does this on a CPU too, for tests.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        super().__init__()
        self._pinned = pinned

    def flatten(self, state: Mapping[str, Any], *, live: bool = False) -> Flat:
        """The structure of a state and its arrays; a live state may hold ShapeDtypeStructs."""
        flattening = _Flattening(shapes=live)
        entries = {
            name: flattening.entry(name, value)
            for name, value in structure.checked_names(state).items()
        }
        return Flat(entries, flattening.leaves, flattening.treedefs)

    def take(self, state: Mapping[str, Any], recycled: JaxSnapshot | None = None) -> JaxSnapshot:
        """A snapshot."""
        flat = self.flatten(state)
        sent = self._sent(flat)
        rest = {
            name: [(index, np.asarray(data)) for index, data in parts(leaf)]
            for name, leaf in flat.leaves.items()
            if name not in sent
        }
        need = sum(rounded(data.nbytes) for each in rest.values() for _, data in each)
        arena = Arena.reusing(recycled.arena if recycled is not None else None, need)
        leaves, work = {}, []
        for name, leaf in flat.leaves.items():
            copies = {}
            for index, data in rest.get(name, ()):
                copies[index] = arena.deal(data.nbytes).view(data.dtype).reshape(data.shape)
                work.append((copies[index], data))
            sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
            shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
            leaves[name] = HostArray(name, shape, dtype, sharding, copies, sent.get(name))
        map_in_threads(lambda pair: np.copyto(*pair), work, need)
        return JaxSnapshot(flat._replace(leaves=leaves), arena)

    def arrays(self, snapshot: JaxSnapshot) -> dict[str, Any]:
        """The arrays in the snapshot's own memory."""
        return {name: leaf.array() for name, leaf in snapshot.flat.leaves.items()}

    def copies(
        self, snapshot: JaxSnapshot, names: set[str], live: Flat, copy: CopyBlocks
    ) -> dict[str, Any]:
        """Arrays in fresh memory, sharded as the live ones are."""
        needed = [leaf for name, leaf in snapshot.flat.leaves.items() if name in names]
        saved = [(entry, *part) for entry in needed for part in entry.data().items()]
        copies = copy([_block(*each) for each in saved])
        fresh: dict[str, dict[Index, np.ndarray]] = {entry.name: {} for entry in needed}
        for (entry, index, data), raw in zip(saved, copies, strict=True):
            fresh[entry.name][index] = raw.view(entry.dtype).reshape(data.shape)
        return {
            entry.name: _placed(entry, fresh[entry.name], live.leaves.get(entry.name))
            for entry in needed
        }

    def fetch(
        self, name: str, tag: str, content: Any, arrays: Mapping[str, Any], live: Flat | None
    ) -> Any:
        """An array, or a random key made of its data."""
        array = arrays[content["name"]]
        if content["kind"] == "key":
            return jax.random.wrap_key_data(array, impl=content["impl"])
        if content["kind"] == "scalar" and isinstance(array, np.ndarray):
            return array[()]
        return array

    def _sent(self, flat: Flat) -> dict[str, jax.Array]:
        """Arrays on accelerators, being copied to pinned host memory."""
        away = {
            name: leaf
            for name, leaf in flat.leaves.items()
            if isinstance(leaf, jax.Array) and leaf.size and (self._pinned or not _on_cpu(leaf))
        }
        places = [leaf.sharding.with_memory_kind(_PINNED) for leaf in away.values()]
        return dict(zip(away, jax.device_put(list(away.values()), places), strict=True))


class _Flattening:
    """Collects the arrays while trees are encoded; with `shapes` ShapeDtypeStructs too."""

    def __init__(self, shapes: bool) -> None:
        self.leaves: dict[str, Any] = {}
        self.treedefs: dict[str, Any] = {}
        self._names = structure.Names()
        self._arrays = (jax.Array, jax.ShapeDtypeStruct) if shapes else (jax.Array,)

    def entry(self, name: str, value: Any) -> dict[str, Any]:
        if hasattr(value, "state_dict"):
            node = structure.encode(value.state_dict(), (name,), self._special)
            if not getattr(value, "per_rank", False):
                return {"tree": node}
            if any(structure.arrays_of(node)):
                raise UnsavableState(
                    f'state["{name}"] is saved by each process for itself and holds an array: '
                    "Orbax writes such an array from one process only; make it a list of numbers"
                )
            return {"tree": node, "per_rank": True}
        paths, self.treedefs[name] = jax.tree_util.tree_flatten_with_path(value)
        leaves = []
        for path, leaf in paths:
            place = (name, *_parts(path))
            node = structure.encode(leaf, place, self._special)
            leaves.append([jax.tree_util.keystr(path), node])
        return {"leaves": leaves}

    def _special(self, path: tuple[Any, ...], value: Any) -> structure.Node | None:
        extra = {}
        if isinstance(value, self._arrays):
            kind = "jax"
            if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                if isinstance(value, jax.ShapeDtypeStruct):
                    raise UnsavableState(
                        f"{structure.place(path)} is the shape of a random key: pass a key"
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


def _parts(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """The readable part of each step into a pytree."""
    return tuple(
        next((getattr(key, name) for name in ("key", "name", "idx") if hasattr(key, name)), key)
        for key in path
    )


def _placed(entry: HostArray, fresh: dict[Index, np.ndarray], live: Any) -> Any:
    """An array of the parts in `fresh`, placed as the live array is, else as it was saved."""
    target = entry.sharding if live is None else getattr(live, "sharding", None)
    if (live is None and target is None) or isinstance(live, (np.ndarray, np.generic)):
        return _whole(entry, fresh)
    if target is None:  # a jax.ShapeDtypeStruct without a sharding
        return jax.device_put(_whole(entry, fresh))
    wanted = {
        tuple(s.indices(n)[:2] for s, n in zip(index, entry.shape, strict=True))
        for index in target.addressable_devices_indices_map(entry.shape).values()
        if index is not None
    }
    if wanted <= fresh.keys():
        if isinstance(live, jax.Array) and not live.committed:
            return jax.device_put(next(iter(fresh.values())))
        # Replicas on a CPU share memory. A donation does not overwrite it: XLA never writes to
        # memory that belongs to NumPy.
        return as_array(entry.shape, target, fresh.__getitem__)
    return jax.device_put(_whole(entry, fresh), target)


def _whole(entry: HostArray, fresh: dict[Index, np.ndarray]) -> np.ndarray:
    if len(fresh) == 1 and next(iter(fresh.values())).shape == entry.shape:
        return next(iter(fresh.values()))
    result = np.empty(entry.shape, entry.dtype)
    filled = 0
    for index, data in fresh.items():
        result[tuple(slice(start, stop) for start, stop in index)] = data
        filled += data.size
    if filled != result.size:
        raise ValueError(
            f"{entry.name} is on several processes and would need another sharding: "
            "restore it into the sharding it was saved from"
        )
    return result


def _block(entry: HostArray, index: Index, data: np.ndarray) -> Block:
    whole = tuple((0, size) for size in entry.shape)
    place = "" if index == whole else "[" + ", ".join(f"{a}:{b}" for a, b in index) + "]"
    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return Block(entry.name, entry.dtype.name, raw, place)


def _on_cpu(array: jax.Array) -> bool:
    return next(iter(array.devices())).platform == "cpu"


def parts(array: Any) -> Iterator[tuple[Index, Any]]:
    """The distinct parts that this process has. A NumPy array is one part."""
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
    part: Callable[[Index], np.ndarray],
) -> jax.Array:
    """An array of global `shape` from host memory; `part` is called once for each device.

    XLA on a CPU uses aligned memory without a copy, so `part` must return memory that nobody writes
    to while the array lives.
    """
    local = sharding.addressable_devices_indices_map(shape)
    pieces = [
        jax.device_put(part(index_of(index, shape)), device)
        for device, index in local.items()
        if index is not None
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def index_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    """The index of a part as (start, stop) per axis."""
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))
