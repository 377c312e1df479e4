"""Checkpoints on disk in Orbax's format (OCDBT with Zarr 3), written and read with TensorStore.

Orbax keeps the number of its current operation in a variable of the process. Two operations in two
threads mix up their numbers and fail, and Orbax has no lock. The program may call Orbax at any
time, so the store does not call it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts
import xxhash

from healcore.jax.store.coordination import CoordinatedRanks
from healcore.jax.store.host_copy import Index, JaxCopier, as_array, index_of, parts
from healcore.runtime.store import manifest, structure
from healcore.runtime.store.directory import DirectoryStore
from healcore.runtime.store.errors import StoreError
from healcore.runtime.store.inspection import Digest
from healcore.runtime.store.manifest import StoredCheckpoint
from healcore.runtime.store.structure import Flat

_ITEM = "state"
"""Name of the one checkpointable. Its tree is flat: array name -> array."""
_LARGEST_CHUNK = 1 << 30
"""Bytes. A chunk is compressed as a whole, in memory."""


class OrbaxStore(DirectoryStore):
    """Checkpoints on disk in Orbax's format, sharded as they are.

    Orbax reads the arrays of a checkpoint without healcore:
    ``ocp.load_checkpointables(step_directory / "data")["state"]["params.dense.kernel"]``. The
    program's own Orbax manager may save at the same time.

    Between two saves it keeps the host memory of one copy of the state.

    In a program of several processes (`jax.distributed`) all processes make the store and call its
    methods together. Each process writes and reads its own parts of an array that spans processes.
    Arrays of one process alone (a counter, a key) have to be equal in all processes. A checkpoint
    can be restored onto another mesh and by another number of processes.

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
            _write_parts(saved, folder, process=rank, compress=self.compress)
        return {}

    def _complete_arrays(self, folder: Path) -> None:
        if folder.exists():
            _complete(folder)

    def _check_common(self, arrays: dict[str, Any]) -> None:
        """Raises StoreError unless the arrays of one process alone are equal in all processes."""
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
        checkpoint: StoredCheckpoint,
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
        read = _read(checkpoint.folder / manifest.DATA, wanted) if wanted else {}
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
    """The live array's sharding, or None for a NumPy array."""
    leaf = live.leaves.get(node["name"])
    if isinstance(leaf, np.ndarray) or (leaf is None and node["kind"] in ("numpy", "scalar")):
        return None
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return getattr(leaf, "sharding", None) or here


def _size(node: Mapping[str, Any]) -> int:
    return int(np.prod(node["shape"]))


def _escaped(name: str) -> str:
    """A name that is one path component everywhere."""
    return re.sub(r"[^A-Za-z0-9_.\-]", lambda found: f"%{ord(found[0]):02X}", name)


# -- files of Orbax -----------------------------------------------------------------------------


def _write_parts(arrays: Mapping[str, Any], folder: Path, *, process: int, compress: bool) -> None:
    """Writes this process's parts of arrays that have elements.

    The first process that holds a part writes it. Process 0 writes NumPy arrays, and arrays that
    each process has for itself. Raises TensorStore's ValueError if a file cannot be written.
    """
    context, index = _context(), _index_spec(_part_of(folder, process))
    opened = []
    for name, array in arrays.items():
        own = [part for part in parts(array) if _owner(array, part[0]) == process]
        if own:
            spec = _new_array(array, own[0][1].shape, compress)
            spec["kvstore"] = {**index, "path": f"{name}/"}
            opened.append((ts.open(spec, context=context), own))
    written = []
    for target, own in opened:
        for place, data in own:
            part = target.result()[_slices(place)]
            # The caller keeps the data until this function returns.
            written.append(part.write(data, can_reference_source_data_indefinitely=True))
    for each in written:
        each.result()


