"""Copies of a JAX state in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from healcore.jax.store.state import flatten
from healcore.runtime.store.copies import Copier
from healcore.runtime.store.host_memory import Arena, Block, CopyBlocks, rounded
from healcore.runtime.store.inspection import mapped
from healcore.runtime.store.structure import Flat

_PINNED = "pinned_host"

Index = tuple[tuple[int, int], ...]
"""Where a part is in its array: (start, stop) per axis."""


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


@dataclass
class JaxSnapshot:
    """A JAX state in host memory."""

    flat: Flat
    entries: dict[str, HostArray]
    arena: Arena

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        pinned = [each.pinned for each in self.entries.values() if each.pinned is not None]
        return self.arena.nbytes + sum(data.nbytes for array in pinned for _, data in parts(array))

    def settle(self) -> None:
        """Waits for copies off an accelerator."""
        pinned = [each.pinned for each in self.entries.values() if each.pinned is not None]
        jax.block_until_ready(pinned)

    def blocks(self) -> Iterator[Block]:
        """The bytes of every part of every array."""
        for each in self.entries.values():
            for index, data in each.data().items():
                yield _block(each, index, data)


class JaxCopier(Copier):
    """Copies JAX states to host memory.

    Arrays on a CPU are copied into one block of memory before `take` returns, because their own
    memory may be donated to the next step. The runtime copies arrays on an accelerator to pinned
    host memory: it knows about donation, and the host does not wait. `pinned` does that on a CPU
    too, for tests.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        super().__init__()
        self._pinned = pinned

    def flatten(self, state: Mapping[str, Any], *, live: bool = False) -> Flat:
        """The structure of a state and its arrays; of a live one also shapes."""
        return flatten(state, shapes=live)

    def take(self, state: Mapping[str, Any], recycled: JaxSnapshot | None = None) -> JaxSnapshot:
        """A snapshot."""
        flat = flatten(state)
        sent = self._sent(flat)
        rest = {
            name: [(index, np.asarray(data)) for index, data in parts(leaf)]
            for name, leaf in flat.leaves.items()
            if name not in sent
        }
        need = sum(rounded(data.nbytes) for each in rest.values() for _, data in each)
        arena = _arena(need, recycled)
        entries, work = {}, []
        for name, leaf in flat.leaves.items():
            copies = {}
            for index, data in rest.get(name, ()):
                copies[index] = arena.deal(data.nbytes).view(data.dtype).reshape(data.shape)
                work.append((copies[index], data))
            entries[name] = _entry(name, leaf, copies, sent.get(name))
        mapped(lambda pair: np.copyto(*pair), work, need)
        return JaxSnapshot(flat._replace(leaves={}), entries, arena)

    def arrays(self, snapshot: JaxSnapshot) -> dict[str, Any]:
        """The arrays in the snapshot's own memory."""
        return {name: entry.array() for name, entry in snapshot.entries.items()}

    def copies(
        self, snapshot: JaxSnapshot, names: set[str], live: Flat, copy: CopyBlocks
    ) -> dict[str, Any]:
        """Arrays in fresh memory, sharded as the live ones are."""
        needed = [entry for name, entry in snapshot.entries.items() if name in names]
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
        """An array, wherever it is; a random key is made of its data."""
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


def _entry(
    name: str, leaf: Any, known: dict[Index, np.ndarray], pinned: jax.Array | None
) -> HostArray:
    sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
    return HostArray(name, tuple(leaf.shape), np.dtype(leaf.dtype), sharding, known, pinned)


def _placed(entry: HostArray, fresh: dict[Index, np.ndarray], live: Any) -> Any:
    """An array of the parts in `fresh`, placed as the live one is; without one, as it was saved."""
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
        # Replicas on a CPU share memory. A donation does not overwrite it: it is NumPy's, and XLA
        # never writes to memory that it does not own.
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


def _arena(nbytes: int, recycled: JaxSnapshot | None) -> Arena:
    old = recycled.arena if recycled is not None else None
    return old if old is not None and old.reused(nbytes) else Arena(nbytes)


def _raw(data: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


def _block(entry: HostArray, index: Index, data: np.ndarray) -> Block:
    whole = tuple((0, size) for size in entry.shape)
    place = "" if index == whole else "[" + ", ".join(f"{a}:{b}" for a, b in index) + "]"
    return Block(entry.name, entry.dtype.name, _raw(data), place)


def _on_cpu(array: jax.Array) -> bool:
    return next(iter(array.devices())).platform == "cpu"


def parts(array: Any) -> Iterator[tuple[Index, Any]]:
    """The distinct parts that this process has: one of several replicas. NumPy's are whole."""
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

    XLA on a CPU uses well-aligned memory as it is, so `part` must return memory that nobody writes
    to as long as the array lives.
    """
    local = sharding.addressable_devices_indices_map(shape)
    pieces = [
        jax.device_put(part(index_of(index, shape)), device)
        for device, index in local.items()
        if index is not None
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def index_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    """The index of a part, as (start, stop) per axis."""
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))
