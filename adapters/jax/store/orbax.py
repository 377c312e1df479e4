"""JAX states in host memory, and on disk in Orbax's format."""

from __future__ import annotations

import functools
import math
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from healcore.jax.driver.live_state import SIDE_STATE, live_state_of
from healcore.jax.store.coordination import CoordinatedRanks
from healcore.runtime.store import files, manifest, single_file, values
from healcore.runtime.store.checkpoints import (
    IN_MEMORY,
    Keep,
    Restored,
    StoreError,
    UnsavableState,
)
from healcore.runtime.store.host_copy import ArrayFormat, FlatState, HostCopy, Leaf, Target, raw
from healcore.runtime.store.host_memory import allocate
from healcore.runtime.store.manifest import StoredCheckpoint
from healcore.runtime.store.ranks import Alone, run_on_each
from healcore.runtime.store.single_file import ArrayType
from healcore.runtime.store.store import CheckpointStore

_PINNED = "pinned_host"
"""Name of the memory of the host that an accelerator copies to without waiting."""
_ITEM = "state"
"""Name of the only checkpointable. Its tree is flat: array name -> array."""
_thread = threading.local()
"""`saves`: whether the thread writes arrays for an `OrbaxStore`."""


class _JaxStore(CheckpointStore):
    """A store of JAX states."""

    def restore(self, step: int, like: Any) -> Restored:
        """Verifies a checkpoint and reads it, from memory if possible.

        A checkpoint of a Healer holds the state without its healing parts, nnx objects as trees,
        and Python numbers apart. `like` is then the state as the Healer was given it, or some of
        its names, and the result has the same form: new nnx objects for nnx objects, and the
        healing parts of `like`.

        Args:
            step: step of the checkpoint.
            like: the live state, or some of its names. It is not changed. The result has its
                structure, shapes, dtypes and shardings.

        Raises:
            CheckpointDamaged: the content differs from the saved content.
            StateMismatch: the checkpoint was saved from another state.
            CheckpointNotFound: the step has no checkpoint.
        """
        items = isinstance(like, Mapping) and SIDE_STATE in like  # the Healer's own call
        if items or not self._is_of_healer(step):
            return super().restore(step, like)
        live = live_state_of(like)
        restored = super().restore(step, live.items())
        return restored._replace(state=live.copy_with(live.restored(restored.state)))

    def _is_of_healer(self, step: int) -> bool:
        """Whether a Healer has saved a checkpoint, by the names of its items."""
        copy, stored = self._locate(step)
        if copy is not None:
            return SIDE_STATE in copy.flat.entries
        try:
            return bool(stored) and SIDE_STATE in stored[0].entries(self.ranks.rank)
        except (OSError, ValueError, LookupError):  # damaged: `restore` says how
            return False


class MemoryStore(_JaxStore):
    """Stores copies of a JAX state in host memory. Copies of arrays on a GPU are pinned.

    Args:
        keep: number of copies of each kind to keep. A save needs the memory of one more copy.
    """

    def __init__(self, keep: Keep = IN_MEMORY) -> None:
        super().__init__(JaxFormat(), keep=keep)


class OrbaxStore(_JaxStore):
    """Stores checkpoints on disk in Orbax's format. Each process saves its shards.

        store = OrbaxStore("checkpoints")
        step = max(each.step for each in store.checkpoints() if each.finite)
        state = store.restore(step, state).state  # as the Healer was given it

    Orbax can read the arrays of a checkpoint without healcore:
    ``ocp.load_checkpointables(step_directory / "data")["state"]["params.dense.kernel"]``. The
    program's own Orbax manager may save at the same time.

    ``save`` takes a mapping of names to trees: ``store.save(50, {"params": params})``. ``restore``
    takes the same mapping. For a checkpoint of a Healer it takes the state as the Healer was given
    it, which need not be a mapping: ``store.restore(50, state).state``.

    The store permanently holds host memory for one copy of the state.

    In a program of several processes (`jax.distributed`), all processes construct the store and
    call its methods together. Each process writes and reads its own shards of an array that spans
    processes. An array that does not span processes (a counter, a key) has to be equal in all
    processes. Another number of processes can restore a checkpoint, onto another mesh.

    Args:
        root: directory for only this run's checkpoints, the same for all processes. Created if it
            does not exist.
        in_memory: copies to keep in host memory too, for fast rollbacks, or None for no copies.

    Raises:
        StoreError: the directory cannot be used.
    """

    root: Path

    def __init__(self, root: str | os.PathLike[str], *, in_memory: Keep | None = None) -> None:
        ranks = CoordinatedRanks() if jax.process_count() > 1 else None
        super().__init__(JaxFormat(ranks), root, keep=in_memory, ranks=ranks)