def _complete(folder: Path) -> None:
    """Makes one checkpoint of the parts that all processes have written."""
    context, item = _context(), folder / _ITEM
    whole = ts.KvStore.open(_index_spec(item), context=context).result()
    transaction = ts.Transaction(atomic=True)
    names = set()
    for part in sorted(item.glob(_part_of(folder, "*").name)):
        store = ts.KvStore.open(_index_spec(part), context=context).result()
        store.experimental_copy_range_to(whole.with_transaction(transaction)).result()
        # A name is one path component, see `_escaped`.
        names |= {key.decode().partition("/")[0] for key in store.list().result()}
    transaction.commit_async().result()
    metadata = {
        "tree_metadata": {
            str((name,)): {
                "key_metadata": [{"key": name, "key_type": 2}],  # a key of a dictionary
                # Orbax restores a "jax.Array" only where the devices that saved it exist.
                "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
            }
            for name in sorted(names)
        },
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
    }
    (item / "_METADATA").write_text(json.dumps(metadata))
    (folder / "_CHECKPOINT_METADATA").write_text("{}")


def _read(
    folder: Path, wanted: Mapping[str, tuple[tuple[int, ...], np.dtype, Any]]
) -> dict[str, Any]:
    """Arrays of a checkpoint in fresh memory.

    Args:
        folder: directory of the checkpoint.
        wanted: name -> shape, dtype, and the sharding, or None for a NumPy array.

    Raises:
        ValueError: an array is missing, cannot be decoded, or has another shape or dtype.
    """
    context, index = _context(), _index_spec(folder / _ITEM)
    opened = {
        name: ts.open(
            {"driver": "zarr3", "kvstore": {**index, "path": f"{name}/"}},
            open=True,
            read=True,
            context=context,
        )
        for name in wanted
    }
    pending = {}
    for name, (shape, dtype, sharding) in wanted.items():
        stored = opened[name].result()
        if (stored.shape, stored.dtype.numpy_dtype) != (shape, dtype):
            found = f"{stored.dtype.name}{list(stored.shape)}"
            raise ValueError(f"{name} is stored as {found}, not as {dtype.name}{list(shape)}")
        places = {tuple((0, size) for size in shape)}
        if sharding is not None:
            devices = sharding.addressable_devices_indices_map(shape)
            places = {index_of(slices, shape) for slices in devices.values()}
        pending[name] = {place: stored[_slices(place)].read() for place in places}
    result = {}
    for name, (shape, _, sharding) in wanted.items():
        found = {place: each.result() for place, each in pending.pop(name).items()}
        if sharding is None:
            (result[name],) = found.values()
        else:
            result[name] = as_array(shape, sharding, found.__getitem__)
    return result


def _context() -> ts.Context:
    return ts.Context(
        {
            "file_io_concurrency": {"limit": 128},
            "file_io_sync": False,  # the store synchronizes all files at the end
            "cache_pool": {"total_bytes_limit": 100_000_000},  # nodes of the index
        }
    )


def _part_of(folder: Path, process: int | str) -> Path:
    """The directory in which one process writes."""
    return folder / _ITEM / f"ocdbt.process_{process}"


def _index_spec(directory: Path) -> dict[str, Any]:
    return {
        "driver": "ocdbt",
        "base": {"driver": "file", "path": f"{directory}/"},
        "config": {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000},
        "assume_config": True,
        "target_data_file_size": 1 << 31,
    }


def _new_array(array: Any, part: tuple[int, ...], compress: bool) -> dict[str, Any]:
    codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if compress:
        codecs.append({"name": "zstd", "configuration": {"level": 3}})
    chunk = _chunk(part, array.dtype.itemsize)
    return {
        "driver": "zarr3",
        "dtype": np.dtype(array.dtype).name,
        "metadata": {
            "shape": list(array.shape),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "codecs": codecs,
        },
        "create": True,
        "open": True,
        "store_data_equal_to_fill_value": True,
    }


def _chunk(part: tuple[int, ...], itemsize: int) -> list[int]:
    """The shape of a chunk, which divides the shape of a part: two processes share no chunk."""
    chunk = list(part)
    while np.prod(chunk, dtype=np.int64) * itemsize > _LARGEST_CHUNK:
        factor, axis = min((_smallest_factor(n), axis) for axis, n in enumerate(chunk) if n > 1)
        chunk[axis] //= factor
    return chunk


def _smallest_factor(number: int) -> int:
    return next((n for n in range(2, int(number**0.5) + 1) if number % n == 0), number)


def _owner(array: Any, place: Index) -> int:
    """The process that writes a part."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return 0
    devices = array.sharding.devices_indices_map(array.shape)
    return min(
        device.process_index
        for device, slices in devices.items()
        if slices is not None and index_of(slices, array.shape) == place
    )


def _slices(place: Index) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in place)
