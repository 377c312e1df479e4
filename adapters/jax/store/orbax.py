"""Checkpoints on disk in Orbax's format."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xxhash

from healcore.jax.store import orbax_format
from healcore.jax.store.coordination import CoordinatedRanks
from healcore.jax.store.host_copy import JaxCopier
from healcore.runtime.store import manifest, structure
from healcore.runtime.store.directory import DirectoryStore
from healcore.runtime.store.errors import StoreError
from healcore.runtime.store.inspection import Digest
from healcore.runtime.store.manifest import Found
from healcore.runtime.store.structure import Flat


class OrbaxStore(DirectoryStore):
    """Checkpoints on disk in Orbax's format, sharded as they are.

    Orbax reads the arrays of a checkpoint without healcore:
    ``ocp.load_checkpointables(step_directory / "data")["state"]["params.dense.kernel"]``. The store
    does not call Orbax, so the program's own Orbax manager may save at the same time.

    Between two saves it keeps the host memory of one copy of the state, for the next.

    In a program of several processes (`jax.distributed`) all make the store and call its methods
    together. Each writes and reads its own parts of an array that spans them. Arrays of one process
    alone (a counter, a key) have to be equal in all of them, and one writes them. A checkpoint can
    be restored onto another mesh and by another number of processes.

    Args:
        root: directory of this run's checkpoints and of nothing else, the same for all processes;
            created if necessary.
        nonfinite_ok: patterns of array names (`params.*.mask`) where NaN and Inf are allowed.
        compress: compress with zstd, as Orbax does by default. Trained weights shrink by some 8 %,
            and saving takes two to three times as long: turn it off where disks are large.

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
        processes = CoordinatedRanks() if jax.process_count() > 1 else None
        super().__init__(root, JaxCopier(), nonfinite_ok=nonfinite_ok, ranks=processes)
        self.compress = compress

    def _write_arrays(self, arrays: dict[str, Any], folder: Path) -> dict[str, Digest]:
        # Orbax saves no arrays without elements.
        saved = {_escaped(name): array for name, array in arrays.items() if array.size}
        if self.processes.world > 1:
            self._check_common(saved)
        if saved:
            rank = self.processes.rank
            orbax_format.write_parts(saved, folder, process=rank, compress=self.compress)
        return {}

    def _complete_arrays(self, folder: Path) -> None:
        if folder.exists():
            orbax_format.complete(folder)

    def _check_common(self, arrays: dict[str, Any]) -> None:
        """Raises StoreError unless all processes have the same arrays of one process alone.

        One process writes these arrays.
        """
        digests = {
            name: xxhash.xxh3_128_hexdigest(np.asarray(array).tobytes())
            for name, array in arrays.items()
            if not _spans(array)
        }
        every = self.processes.gather(digests)
        for name in sorted(set().union(*every)):
            if len({each.get(name) for each in every}) > 1:
                raise StoreError(
                    f"{name} is an array of each process alone, and not the same in all "
                    f"{self.processes.world}: make it one array over the mesh of all processes, "
                    "jax.make_array_from_process_local_data(NamedSharding(mesh, spec), part), or "
                    "the same everywhere (a key without the process's number in it)"
                )

    def _read_arrays(
        self,
        found: Found,
        entries: Mapping[str, Mapping[str, Any]],
        like: Mapping[str, Any],
        live: Flat,
    ) -> dict[str, Any]:
        nodes = structure.nodes_of(entries)
        wanted = {
            _escaped(name): (tuple(node["shape"]), np.dtype(node["dtype"]), _sharding(node, live))
            for name, node in nodes.items()
            if _size(node)
        }
        read = orbax_format.read(found.folder / manifest.DATA, wanted) if wanted else {}
        return {
            name: read[_escaped(name)] if _size(node) else _empty(node, live)
            for name, node in nodes.items()
        }


def _spans(leaf: Any) -> bool:
    """Whether other processes have parts of an array."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def _empty(node: Mapping[str, Any], live: Flat) -> Any:
    """An array without elements, which Orbax does not save."""
    array, sharding = np.empty(node["shape"], np.dtype(node["dtype"])), _sharding(node, live)
    return array if sharding is None else jax.device_put(array, sharding)


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
