"""`OrbaxStore` and `MemoryStore`: checkpoints of JAX states on disk and in host memory.

`CheckpointStore` (`healcore/runtime/store`) does what does not depend on the framework: manifests,
digests, the copies in memory. It calls `JaxFormat`, its part for JAX, in this order for a save:

    state      {"params": {"w": array on 4 devices}, "step": 7}
      | add                      each array becomes a Leaf, with this process's shards as its parts
    FlatState  entries           structure and Python values, as JSON
               leaves            "params.w" -> Leaf(parts, its sharding)
      | copy_parts               shards -> host memory; the step may then reuse donated memory
    FlatState                    the same, of arrays in host memory
      | write_large              in the background; Orbax writes each array under its name

    checkpoints/step-0000000050.1/
        data/state/              the arrays, as Orbax's own checkpoint of a flat dictionary
        state.json               the entries
        manifest.json            sizes and digests of all files

Orbax stores arrays only, and under flat names, so that an Orbax program can read them without
healcore. Everything else of a state is in the entries. The arrays of a small state of one process
are one file instead. A restore goes the other way: `read_large` reads the arrays with the shardings
of the live state, and `decode_array` makes what was saved.
"""

from __future__ import annotations

import functools
import math
import threading
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import xxhash
from etils import epath

from healcore.jax.driver.program_state import MARK, program_state_of
from healcore.jax.store.coordination import CoordinatedRanks
from healcore.runtime.store import values
from healcore.runtime.store.array_format import (
    ArrayFormat,
    Entries,
    FlatState,
    Leaf,
    Target,
    copy_to_host,
    raw,
)
from healcore.runtime.store.checkpoints import IN_MEMORY, Keep, Restored, StoreError
from healcore.runtime.store.ranks import Alone, run_on_each
from healcore.runtime.store.store import CheckpointStore, Roots

_PINNED = "pinned_host"
"""Name of the memory of the host that an accelerator copies to without waiting."""
_ITEM = "state"
"""Name of the only checkpointable. Its tree is flat: array name -> array."""
_this_thread = threading.local()
"""Its attribute `saves` is True while the thread writes arrays for an `OrbaxStore`."""


