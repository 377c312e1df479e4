"""Stores checkpoints on disk with Orbax."""

from __future__ import annotations

import functools
import math
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from healcore.jax.store.coordination import CoordinatedRanks
from healcore.jax.store.host_copy import PINNED, JaxCopier, index_of
from healcore.runtime.store import CheckpointStore, files, manifest, structure
from healcore.runtime.store.copies import StateCopy
from healcore.runtime.store.errors import StoreError
from healcore.runtime.store.manifest import StoredCheckpoint
from healcore.runtime.store.retention import Keep
from healcore.runtime.store.structure import Flat, Leaf

_ITEM = "state"
"""Name of the only checkpointable. Its tree is flat: array name -> array."""
_thread = threading.local()
"""`saves`: whether the thread writes arrays for an `OrbaxStore`."""


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


class OrbaxStore(CheckpointStore):
    """Stores checkpoints on disk in Orbax's format. Each process saves its shards.

    Orbax can read the arrays of a checkpoint without healcore:
    ``ocp.load_checkpointables(step_directory / "data")["state"]["params.dense.kernel"]``. The
    program's own Orbax manager may save at the same time.

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

    format = "orbax"
    root: Path

    def __init__(self, root: str | os.PathLike[str], *, in_memory: Keep | None = None) -> None:
        processes = CoordinatedRanks() if jax.process_count() > 1 else None
        super().__init__(JaxCopier(), root, keep=in_memory, ranks=processes)
        # Orbax's handler, and not its checkpointers: these number their operations in a variable of
        # the process without a lock, and the program's own manager may run in another thread. Not
        # compressed: trained weights would shrink by about 8 %, and a save would take two to three
        # times as long.
        self._handler = ocp.PyTreeCheckpointHandler(use_compression=False)
        _wait_for_no_signals()

    def _write_arrays(self, copy: StateCopy, folder: Path) -> None:
        # Orbax does not save empty arrays.
        leaves = copy.flat.leaves.items()
        saved = {name: leaf for name, leaf in leaves if math.prod(leaf.layout.shape)}
        if self.processes.world > 1:
            self._check_equal(copy)
        if saved:
            (folder / _ITEM).mkdir(parents=True, exist_ok=True)
            arrays = {_escaped(name): self._to_write(leaf) for name, leaf in saved.items()}
            _thread.saves = True
            try:
                self._handler.save(epath.Path(folder / _ITEM), args=ocp.args.PyTreeSave(arrays))
            finally:
                _thread.saves = False

    def _to_write(self, leaf: Leaf) -> Any:
        """The copy of an array: of NumPy if it is whole, else of JAX in the host's memory."""
        shape, sharding, first = leaf.layout.shape, leaf.layout.sharding, [*leaf.parts.values()][:1]
        if not leaf.layout.spans and first[0].shape == shape:
            return np.asarray(first[0])
        if first and isinstance(first[0], jax.Array):  # of an accelerator: stays in host memory
            sharding = sharding.with_memory_kind(PINNED)
        return jax.make_array_from_callback(
            shape,
            sharding,
            lambda slices: np.asarray(leaf.parts[index_of(slices, shape)]),
            dtype=np.dtype(leaf.dtype),
        )

    def _complete_arrays(self, folder: Path) -> None:
        if folder.exists():
            self._handler.finalize(epath.Path(folder / _ITEM))
            files.write_new(folder / "_CHECKPOINT_METADATA", b"{}")

    def _check_equal(self, copy: StateCopy) -> None:
        """Raises StoreError unless arrays that do not span processes are equal in all processes."""
        digests = {
            name: [copy.digests[f"{name}{place}"] for place in leaf.parts]
            for name, leaf in copy.flat.leaves.items()
            if not leaf.layout.spans
        }
        gathered = self.processes.gather(digests)
        for name in sorted(set().union(*gathered)):
            if any(digests.get(name) != gathered[0].get(name) for digests in gathered):
                raise StoreError(
                    f"{name} differs between the {self.processes.world} processes, and does not "
                    "span them: make it one array over the mesh of all processes, "
                    "jax.make_array_from_process_local_data(NamedSharding(mesh, spec), part), or "
                    "make it equal everywhere (for instance a key without the process index)"
                )

    def _read_arrays(
        self,
        checkpoint: StoredCheckpoint,
        entries: Mapping[str, Mapping[str, Any]],
        like: Mapping[str, Any],
        live: Flat,
    ) -> dict[str, Any]:
        nodes = structure.nodes_of(entries)
        # An array that is not committed to a device is read as NumPy's, and put there afterwards.
        wanted = {
            _escaped(name): ocp.RestoreArgs(restore_type=np.ndarray)
            if (sharding := _sharding(live, name)) is None
            else ocp.ArrayRestoreArgs(sharding=sharding)
            for name, node in nodes.items()
            if math.prod(node["shape"])
        }
        read = {}
        if wanted:
            item = dict.fromkeys(wanted, 0)
            args = ocp.args.PyTreeRestore(item, restore_args=wanted, partial_restore=True)
            folder = epath.Path(checkpoint.folder / manifest.DATA / _ITEM)
            read = self._handler.restore(folder, args=args)
        placed = {}
        for name, node in nodes.items():
            shape, dtype = tuple(node["shape"]), np.dtype(node["dtype"])
            array = read[_escaped(name)] if math.prod(shape) else np.empty(shape, dtype)
            if (array.shape, array.dtype) != (shape, dtype):
                actual = f"{array.dtype}{list(array.shape)}"
                raise ValueError(f"{name} is stored as {actual}, not as {dtype}{list(shape)}")
            leaf = live.leaves.get(name)
            numpy = node["kind"] in ("numpy", "scalar") if leaf is None else leaf.layout.numpy
            on_host = isinstance(array, np.ndarray) and not numpy
            placed[name] = jax.device_put(array, _sharding(live, name)) if on_host else array
        return placed


def _sharding(live: Flat, name: str) -> Any:
    """The sharding of a live array, or None if JAX may move the array."""
    leaf = live.leaves.get(name)
    return leaf.layout.sharding if leaf is not None and leaf.layout.committed else None


def _escaped(name: str) -> str:
    """Escapes a name, so that it is one path component on any platform."""
    return re.sub(r"[^A-Za-z0-9_.\-]", lambda match: f"%{ord(match[0]):02X}", name)
