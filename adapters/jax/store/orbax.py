"""Checkpoints on disk with Orbax (the v1 API)."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

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

    Args:
        root: directory of this run's checkpoints and of nothing else; created if necessary.
        nonfinite_ok: patterns of array names (`params.*.mask`) where NaN and Inf are allowed.
        compress: let Orbax compress (its default). Trained weights shrink by some 8 %, and saving
            takes two to three times as long: turn it off where disks are large.

    Raises:
        StoreError: the directory cannot be used, or the program has several processes.
    """

    format = "orbax"

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        nonfinite_ok: Collection[str] = (),
        compress: bool = True,
    ) -> None:
        if jax.process_count() > 1:
            raise StoreError(
                f"OrbaxStore saves from one process, this program has {jax.process_count()}: "
                "give each process a MemoryStore, and save to disk with Orbax itself"
            )
        super().__init__(root, JaxCopier(), nonfinite_ok=nonfinite_ok)
        self.compress = compress

    def _write_arrays(self, arrays: dict[str, Any], folder: Path) -> dict[str, Digest]:
        # Orbax saves no arrays without elements.
        saved = {_escaped(name): array for name, array in arrays.items() if array.size}
        if saved:
            with self._context():
                ocp.save_checkpointables(str(folder), {_ITEM: saved})
        return {}

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
            name: read[_escaped(name)] if _size(node) else _empty(node, live)
            for name, node in nodes.items()
        }

    def _context(self) -> ocp.Context:
        """Orbax's settings. They belong to one thread, so each use makes its own."""
        context = ocp.Context()
        context.memory_options.deepcopy_host_arrays = False  # it is a copy already
        context.array.saving.use_compression = self.compress
        return context


def _abstract(node: Mapping[str, Any], live: Flat) -> Any:
    """An array for Orbax to restore: with the live array's sharding, NumPy where that is NumPy."""
    shape, dtype = tuple(node["shape"]), np.dtype(node["dtype"])
    leaf = live.leaves.get(node["name"])
    sharding = getattr(leaf, "sharding", None)
    if sharding is not None:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    if isinstance(leaf, np.ndarray) or (leaf is None and node["kind"] in ("numpy", "scalar")):
        return np.broadcast_to(np.empty((), dtype), shape)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=_here())


def _empty(node: Mapping[str, Any], live: Flat) -> Any:
    """An array without elements, which Orbax does not save."""
    array = np.empty(node["shape"], np.dtype(node["dtype"]))
    leaf = live.leaves.get(node["name"])
    if isinstance(leaf, np.ndarray) or (leaf is None and node["kind"] in ("numpy", "scalar")):
        return array
    return jax.device_put(array, getattr(leaf, "sharding", None) or _here())


def _here() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _size(node: Mapping[str, Any]) -> int:
    return int(np.prod(node["shape"]))


def _escaped(name: str) -> str:
    """A name that is one path component everywhere."""
    return re.sub(r"[^A-Za-z0-9_.\-]", lambda found: f"%{ord(found[0]):02X}", name)