class JaxFormat(ArrayFormat):
    """Copies JAX states for a store, and writes and reads their arrays with Orbax's handler.

    A leaf has one part, the whole array, if this process has all of it. Otherwise its parts are the
    shards of this process, by (start, stop) per axis. Parts on a CPU are copied before `copy_parts`
    returns, because the next step may reuse donated memory. JAX copies parts on a GPU to pinned
    host memory asynchronously, and handles donation.
    """

    def __init__(self, ranks: CoordinatedRanks | None = None) -> None:
        self._ranks = ranks or Alone()

    def add(self, flat: FlatState, name: str, value: Any) -> None:
        """Adds the entry and the arrays of one item of the state. See `ArrayFormat.add`.

        Args:
            flat: the flat state to add to.
            name: name of the item.
            value: a pytree, or an object with `state_dict`.
        """
        encode = functools.partial(_encode_array, flat)
        if hasattr(value, "state_dict"):
            flat.entries[name] = {"tree": values.encode(value.state_dict(), (name,), encode)}
            if values.attribute(value, "per_rank"):
                flat.entries[name]["per_rank"] = True
            return
        paths, flat.treedefs[name] = jax.tree_util.tree_flatten_with_path(value)
        leaves = []
        for path, leaf in paths:
            place: tuple[str, ...] = (name,)
            if path:
                place = name, jax.tree_util.keystr(path, simple=True, separator=".")
            leaves.append([jax.tree_util.keystr(path), values.encode(leaf, place, encode)])
        flat.entries[name] = {"leaves": leaves}

    def is_on_host(self, part: Any) -> bool:
        """Whether a part is in host memory, where the next step may reuse its memory."""
        is_array = isinstance(part, jax.Array) and part.size > 0
        return not is_array or next(iter(part.devices())).platform == "cpu"

    def copy_parts(self, parts: Sequence[Any]) -> tuple[Sequence[Any], Callable[[], object]]:
        """Copies parts. JAX copies those of an accelerator to pinned memory, and handles donation.

        Args:
            parts: arrays, or shards of arrays.

        Returns:
            The copies in the order of `parts`, and a function that waits until they are complete.
        """
        copies: list[Any] = []
        on_host: list[tuple[np.ndarray, np.ndarray]] = []
        for part in parts:
            if self.is_on_host(part):
                source = np.asarray(part)
                copies.append(np.empty(source.shape, source.dtype))
                on_host.append((copies[-1], source))
            else:
                copies.append(jax.device_put(part, part.sharding.with_memory_kind(_PINNED)))
        copy_to_host(on_host)
        return copies, functools.partial(jax.block_until_ready, copies)

    def part_of_bytes(self, data: np.ndarray, node: Mapping[str, Any]) -> np.ndarray:
        """The array of its bytes."""
        return data.view(node["dtype"]).reshape(node["shape"])

    def arrays(self, leaves: Mapping[str, Leaf], target: Target) -> dict[str, Any]:
        """Arrays of NumPy, or of JAX if other processes hold a part of the live array.

        Args:
            leaves: the copies, whose shards are in NumPy's memory.
            target: the live state.

        Raises:
            ValueError: other processes hold shards that this process needs for the live sharding.
        """
        live = target.flat.leaves
        return {
            name: _array(leaf, live[name].layout if name in live else None)
            for name, leaf in leaves.items()
        }

    def decode_array(self, node: Mapping[str, Any], array: Any, live: Leaf | None) -> Any:
        """Makes what the program has saved from the array that the checkpoint holds.

        Args:
            node: entry of the array, with its `kind`: "jax", "numpy", "scalar" or "key".
            array: the array; the data of a random key.
            live: the leaf of the state to restore into, or None if the state has no such leaf.

        Returns:
            A random key, a NumPy scalar, or an array of the kind and the placement of the live one.
        """
        is_numpy, placement = node["kind"] in ("numpy", "scalar"), None
        if live is not None:
            is_numpy = live.layout is None
            # An array on the first device may be one that JAX may move to another device.
            if not is_numpy and live.layout.device_set != {jax.local_devices()[0]}:
                placement = live.layout
        if isinstance(array, np.ndarray) and not is_numpy:
            # Without a sharding it is not committed to a device. Replicas on a CPU share memory.
            # This is safe with donation: XLA never writes to memory that belongs to NumPy.
            array = jax.device_put(array, placement)
        if node["kind"] == "key":
            return jax.random.wrap_key_data(jnp.asarray(array), impl=node["impl"])
        if node["kind"] == "scalar" and is_numpy:
            return array[()]
        return array

    @functools.cached_property
    def _handler(self) -> ocp.PyTreeCheckpointHandler:
        """Orbax's handler, which writes arrays without compression.

        Orbax's checkpointers cannot be used: they number their operations in a variable of the
        process without a lock, and the program's own manager may run in another thread. Compression
        would make trained weights about 8 % smaller, and a save two to three times as long.
        """
        _wait_for_no_signals()
        return ocp.PyTreeCheckpointHandler(use_compression=False)

    def write_large(self, flat: FlatState, folder: Path) -> None:
        """Writes the shards of this process. All processes call this method together.

        Empty arrays are not written, because Orbax cannot save them; `read_large` makes them from
        their entries.

        Args:
            flat: a state in host memory.
            folder: folder of the checkpoint's data, the same for all processes.

        Raises:
            StoreError: an array that does not span processes differs between them, or a process
                failed to write.
        """
        self._check_equal(flat)
        saved = [leaf for leaf in flat.leaves.values() if math.prod(leaf.shape)]
        item = epath.Path(folder / _ITEM)

        def save() -> None:
            item.mkdir(parents=True, exist_ok=True)
            arrays = {_escaped(leaf.name): _to_write(leaf) for leaf in saved}
            _this_thread.saves = True
            try:
                self._handler.save(item, args=ocp.args.PyTreeSave(arrays))
            finally:
                _this_thread.saves = False

        if saved:
            run_on_each(self._ranks, save)
            if self._ranks.rank == 0:  # after all processes have written
                self._handler.finalize(item)
                (folder / "_CHECKPOINT_METADATA").write_bytes(b"{}")

    def _check_equal(self, flat: FlatState) -> None:
        """Raises StoreError unless arrays that do not span processes are equal in all processes."""
        own = {}
        for leaf in flat.leaves.values():
            if self._ranks.world > 1 and not _spans(leaf):
                own[leaf.name] = xxhash.xxh3_128_hexdigest(raw(leaf.parts[""]).data)
        gathered = self._ranks.gather(own)
        for name in sorted(set().union(*gathered)):
            if any(digests.get(name) != gathered[0].get(name) for digests in gathered):
                raise StoreError(
                    f"{name} differs between the {self._ranks.world} processes, and does not "
                    "span them: make it one array over the mesh of all processes, "
                    "jax.make_array_from_process_local_data(NamedSharding(mesh, spec), part), or "
                    "make it equal everywhere (for instance a key without the process index)"
                )

    def read_large(self, folder: Path, target: Target) -> dict[str, Any]:
        """Reads whole arrays into NumPy's memory, and of an array that spans processes own shards.

        Args:
            folder: the folder that `write_large` has written.
            target: the arrays to read, and the live leaves into which they are restored.

        Returns:
            Name -> array.
        """
        nodes = target.arrays
        arrays: dict[str, Any] = {}
        wanted: dict[str, Any] = {}
        for name, node in nodes.items():
            live = target.flat.leaves.get(name)
            if not math.prod(node["shape"]):  # an empty array is not stored
                arrays[name] = np.empty(node["shape"], node["dtype"])
            elif live is not None and _spans(live):
                wanted[_escaped(name)] = ocp.ArrayRestoreArgs(sharding=live.layout)
            else:
                wanted[_escaped(name)] = ocp.RestoreArgs(restore_type=np.ndarray)
        if wanted:
            args = ocp.args.PyTreeRestore(
                dict.fromkeys(wanted, 0), restore_args=wanted, partial_restore=True
            )
            stored = self._handler.restore(epath.Path(folder / _ITEM), args=args)
            for name in nodes.keys() - arrays.keys():
                arrays[name] = stored[_escaped(name)]
        return arrays

    def match(self, step: int, saved: Entries, like: Mapping[str, Any]) -> Target:
        """See `ArrayFormat.match`.

        Args:
            step: step of the checkpoint, for the message.
            saved: the entries of the checkpoint.
            like: the live values, or for a checkpoint of a Healer the state as the Healer was given
                it, which need not be a mapping.
        """
        if MARK in saved and not (isinstance(like, Mapping) and MARK in like):
            like = program_state_of(like).items()
        return super().match(step, saved, like)