class _Layout(NamedTuple):
    """How the shards of a leaf make an array."""

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding | None
    """Sharding, or None for a NumPy array."""
    committed: bool
    """Whether JAX may not move the array to another device. True for a NumPy array."""

    @property
    def spans(self) -> bool:
        """Whether other processes hold shards of the array."""
        return self.sharding is not None and not self.sharding.is_fully_addressable


class JaxFormat(ArrayFormat):
    """Copies JAX states, and writes and reads their arrays with Orbax's handler.

    The parts of a leaf are this process's distinct shards, by (start, stop) per axis. Shards on a
    CPU are copied before `copy` returns, because the next step may reuse donated memory. JAX copies
    shards on a GPU to pinned host memory asynchronously, and handles donation.
    """

    name = "orbax"

    def __init__(self, ranks: CoordinatedRanks | None = None) -> None:
        self._ranks = ranks or Alone()
        self.arrays_by_rank = self._ranks.world == 1  # Orbax writes them from one process only

    def add(self, flat: FlatState, name: str, value: Any) -> None:
        """Adds the entry and the arrays of a value. See `ArrayFormat.add`."""
        encode = functools.partial(_encode_array, flat)
        if not hasattr(value, "state_dict"):
            paths, flat.treedefs[name] = jax.tree_util.tree_flatten_with_path(value)
            flat.entries[name] = {"leaves": (leaves := [])}
            for path, leaf in paths:
                readable = jax.tree_util.keystr(path, simple=True, separator=".")
                node = values.encode(leaf, (name, readable) if path else (name,), encode)
                leaves.append([jax.tree_util.keystr(path), node])
            return
        flat.entries[name] = {"tree": values.encode(value.state_dict(), (name,), encode)}
        if values.attribute(value, "per_rank"):
            if not self.arrays_by_rank and any(values.arrays_of(flat.entries[name])):
                raise UnsavableState(
                    f'state["{name}"] is saved by each process separately and contains an array: '
                    "Orbax writes such an array from one process only; make it a list of numbers"
                )
            flat.entries[name]["per_rank"] = True

    def on_cpu(self, part: Any) -> bool:
        """Whether a shard is in host memory. Empty shards count as such."""
        on_device = isinstance(part, jax.Array) and part.size
        return not on_device or next(iter(part.devices())).platform == "cpu"

    def copy_parts(
        self, parts: Sequence[Any], old: Sequence[Any]
    ) -> tuple[Sequence[Any], Callable[[], object]]:
        """Copies shards. See `ArrayFormat.copy_parts`."""
        pinned = {
            index: jax.device_put(part, part.sharding.with_memory_kind(_PINNED))
            for index, part in enumerate(parts)
            if not self.on_cpu(part)
        }
        sources = {i: np.asarray(part) for i, part in enumerate(parts) if i not in pinned}
        old = [part for part in old if isinstance(part, np.ndarray)]
        if [(x.shape, x.dtype) for x in old] != [(x.shape, x.dtype) for x in sources.values()]:
            old = [allocate(x.nbytes).view(x.dtype).reshape(x.shape) for x in sources.values()]
        pairs = [*zip(old, sources.values(), strict=True)]
        files.map_in_threads(lambda pair: np.copyto(*pair), pairs, sum(x.nbytes for x in old))
        copies = pinned | dict(zip(sources, old, strict=True))
        ordered = [copies[index] for index in range(len(parts))]
        return ordered, lambda: jax.block_until_ready([*pinned.values()])

    def array(self, leaf: Leaf, live: Leaf | None) -> Any:
        """The array of shards in NumPy's memory, placed like the live or else the saved array."""
        like: _Layout = leaf.layout if live is None else live.layout
        if like.sharding is None:
            return _assembled(leaf)
        if live is not None and not like.committed:
            return jax.device_put(_assembled(leaf))
        shape = leaf.layout.shape

        def shard(slices: Any) -> np.ndarray:
            saved = leaf.parts.get(_index_of(slices, shape))
            return _assembled(leaf)[slices] if saved is None else saved

        # Replicas on a CPU share memory. This is safe with donation, because XLA never writes to
        # memory that belongs to NumPy.
        return jax.make_array_from_callback(shape, like.sharding, shard)

    def decode_array(self, node: Mapping[str, Any], array: Any, live: Leaf | None) -> Any:
        """An array, a NumPy scalar, or a random key."""
        if node["kind"] == "key":
            return jax.random.wrap_key_data(array, impl=node["impl"])
        return array[()] if node["kind"] == "scalar" and isinstance(array, np.ndarray) else array

    @functools.cached_property
    def _handler(self) -> ocp.PyTreeCheckpointHandler:
        """Orbax's handler.

        Not Orbax's checkpointers: these number their operations in a variable of the process
        without a lock, and the program's own manager may run in another thread. Not compressed:
        trained weights would shrink by about 8 %, and a save would take two to three times as long.
        """
        _wait_for_no_signals()
        return ocp.PyTreeCheckpointHandler(use_compression=False)

    def whole(self, leaf: Leaf) -> tuple[ArrayType, np.ndarray] | None:
        """The array, or None if it has several shards."""
        (first, *others) = leaf.parts.values()
        shape = leaf.layout.shape
        if others or first.shape != shape:
            return None
        dtype = np.dtype(leaf.dtype)
        return ArrayType(leaf.dtype, shape, dtype.itemsize), raw(first)

    def write(self, copy: HostCopy, folder: Path) -> None:
        """Writes the shards of this process. Orbax does not save empty arrays."""
        self._check_equal(copy)
        saved = [leaf for leaf in copy.flat.leaves.values() if math.prod(leaf.layout.shape)]
        item = epath.Path(folder / _ITEM)

        def save() -> None:
            item.mkdir(parents=True, exist_ok=True)
            arrays = {_escaped(leaf.name): _to_write(leaf) for leaf in saved}
            _thread.saves = True
            try:
                self._handler.save(item, args=ocp.args.PyTreeSave(arrays))
            finally:
                _thread.saves = False

        if saved:
            run_on_each(self._ranks, save)
            if self._ranks.rank == 0:  # after all processes have written
                self._handler.finalize(item)
                files.write_new(folder / "_CHECKPOINT_METADATA", b"{}")

    def _check_equal(self, copy: HostCopy) -> None:
        """Raises StoreError unless arrays that do not span processes are equal in all processes."""
        leaves = copy.flat.leaves.values()
        digests = {leaf.name: leaf.digests for leaf in leaves if not leaf.layout.spans}
        gathered = self._ranks.gather(digests)
        for name in sorted(set().union(*gathered)):
            if any(digests.get(name) != gathered[0].get(name) for digests in gathered):
                raise StoreError(
                    f"{name} differs between the {self._ranks.world} processes, and does not "
                    "span them: make it one array over the mesh of all processes, "
                    "jax.make_array_from_process_local_data(NamedSharding(mesh, spec), part), or "
                    "make it equal everywhere (for instance a key without the process index)"
                )

    def read(self, checkpoint: StoredCheckpoint, target: Target) -> dict[str, Any]:
        """Reads arrays with the live shardings.

        An array that is not committed to a device is read as NumPy's, and put there afterwards.
        """
        saved, live = target.arrays, target.flat.leaves
        nodes = {name: node for name, node in saved.items() if math.prod(node["shape"])}
        layouts = {name: leaf.layout for name, leaf in live.items() if name in saved}
        shardings = {name: each.sharding for name, each in layouts.items() if each.committed}
        read = {}
        if checkpoint.only_file is not None:
            read = _read_only_file(checkpoint.only_file, nodes)
        elif nodes:
            args = {
                _escaped(name): ocp.ArrayRestoreArgs(sharding=shardings[name])
                if shardings.get(name) is not None
                else ocp.RestoreArgs(restore_type=np.ndarray)
                for name in nodes
            }
            item = dict.fromkeys(args, 0)
            wanted = ocp.args.PyTreeRestore(item, restore_args=args, partial_restore=True)
            folder = epath.Path(checkpoint.folder / manifest.DATA / _ITEM)
            read = self._handler.restore(folder, args=wanted)
        arrays = {}
        for name, node in saved.items():
            shape, dtype = tuple(node["shape"]), np.dtype(node["dtype"])
            array = read[_escaped(name)] if name in nodes else np.empty(shape, dtype)
            if (array.shape, array.dtype) != (shape, dtype):
                actual = f"{array.dtype}{list(array.shape)}"
                raise ValueError(f"{name} is stored as {actual}, not as {dtype}{list(shape)}")
            is_numpy = node["kind"] in ("numpy", "scalar")
            if name in live:
                is_numpy = live[name].layout.sharding is None
            if isinstance(array, np.ndarray) and not is_numpy:
                array = _placed(array, shardings.get(name))
            arrays[name] = array
        return arrays


