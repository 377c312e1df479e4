"""Reads Orbax checkpoints array by array, one chunk in memory at a time.

Uses TensorStore directly, because Orbax needs the devices of the run and reads whole trees.
TensorStore allocates as much memory as a file asks for, and some damaged files crash the process.
`limited_process` therefore runs these functions in a child process.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from healcore import regular_file
from healcore.extras import require
from healcore.plugins.checkpoint_contents import PIECE, Array, Contents, ProbeError, first_line


def open_orbax(folder: Path) -> Contents:
    """Opens an item of an Orbax checkpoint, or a checkpoint with all of its items.

    Raises ProbeError if the checkpoint is damaged.
    """
    single = (folder / "_METADATA").exists()
    items = [folder] if single else sorted(path.parent for path in folder.glob("*/_METADATA"))
    arrays, values = [], {}
    for item in items:
        prefix = () if single else (item.name,)
        tree = _Tree(item)
        for keys, entry in tree.entries.items():
            # A key in healcore's own store is a dotted path.
            path = (*prefix, *(part for key in keys for part in key.split(".")))
            if entry.get("skip_deserialize") or entry.get("value_type") in ("None", "string"):
                values[path] = None
                continue
            arrays.append(tree.array(path, ".".join(keys)))
    return Contents("Orbax checkpoint", arrays, values)


class _Tree:
    """The index of one item, and the settings to open its arrays."""

    def __init__(self, item: Path) -> None:
        index = item / "_METADATA"
        try:
            content = json.loads(regular_file.read(index))
            self.entries: dict[tuple[str, ...], Mapping[str, Any]] = {
                tuple(str(key["key"]) for key in entry["key_metadata"]): {**entry["value_metadata"]}
                for entry in content["tree_metadata"].values()
            }
            self._ocdbt = bool(content.get("use_ocdbt", (item / "manifest.ocdbt").exists()))
            self._driver = "zarr3" if content.get("use_zarr3", False) else "zarr"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ProbeError(f"{index} is damaged") from None
        require("jax", "tensorstore")
        import tensorstore

        self._open = tensorstore.open
        # All arrays share the context, so that TensorStore reads their common index once.
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 64 << 20}})
        self._item = item

    def array(self, path: tuple[str, ...], name: str) -> Array:
        """Opens one array. Raises ProbeError if the array is damaged."""
        root = f"{self._item}/"
        store: dict[str, Any] = {"driver": "file", "path": f"{root}{name}/"}
        if self._ocdbt:
            base = {"driver": "file", "path": root}
            store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        elif os.path.commonpath((root, os.path.normpath(store["path"]))) != root[:-1]:
            raise ProbeError(f"{self._item}: {name[:200]} is outside this directory")
        spec = {"driver": self._driver, "kvstore": store}
        try:
            opened = self._open(spec, open=True, read=True, context=self._context).result()
        except Exception as error:  # TensorStore raises ValueError for any damage
            raise self._damaged(name, error) from None

        def read() -> Iterator[np.ndarray]:
            try:
                yield from _pieces(opened)
            except Exception as error:
                raise self._damaged(name, error) from None

        return Array(path, opened.dtype.name, tuple(opened.shape), read)

    def _damaged(self, name: str, error: Exception) -> ProbeError:
        return ProbeError(f"{self._item}: {name[:200]} is damaged: {first_line(error)}")


def _pieces(opened: Any) -> Iterator[np.ndarray]:
    """Yields the elements of an array, 1-d, in dtypes that NumPy can compare and add.

    Reads chunk by chunk, because a read across chunks would decode some chunks twice.
    """
    shape = tuple(opened.shape)
    chunk = opened.chunk_layout.read_chunk.shape or shape
    steps = [max(1, step or size) for size, step in zip(shape, chunk, strict=True)]
    starts = (range(0, size, step) for size, step in zip(shape, steps, strict=True))
    for corner in itertools.product(*starts):
        box = tuple(
            slice(at, min(at + step, size))
            for at, step, size in zip(corner, steps, shape, strict=True)
        )
        values = np.asarray(opened[box].read().result()).reshape(-1)
        for at in range(0, len(values), PIECE):
            piece = values[at : at + PIECE]
            # NumPy does not recognize NaN in the floats of ml_dtypes.
            yield piece if piece.dtype.kind in "fiubc" else piece.astype(np.float32)