@functools.cache
def _wait_for_no_signals() -> None:
    """Replaces a function of Orbax, so that saves of this module wait for no signal.

    A handler of Orbax waits until the directory of its save exists. It waits for the signals of the
    newest save of the process, which may be a save of the program's own manager in another thread.
    Without this function, a save of this module waited for 5 minutes and failed in 1 of some 40
    runs (orbax-checkpoint 0.12.8).
    """
    try:
        from orbax.checkpoint._src.futures.future import AwaitableSignalsContract as Contract
    except ImportError:  # a later version, which may have no such wait
        return
    original = Contract.get_awaitable_signals_from_contract

    def signals(operation_id: str | None = None) -> Any:
        if getattr(_this_thread, "saves", False):
            return []
        return original(operation_id)

    Contract.get_awaitable_signals_from_contract = staticmethod(signals)  # type: ignore[method-assign]


def _encode_array(flat: FlatState, path: values.Path, value: Any) -> values.Node | None:
    """Encodes an array, NumPy scalar or random key. Returns None for any other value."""
    extra = {}
    if isinstance(value, jax.Array):
        kind = "jax"
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            kind, extra = "key", {"impl": str(jax.random.key_impl(value))}
            value = jax.random.key_data(value)
        layout, shape = value.sharding, value.shape
        parts: dict[Any, Any] = {"": value}
        if value.is_fully_replicated:
            parts = {"": value.addressable_data(0)}
        elif not value.is_fully_addressable:
            pieces = value.addressable_shards
            parts = {_index_of(piece.index, shape): piece.data for piece in pieces}
    elif type(value) in (np.ndarray, np.memmap) or isinstance(value, np.generic):
        if value.dtype.hasobject or value.dtype.names is not None or value.dtype.kind in "SUMm":
            return None
        kind, layout = "scalar" if isinstance(value, np.generic) else "numpy", None
        value = np.asarray(value, value.dtype.newbyteorder("="))
        parts = {"": value}
    else:
        return None
    node = flat.add(path, kind, value.dtype.name, value.shape, parts, layout)
    return {"array": {**node, **extra}}


def _spans(leaf: Leaf) -> bool:
    """Whether other processes hold shards of the array. NumPy's have no sharding."""
    return leaf.layout is not None and not leaf.layout.is_fully_addressable


def _to_write(leaf: Leaf) -> Any:
    """The array that Orbax writes."""
    sharding = leaf.layout
    if any(isinstance(part, jax.Array) for part in leaf.parts.values()):
        sharding = sharding.with_memory_kind(_PINNED)  # the copies stay in host memory
    return _array(leaf, sharding)


