"""Stores checkpoints on disk in Orbax's format (OCDBT with Zarr 3), using TensorStore.

The store does not call Orbax, because the program may call Orbax at the same time. Orbax has one
operation number per process and no lock, so concurrent operations in two threads fail.
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

from healcore.jax.store.coordination import CoordinatedRanks
from healcore.jax.store.host_copy import Index, JaxCopier, as_array, index_of, slices_of
from healcore.runtime.store import manifest, structure
from healcore.runtime.store.directory import DirectoryStore
from healcore.runtime.store.errors import StoreError
from healcore.runtime.store.manifest import StoredCheckpoint
from healcore.runtime.store.structure import Flat, Leaf

_ITEM = "state"
"""Name of the only checkpointable. Its tree is flat: array name -> array."""
_LARGEST_CHUNK = 1 << 30
"""Largest chunk in bytes. A whole chunk is compressed in memory."""


class OrbaxStore(DirectoryStore):
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
        nonfinite_ok: patterns of array names (`params.*.mask`) in which NaN and Inf are allowed.

    Raises:
        StoreError: the directory cannot be used.
    """

    format = "orbax"

    def __init__(self, root: str | os.PathLike[str], *, nonfinite_ok: Collection[str] = ()) -> None:
        processes = CoordinatedRanks() if jax.process_count() > 1 else None
        super().__init__(root, JaxCopier(), nonfinite_ok=nonfinite_ok, ranks=processes)

    def _write_arrays(self, leaves: dict[str, Leaf], folder: Path) -> None:
        # Orbax does not save empty arrays.
        saved = {
            _escaped(name): leaf for name, leaf in leaves.items() if np.prod(leaf.layout.shape)
        }
        if self.processes.world > 1:
            self._check_equal(saved)
        if saved:
            _write_shards(saved, folder, process=self.processes.rank)

    def _complete_arrays(self, folder: Path) -> None:
        if folder.exists():
            _merge_shards(folder)

    def _check_equal(self, leaves: Mapping[str, Leaf]) -> None:
        """Raises StoreError unless arrays that do not span processes are equal in all processes."""
        digests = {
            name: self.copier.inspect({name: leaf}).digests
            for name, leaf in leaves.items()
            if not _spans(leaf)
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


def _spans(leaf: Leaf) -> bool:
    """Whether other processes hold shards of an array."""
    sharding = leaf.layout.sharding
    return sharding is not None and not sharding.is_fully_addressable


def _empty(node: Mapping[str, Any], live: Flat) -> Any:
    """Makes an empty array, because Orbax does not save empty arrays."""
    array, sharding = np.empty(node["shape"], np.dtype(node["dtype"])), _sharding(node, live)
    return array if sharding is None else jax.device_put(array, sharding)


def _sharding(node: Mapping[str, Any], live: Flat) -> jax.sharding.Sharding | None:
    """The live array's sharding, or else the first device. None for a NumPy array."""
    leaf = live.leaves.get(node["name"])
    if node["kind"] in ("numpy", "scalar") if leaf is None else leaf.layout.numpy:
        return None
    first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return (leaf and leaf.layout.sharding) or first_device


def _size(node: Mapping[str, Any]) -> int:
    return int(np.prod(node["shape"]))


def _escaped(name: str) -> str:
    """Escapes a name, so that it is one path component on any platform."""
    return re.sub(r"[^A-Za-z0-9_.\-]", lambda match: f"%{ord(match[0]):02X}", name)


# -- files of Orbax -----------------------------------------------------------------------------


def _write_shards(leaves: Mapping[str, Leaf], folder: Path, *, process: int) -> None:
    """Writes this process's shards of arrays that are not empty.

    The first process that holds a shard writes it. Process 0 writes arrays that do not span
    processes. Raises TensorStore's ValueError if a file cannot be written.
    """
    context, index = _context(), _index_spec(_process_folder(folder, process))
    opened = []
    for name, leaf in leaves.items():
        owned = [each for each in leaf.parts.items() if _writer(leaf, each[0]) == process]
        if owned:
            spec = _array_spec(leaf, owned[0][1].shape)
            spec["kvstore"] = {**index, "path": f"{name}/"}
            opened.append((ts.open(spec, context=context), owned))
    writes = []
    for target, owned in opened:
        for place, data in owned:
            region = target.result()[slices_of(place)]
            # The caller keeps the data until this function returns.
            data = np.asarray(data)
            writes.append(region.write(data, can_reference_source_data_indefinitely=True))
    for write in writes:
        write.result()


def _merge_shards(folder: Path) -> None:
    """Merges the shards that all processes have written into one checkpoint."""
    context, item = _context(), folder / _ITEM
    whole = ts.KvStore.open(_index_spec(item), context=context).result()
    transaction = ts.Transaction(atomic=True)
    names = set()
    for directory in sorted(item.glob(_process_folder(folder, "*").name)):
        store = ts.KvStore.open(_index_spec(directory), context=context).result()
        store.experimental_copy_range_to(whole.with_transaction(transaction)).result()
        # A name is one path component, see `_escaped`.
        names |= {key.decode().partition("/")[0] for key in store.list().result()}
    transaction.commit_async().result()
    metadata = {
        "tree_metadata": {
            str((name,)): {
                "key_metadata": [{"key": name, "key_type": 2}],  # a key of a dictionary
                # Orbax can restore a "jax.Array" only on the devices that saved it.
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
    """Reads arrays of a checkpoint into new memory.

    Args:
        folder: directory of the checkpoint.
        wanted: name -> shape, dtype, and sharding, or None for a NumPy array.

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
            actual = f"{stored.dtype.name}{list(stored.shape)}"
            raise ValueError(f"{name} is stored as {actual}, not as {dtype.name}{list(shape)}")
        places = {tuple((0, size) for size in shape)}
        if sharding is not None:
            devices = sharding.addressable_devices_indices_map(shape)
            places = {index_of(slices, shape) for slices in devices.values()}
        pending[name] = {place: stored[slices_of(place)].read() for place in places}
    result = {}
    for name, (shape, _, sharding) in wanted.items():
        shards = {place: read.result() for place, read in pending.pop(name).items()}
        if sharding is None:
            (result[name],) = shards.values()
        else:
            result[name] = as_array(shape, sharding, shards.__getitem__)
    return result


def _context() -> ts.Context:
    return ts.Context(
        {
            "file_io_concurrency": {"limit": 128},
            "file_io_sync": False,  # the store synchronizes all files at the end
            "cache_pool": {"total_bytes_limit": 100_000_000},  # nodes of the index
        }
    )


def _process_folder(folder: Path, process: int | str) -> Path:
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


def _array_spec(leaf: Leaf, shard: tuple[int, ...]) -> dict[str, Any]:
    """TensorStore's spec for a new array whose shards have the shape `shard`.

    Not compressed: trained weights would shrink by about 8 %, and a save would take two to three
    times as long.
    """
    chunk = _chunk(shard, np.dtype(leaf.dtype).itemsize)
    return {
        "driver": "zarr3",
        "dtype": leaf.dtype,
        "metadata": {
            "shape": list(leaf.layout.shape),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        },
        "create": True,
        "open": True,
        "store_data_equal_to_fill_value": True,
    }


def _chunk(shard: tuple[int, ...], itemsize: int) -> list[int]:
    """The shape of a chunk. It divides the shape of a shard, so processes share no chunk."""
    chunk = list(shard)
    while np.prod(chunk, dtype=np.int64) * itemsize > _LARGEST_CHUNK:
        factor, axis = min((_smallest_factor(n), axis) for axis, n in enumerate(chunk) if n > 1)
        chunk[axis] //= factor
    return chunk


def _smallest_factor(number: int) -> int:
    return next((n for n in range(2, int(number**0.5) + 1) if number % n == 0), number)


def _writer(leaf: Leaf, place: Index) -> int:
    """Index of the process that writes a shard."""
    if not _spans(leaf):
        return 0
    shape = leaf.layout.shape
    return min(
        device.process_index
        for device, slices in leaf.layout.sharding.devices_indices_map(shape).items()
        if slices is not None and index_of(slices, shape) == place
    )
