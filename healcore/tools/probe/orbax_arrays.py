"""Reads Orbax checkpoints array by array.

Uses TensorStore directly, because Orbax needs the devices of the run and reads whole trees.
TensorStore allocates as much memory as a file asks for, and some damaged files crash the process.
`limited_process` therefore runs these functions in a child process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from healcore import regular_file
from healcore.extras import require
from healcore.plugins.checkpoint_contents import Array, Contents, ProbeError, first_line


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

        def read() -> np.ndarray:
            try:
                values = np.asarray(opened.read().result()).reshape(-1)
            except Exception as error:
                raise self._damaged(name, error) from None
            # NumPy does not recognize NaN in the floats of ml_dtypes.
            return values if values.dtype.kind in "fiubc" else values.astype(np.float32)

        return Array(path, opened.dtype.name, tuple(opened.shape), read)

    def _damaged(self, name: str, error: Exception) -> ProbeError:
        return ProbeError(f"{self._item}: {name[:200]} is damaged: {first_line(error)}")
