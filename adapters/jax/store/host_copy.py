"""Copies of a JAX state in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from healcore.jax.store.assembling import assemble
from healcore.jax.store.flattening import Flat, arrays_of, checked, flatten
from healcore.jax.store.placing import Index, as_array, parts, whole
from healcore.runtime.store.digest import mapped
from healcore.runtime.store.protocol import wanted
from healcore.runtime.store.snapshot import Arena, Block, rounded

_PINNED = "pinned_host"


class Entry(NamedTuple):
    """One array in host memory."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Any
    """None of a NumPy array."""
    parts: dict[Index, np.ndarray]
    """The distinct parts of this process; empty while `pinned` holds them."""
    pinned: jax.Array | None = None
    """Off an accelerator: the array in pinned host memory, perhaps still on its way."""

    def data(self) -> dict[Index, np.ndarray]:
        """The parts, once they have arrived."""
        if self.pinned is None:
            return self.parts
        return {part.index: np.asarray(part.data) for part in parts(self.pinned)}

    def array(self) -> Any:
        """The array in the snapshot's own memory, sharded as it was; NumPy where it was NumPy."""
        if self.pinned is not None:
            return self.pinned
        if self.sharding is None:
            return next(iter(self.parts.values()))
        return as_array(self.shape, self.sharding, self.parts.__getitem__)


@dataclass
class JaxSnapshot:
    """A state in host memory."""

    structure: dict[str, dict[str, Any]]
    treedefs: dict[str, Any]
    """PyTreeDefs of the pytrees."""
    entries: dict[str, Entry]
    arena: Arena | None

    @property
    def nbytes(self) -> int:
        """Host memory held."""
        size = self.arena.nbytes if self.arena else 0
        pinned = [each.pinned for each in self.entries.values() if each.pinned is not None]
        return size + sum(part.data.nbytes for array in pinned for part in parts(array))

    def settle(self) -> None:
        """Waits for copies off an accelerator."""
        pinned = [each.pinned for each in self.entries.values() if each.pinned is not None]
        jax.block_until_ready(pinned)

    def blocks(self) -> Iterator[Block]:
        """The bytes of every part of every array."""
        for each in self.entries.values():
            for index, data in each.data().items():
                yield _block(each, index, data)


class JaxCopier:
    """Copies JAX states to host memory.

    Arrays on a CPU are copied into one block of memory before `take` returns: their own memory may
    be donated to the next step. Arrays on an accelerator are sent to pinned host memory by the
    runtime, which knows about donation; the host does not wait.

    Args:
        pinned: send arrays on a CPU through pinned memory too, for tests.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned

    def take(self, state: Mapping[str, Any], recycled: JaxSnapshot | None = None) -> JaxSnapshot:
        """A snapshot."""
        flat = flatten(state)
        sent = self._sent(flat)
        rest = {
            name: [(part.index, np.asarray(part.data)) for part in parts(leaf)]
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
        return JaxSnapshot(flat.entries, flat.treedefs, entries, arena)

    def borrow(self, state: Mapping[str, Any]) -> JaxSnapshot:
        """The same form without a copy, of arrays that nobody changes or donates."""
        flat = flatten(state)
        entries = {}
        for name, leaf in flat.leaves.items():
            known = {part.index: np.asarray(part.data) for part in parts(leaf)}
            entries[name] = _entry(name, leaf, known, None)
        return JaxSnapshot(flat.entries, flat.treedefs, entries, None)

    def give(
        self,
        snapshot: JaxSnapshot,
        like: Mapping[str, Any],
        copy: Callable[[Sequence[Block]], list[np.ndarray]],
    ) -> dict[str, Any]:
        """The state in fresh memory, sharded as `like` is."""
        like = wanted(snapshot.structure, like)
        if not like:
            return {}
        live = checked(None, snapshot.structure, like)
        saved = {name: snapshot.structure[name] for name in like}
        needed = [
            snapshot.entries[node["name"]] for each in saved.values() for node in arrays_of(each)
        ]
        parts_of = [
            (entry, index, data) for entry in needed for index, data in entry.data().items()
        ]
        copies = copy([_block(*each) for each in parts_of])
        fresh: dict[str, dict[Index, np.ndarray]] = {entry.name: {} for entry in needed}
        for (entry, index, data), raw in zip(parts_of, copies, strict=True):
            fresh[entry.name][index] = raw.view(entry.dtype).reshape(data.shape)
        arrays = {
            entry.name: _placed(entry, fresh[entry.name], live.leaves.get(entry.name))
            for entry in needed
        }
        return assemble(saved, arrays, live.treedefs)

    def held(self, snapshot: JaxSnapshot) -> dict[str, Any]:
        """The state in the snapshot's own memory."""
        arrays = {name: entry.array() for name, entry in snapshot.entries.items()}
        trees = assemble(snapshot.structure, arrays, snapshot.treedefs)
        return {
            name: HeldState(tree) if "tree" in snapshot.structure[name] else tree
            for name, tree in trees.items()
        }

    def _sent(self, flat: Flat) -> dict[str, jax.Array]:
        """Arrays on accelerators, on their way to pinned host memory."""
        away = {
            name: leaf
            for name, leaf in flat.leaves.items()
            if isinstance(leaf, jax.Array) and leaf.size and (self._pinned or not _on_cpu(leaf))
        }
        places = [leaf.sharding.with_memory_kind(_PINNED) for leaf in away.values()]
        return dict(zip(away, jax.device_put(list(away.values()), places), strict=True))


class HeldState:
    """Stands for an object with `state_dict`, of which only that is left."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        """What the object's was."""
        return self._state


def _entry(name: str, leaf: Any, known: dict[Index, np.ndarray], pinned: jax.Array | None) -> Entry:
    sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
    return Entry(name, tuple(leaf.shape), np.dtype(leaf.dtype), sharding, known, pinned)


def _placed(entry: Entry, fresh: dict[Index, np.ndarray], live: Any) -> Any:
    """An array as the live one is placed; as it was saved where there is no live one.

    Args:
        entry: the saved one.
        fresh: its parts in memory that becomes the array's own.
        live: the live array, or None.
    """
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
        # Replicas on a CPU share memory. A donation does not reach it: it is NumPy's, and XLA
        # never writes to what it was only lent.
        return as_array(entry.shape, target, fresh.__getitem__)
    return jax.device_put(_whole(entry, fresh), target)


def _whole(entry: Entry, fresh: dict[Index, np.ndarray]) -> np.ndarray:
    if len(fresh) == 1 and next(iter(fresh.values())).shape == entry.shape:
        return next(iter(fresh.values()))
    found = whole(entry.shape, entry.dtype, fresh)
    if found is None:
        raise ValueError(
            f"{entry.name} lies on several processes and is wanted in another sharding: "
            "restore it into the sharding it was saved from"
        )
    return found


def _arena(nbytes: int, recycled: JaxSnapshot | None) -> Arena:
    """Memory for a snapshot: that of the recycled one if it is large enough and not far larger."""
    old = recycled.arena if recycled is not None else None
    if old is not None and nbytes <= old.nbytes <= 2 * nbytes:
        old.reset()
        return old
    return Arena(nbytes)


def _raw(data: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


def _block(entry: Entry, index: Index, data: np.ndarray) -> Block:
    whole = tuple((0, size) for size in entry.shape)
    place = "" if index == whole else "[" + ", ".join(f"{a}:{b}" for a, b in index) + "]"
    return Block(entry.name, entry.dtype.name, _raw(data), place)


def _on_cpu(array: jax.Array) -> bool:
    return next(iter(array.devices())).platform == "cpu"