def _array(leaf: Leaf, sharding: jax.sharding.Sharding | None) -> Any:
    """The array of a copy: NumPy's, or JAX's if its sharding spans processes.

    Raises:
        ValueError: other processes hold a part that this process needs.
    """
    if sharding is None or sharding.is_fully_addressable:
        return _whole(leaf)
    shape = leaf.shape

    def shard(slices: Any) -> np.ndarray:
        saved = leaf.parts.get(_index_of(slices, shape))
        if saved is None:  # the live sharding differs from the saved one
            return _whole(leaf)[slices]
        return np.asarray(saved)

    return jax.make_array_from_callback(shape, sharding, shard, dtype=np.dtype(leaf.dtype))


def _whole(leaf: Leaf) -> np.ndarray:
    """The whole array. Raises ValueError if other processes hold some of its shards."""
    if "" not in leaf.parts:
        raise ValueError(
            f"{leaf.name} spans several processes, and its live sharding differs: "
            "restore the array into the sharding in which it was saved"
        )
    return np.asarray(leaf.parts[""])


def _index_of(slices: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The position of a shard in its array: (start, stop) per axis."""
    return tuple(axis.indices(size)[:2] for axis, size in zip(slices, shape, strict=True))


def _escaped(name: str) -> str:
    """Escapes a name, so that it is one path component on any platform."""
    return urllib.parse.quote(name, safe="")


def node_of(value: Any) -> dict[str, Any] | None:
    """Converts an array or a random key to JSON, for values outside of the arrays of a checkpoint.

    Args:
        value: any value.

    Returns:
        A dictionary for `value_of`. None if `value` is neither an array nor a key of JAX, or if
        other processes hold a part of it.
    """
    if not isinstance(value, jax.Array) or not value.is_fully_addressable:
        return None
    if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return values.pack_array(np.asarray(value))
    key = values.pack_array(np.asarray(jax.random.key_data(value))) or {}
    return {**key, "impl": str(jax.random.key_impl(value))}


def value_of(content: dict[str, Any]) -> jax.Array:
    """Converts JSON from `node_of` to an array or a random key.

    Args:
        content: result of `node_of`. The content of a damaged checkpoint raises an exception of
            any type, which the store reports as damage.
    """
    array = jnp.asarray(values.unpack_array(content))
    if "impl" in content:
        return jax.random.wrap_key_data(array, impl=content["impl"])
    return array


class _JaxStore(CheckpointStore):
    """A store of JAX states, which also takes the state of a Healer as the program passed it."""

    def restore(self, step: int, like: Any) -> Restored:
        """Verifies a checkpoint and reads it, from memory if possible.

        A checkpoint of a Healer holds the state without its healing parts, nnx objects as trees,
        and Python numbers in an item of their own. For such a checkpoint, `like` is the state as
        the Healer was given it, or some of its names. The result has the same form: new nnx objects
        for nnx objects, and the healing parts of `like`.

        Args:
            step: step of the checkpoint.
            like: the live state, or some of its names. It is not changed. The result has its
                structure, shapes, dtypes and shardings.

        Returns:
            The state and the records of the checkpoint.

        Raises:
            CheckpointDamaged: the content differs from the saved content.
            StateMismatch: the checkpoint was saved from another state.
            CheckpointNotFound: the step has no checkpoint.
        """
        restored = super().restore(step, like)
        # Only the Healer passes healcore's own item.
        items = isinstance(like, Mapping) and MARK in like
        if items or MARK not in restored.state:
            return restored
        live = program_state_of(like)
        return restored._replace(state=live.copy_with(live.restored(restored.state)))


class MemoryStore(_JaxStore):
    """Stores copies of a JAX state in host memory. Copies of arrays on a GPU are pinned.

    The store of a `Healer` without a directory: a rollback works, but a killed process loses the
    copies.

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
            does not exist. A list of directories gets each checkpoint in all of them.
        in_memory: copies to keep in host memory too, for fast rollbacks, or None for no copies.

    Raises:
        StoreError: the directory cannot be used.
    """

    root: Path

    def __init__(self, root: Roots, *, in_memory: Keep | None = None) -> None:
        ranks = None
        if jax.process_count() > 1:
            ranks = CoordinatedRanks()
        super().__init__(JaxFormat(ranks), root, keep=in_memory, ranks=ranks)
