"""Checkpoints on disk with Orbax (the v1 API)."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xxhash
from orbax.checkpoint import v1 as ocp

from healcore.jax.store.coordination import CoordinatedRanks
from healcore.jax.store.host_copy import JaxCopier
from healcore.runtime.store import manifest, structure
from healcore.runtime.store.directory import DirectoryStore
from healcore.runtime.store.errors import StoreError
from healcore.runtime.store.inspection import Digest
from healcore.runtime.store.manifest import Found
from healcore.runtime.store.structure import Flat

_ITEM = "state"
"""Name of the one checkpointable. Its tree is flat: array name -> array."""


class OrbaxStore(DirectoryStore):
    """Checkpoints on disk, whose arrays Orbax writes and reads, sharded as they are.

    The arrays of a checkpoint can be read without healcore:
    ``ocp.load_checkpointables(step_directory / "data")["state"]["params.dense.kernel"]``.

    Between two saves it keeps the host memory of one copy of the state, for the next.

    In a program of several processes (`jax.distributed`) all make the store and call its methods
    together. Each writes and reads its own parts of an array that spans them. Arrays of one process
    alone (a counter, a key) have to be equal in all of them, and one writes them. A checkpoint can
    be restored onto another mesh and by another number of processes.

    Args:
        root: directory of this run's checkpoints and of nothing else, the same for all processes;
            created if necessary.
        nonfinite_ok: patterns of array names (`params.*.mask`) where NaN and Inf are allowed.
        compress: let Orbax compress (its default). Trained weights shrink by some 8 %, and saving
            takes two to three times as long: turn it off where disks are large.

    Raises:
        StoreError: the directory cannot be used.
    """

    format = "orbax"

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        nonfinite_ok: Collection[str] = (),
        compress: bool = True,
    ) -> None:
        several = jax.process_count() > 1
        ranks = CoordinatedRanks() if several else None
        super().__init__(root, JaxCopier(), nonfinite_ok=nonfinite_ok, ranks=ranks)
        self.compress = compress

    def _write_arrays(self, arrays: dict[str, Any], folder: Path) -> dict[str, Digest]:
        # Orbax saves no arrays without elements.
        saved = {_escaped(name): array for name, array in arrays.items() if array.size}
        if self._ranks.world > 1:
            saved = self._common(saved)
            if saved:
                self._write_together(saved, folder)
        elif saved:
            with self._context():
                ocp.save_checkpointables(str(folder), {_ITEM: saved})
        return {}

    def _common(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """The arrays, those of this process alone as NumPy's; StoreError unless all have the same.

        Orbax writes NumPy arrays from one process, and refuses arrays on one process's devices.
        """
        own = {name: np.asarray(a) for name, a in arrays.items() if not _spans(a)}
        digests = {name: xxhash.xxh3_128_hexdigest(a.tobytes()) for name, a in own.items()}
        every = self._ranks.gather(digests)
        for name in sorted(set().union(*every)):
            if len({each.get(name) for each in every}) > 1:
                raise StoreError(
                    f"{name} is an array of each process alone, and not the same in all "
                    f"{self._ranks.world}: make it one array over the mesh of all processes, "
                    "jax.make_array_from_process_local_data(NamedSharding(mesh, spec), part), or "
                    "the same everywhere (a key without the process's number in it)"
                )
        return {**arrays, **own}

    def _write_together(self, arrays: dict[str, Any], folder: Path) -> None:
        """Writes with Orbax's earlier API, which waits for the other processes over the host.

        The v1 API (0.12) compares the name of the folder in a collective of the devices, which in
        this background thread would come between those of the training.
        """
        import orbax.checkpoint as v0

        options = v0.options.MultiprocessingOptions(
            active_processes=set(range(self._ranks.world)),  # None: collectives of the devices
            barrier_sync_key_prefix=folder.parent.name,  # of this save alone
        )
        arrays_of_one_item = v0.PyTreeCheckpointHandler(
            use_zarr3=True, use_compression=self.compress, multiprocessing_options=options
        )
        item: Any = {_ITEM: arrays_of_one_item}
        composite = v0.CompositeOptions(multiprocessing_options=options)
        handler = v0.CompositeCheckpointHandler(composite_options=composite, **item)
        with v0.Checkpointer(handler, multiprocessing_options=options) as checkpointer:
            args = {_ITEM: v0.args.PyTreeSave(arrays)}
            checkpointer.save(folder, args=v0.args.Composite(**args))

    def _read_arrays(
        self,
        found: Found,
        entries: Mapping[str, Mapping[str, Any]],
        like: Mapping[str, Any],
        live: Flat,
    ) -> dict[str, Any]:
        nodes = structure.nodes_of(entries)
        wanted = {
            _escaped(name): _abstract(node, live) for name, node in nodes.items() if _size(node)
        }
        read = {}
        if wanted:
            context = self._context()
            context.pytree.loading.partial_load = True
            with context:
                path = str(found.folder / manifest.DATA)
                read = ocp.load_checkpointables(path, {_ITEM: wanted})[_ITEM]
        return {
            name: _placed(read[_escaped(name)], node, live) if _size(node) else _empty(node, live)
            for name, node in nodes.items()
        }

    def _context(self) -> ocp.Context:
        """Orbax's settings. They belong to one thread, so each use makes its own."""
        context = ocp.Context()
        context.memory_options.deepcopy_host_arrays = False  # it is a copy already
        context.array.saving.use_compression = self.compress
        return context


def _spans(leaf: Any) -> bool:
    """Whether other processes have parts of an array."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def _abstract(node: Mapping[str, Any], live: Flat) -> Any:
    """An array for Orbax to restore, as it will be placed; NumPy where each process has its own."""
    shape, dtype = tuple(node["shape"]), np.dtype(node["dtype"])
    sharding = _sharding(node, live)
    if sharding is None or (jax.process_count() > 1 and sharding.is_fully_addressable):
        return np.broadcast_to(np.empty((), dtype), shape)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _placed(array: Any, node: Mapping[str, Any], live: Flat) -> Any:
    """A restored array where it belongs."""
    sharding = _sharding(node, live)
    move = sharding is not None and not isinstance(array, jax.Array)
    return jax.device_put(array, sharding) if move else array


def _empty(node: Mapping[str, Any], live: Flat) -> Any:
    """An array without elements, which Orbax does not save."""
    return _placed(np.empty(node["shape"], np.dtype(node["dtype"])), node, live)


def _sharding(node: Mapping[str, Any], live: Flat) -> jax.sharding.Sharding | None:
    """The live array's sharding; None where that is NumPy's, or NumPy was saved."""
    leaf = live.leaves.get(node["name"])
    if isinstance(leaf, np.ndarray) or (leaf is None and node["kind"] in ("numpy", "scalar")):
        return None
    return getattr(leaf, "sharding", None) or _here()


def _here() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _size(node: Mapping[str, Any]) -> int:
    return int(np.prod(node["shape"]))


def _escaped(name: str) -> str:
    """A name that is one path component everywhere."""
    return re.sub(r"[^A-Za-z0-9_.\-]", lambda found: f"%{ord(found[0]):02X}", name)