def _read_only_file(path: Path, nodes: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Reads arrays from the only file of a small checkpoint; escaped name -> array."""
    dtypes = {name: np.dtype(node["dtype"]) for name, node in nodes.items()}
    types = {
        name: ArrayType(dtypes[name].name, node["shape"], dtypes[name].itemsize)
        for name, node in nodes.items()
    }
    arrays = {}
    for name, stored in single_file.read_arrays(path, types).items():
        memory = allocate(len(stored))
        np.copyto(memory, stored)
        arrays[_escaped(name)] = memory.view(dtypes[name]).reshape(nodes[name]["shape"])
    return arrays


def _placed(array: np.ndarray, sharding: Any) -> jax.Array:
    """An array of NumPy with a sharding, or on the default device."""
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda slices: array[slices])


@functools.cache
def _wait_for_no_signals() -> None:
    """Makes saves of this module wait for no signal of Orbax.

    A handler waits until the directory of its save exists: for the signals of the newest save of
    the process, which may be a save of the program's own manager in another thread. A save of this
    module then waited for 5 minutes, and failed, in 1 of some 40 runs (orbax-checkpoint 0.12.8).
    """
    try:
        from orbax.checkpoint._src.futures.future import AwaitableSignalsContract as Contract
    except ImportError:  # a later version, which may have no such wait
        return
    original = Contract.get_awaitable_signals_from_contract

    def signals(operation_id: str | None = None) -> Any:
        return [] if getattr(_thread, "saves", False) else original(operation_id)

    Contract.get_awaitable_signals_from_contract = staticmethod(signals)  # type: ignore[method-assign]


def _encode_array(flat: FlatState, path: values.Path, value: Any) -> values.Node | None:
    """Encodes an array, NumPy scalar or random key. Returns None for any other value."""
    extra, sharding, committed = {}, None, True
    if isinstance(value, jax.Array):
        kind = "jax"
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            kind, extra = "key", {"impl": str(jax.random.key_impl(value))}
            value = jax.random.key_data(value)
        sharding, committed = value.sharding, value.committed
        parts = {_index_of(x.index, value.shape): x.data for x in value.addressable_shards}
    elif type(value) in (np.ndarray, np.memmap) or isinstance(value, np.generic):
        if value.dtype.hasobject or value.dtype.names is not None or value.dtype.kind in "SUMm":
            return None
        kind = "scalar" if isinstance(value, np.generic) else "numpy"
        value = np.asarray(value, value.dtype.newbyteorder("="))
        parts = {tuple((0, size) for size in value.shape): value}
    else:
        return None
    dtype = np.dtype(value.dtype).name
    name = flat.add(path, dtype, parts, _Layout(tuple(value.shape), sharding, committed))
    node = {"name": name, "kind": kind, "dtype": dtype, "shape": list(value.shape)}
    return {"array": node | extra}


def _to_write(leaf: Leaf) -> Any:
    """The copy of an array: of NumPy if it is whole, else of JAX in the host's memory."""
    shape, sharding, first = leaf.layout.shape, leaf.layout.sharding, [*leaf.parts.values()][:1]
    if not leaf.layout.spans and first[0].shape == shape:
        return np.asarray(first[0])
    if first and isinstance(first[0], jax.Array):  # of an accelerator: stays in host memory
        sharding = sharding.with_memory_kind(_PINNED)
    return jax.make_array_from_callback(
        shape,
        sharding,
        lambda slices: np.asarray(leaf.parts[_index_of(slices, shape)]),
        dtype=np.dtype(leaf.dtype),
    )


def _assembled(leaf: Leaf) -> np.ndarray:
    """The whole array. Raises ValueError if other processes hold some of its shards."""
    shape, shards = leaf.layout.shape, leaf.parts
    first = next(iter(shards.values()))
    if first.shape == shape:
        return first
    if sum(shard.size for shard in shards.values()) != math.prod(shape):
        raise ValueError(
            f"{leaf.name} spans several processes, and its live sharding differs: "
            "restore the array into the sharding in which it was saved"
        )
    result = np.empty(shape, first.dtype)
    for index, shard in shards.items():
        result[tuple(slice(*bounds) for bounds in index)] = shard
    return result


def _index_of(slices: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The position of a shard in its array: (start, stop) per axis."""
    return tuple(axis.indices(size)[:2] for axis, size in zip(slices, shape, strict=True))


def _escaped(name: str) -> str:
    """Escapes a name, so that it is one path component on any platform."""
    return re.sub(r"[^A-Za-z0-9_.\-]", lambda match: f"%{ord(match[0]):02X}", name)


def node_of(value: Any, keep: values.Keep = values.base64_text) -> dict[str, Any] | None:
    """Converts an array or a random key to JSON; returns None for any other value.

    `keep` keeps the bytes, see `values.dumps`.
    """
    if not isinstance(value, jax.Array) or not value.is_fully_addressable:
        return None
    if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return values.pack_array(np.asarray(value), keep)
    key = values.pack_array(np.asarray(jax.random.key_data(value)), keep) or {}
    return {**key, "impl": str(jax.random.key_impl(value))}


def value_of(content: dict[str, Any]) -> jax.Array:
    """Converts JSON from `node_of` to an array or key. Raises an exception for other JSON."""
    found = jnp.asarray(values.unpack_array(content))
    return jax.random.wrap_key_data(found, impl=content["impl"]) if "impl" in content else found
