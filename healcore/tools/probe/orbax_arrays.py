"""Reads Orbax checkpoints array by array, one chunk in memory at a time.

It uses TensorStore directly: Orbax needs the devices of the run and reads whole trees. TensorStore
allocates as much as a file asks for, and some damage ends the process: see `limited_process`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from healcore import regular_file
from healcore.extras import require
from healcore.plugins.checkpoint_contents import (
    PIECE,
    Array,
    Contents,
    PathBudget,
    ProbeError,
    first_line,
    shape_of,
)

_ITEM = "state"
_LARGEST_CHUNK = 1 << 38
"""Bytes; a larger array of TensorStore ends the process instead of raising an error."""


def open_orbax(folder: Path) -> Contents:
    """Opens an item of an Orbax checkpoint, or a checkpoint with all of its items.

    Raises ProbeError if it is damaged, or of an older format without `_METADATA`.
    """
    items = (
        [folder]
        if (folder / "_METADATA").exists()
        else sorted(path.parent for path in folder.glob("*/_METADATA"))
    )
    if not items:
        raise ProbeError(
            f"{folder} has no _METADATA: it is no Orbax checkpoint of the current format"
        )
    arrays, values = [], {}
    for item in items:
        prefix = () if item == folder else (item.name,)
        tree = _Tree(item)
        for keys, entry in tree.entries.items():
            path = (*prefix, *keys)
            if entry.get("skip_deserialize") or entry.get("value_type") in ("None", "string"):
                values[path] = None
                continue
            arrays.append(tree.array(path, ".".join(keys)))
    return Contents("Orbax checkpoint", arrays, values)


def stored_arrays(data: Path, names: Iterable[str]) -> dict[str, Array]:
    """The named arrays in the directory `data` of an `OrbaxStore` checkpoint that exist."""
    tree = _Tree(data / _ITEM)
    wanted = {name: (_escaped(name),) for name in names}
    return {
        name: tree.array(keys, keys[0]) for name, keys in wanted.items() if keys in tree.entries
    }


class _Tree:
    """One item: its index, and the settings to open its arrays."""

    def __init__(self, item: Path) -> None:
        at = item / "_METADATA"
        try:
            if not at.is_file():
                raise ValueError
            data = regular_file.read(at)
            content, budget = json.loads(data), PathBudget(len(data))
            self.entries: dict[tuple[str, ...], Mapping[str, Any]] = {
                budget.take(tuple(str(key["key"])[:1000] for key in entry["key_metadata"])): {
                    **entry["value_metadata"]
                }
                for entry in content["tree_metadata"].values()
            }
            self._ocdbt = bool(content.get("use_ocdbt", (item / "manifest.ocdbt").exists()))
            self._driver = "zarr3" if content.get("use_zarr3", False) else "zarr"
        except OSError as error:
            raise ProbeError(f"{at} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ProbeError(f"{at} is damaged") from None
        require("jax", "tensorstore")
        import tensorstore

        self._open = tensorstore.open
        # Shared by all arrays, so that their common index is read once.
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 64 << 20}})
        self._item = item

    def array(self, path: tuple[str, ...], name: str) -> Array:
        """Opens one array, or raises ProbeError if it is damaged."""
        place = f"{self._item}/"
        store: dict[str, Any] = {"driver": "file", "path": f"{place}{name}/"}
        if self._ocdbt:
            base = {"driver": "file", "path": place}
            store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        elif os.path.commonpath((place, os.path.normpath(store["path"]))) != place[:-1]:
            raise ProbeError(f"{self._item}: {name[:200]} is outside of it")
        spec = {"driver": self._driver, "kvstore": store}
        try:
            opened = self._open(spec, open=True, read=True, context=self._context).result()
            dtype, shape = opened.dtype.name, shape_of(list(opened.shape))
        except Exception as error:  # TensorStore raises ValueError for any damage
            raise self._damaged(name, error) from None

        def read() -> Iterator[np.ndarray]:
            try:
                yield from _pieces(opened)
            except Exception as error:
                raise self._damaged(name, error) from None

        return Array(path, dtype, shape, read)

    def _damaged(self, name: str, error: Exception) -> ProbeError:
        return ProbeError(f"{self._item}: {name[:200]} is damaged: {first_line(error)}")


def _pieces(opened: Any) -> Iterator[np.ndarray]:
    """The elements of an array, 1-d, in dtypes that NumPy can compare and add.

    Reads chunk by chunk: reading across chunks would decode some chunks twice.
    """
    shape = tuple(opened.shape)
    chunk = opened.chunk_layout.read_chunk.shape or shape
    steps = [max(1, step or size) for size, step in zip(shape, chunk, strict=True)]
    if math.prod(steps) * opened.dtype.numpy_dtype.itemsize > _LARGEST_CHUNK:
        raise ValueError("a chunk of it is larger than any memory")
    starts = (range(0, size, step) for size, step in zip(shape, steps, strict=True))
    for corner in itertools.product(*starts):
        box = tuple(slice(at, at + step) for at, step in zip(corner, steps, strict=True))
        box = tuple(
            slice(part.start, min(part.stop, size)) for part, size in zip(box, shape, strict=True)
        )
        values = np.asarray(opened[box].read().result()).reshape(-1)
        for at in range(0, len(values), PIECE):
            piece = values[at : at + PIECE]
            # NumPy does not know the NaN of ml_dtypes' floats.
            yield piece if piece.dtype.kind in "fiubc" else piece.astype(np.float32)


def _escaped(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.\-]", lambda found: f"%{ord(found[0]):02X}", name)
