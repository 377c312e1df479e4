"""Opening Orbax checkpoints for `healcore probe`: array by array, a chunk in memory at a time.

Through TensorStore, which Orbax writes with, and not through Orbax: that would want to know the
devices, and read whole trees.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

from healcore.tools.probe.contents.contents import PIECE, Array, Contents
from healcore.tools.probe.verdict import ProbeError

_ITEM = "state"
"""As `OrbaxStore` names it."""


def open_orbax(folder: Path) -> Contents:
    """An item of an Orbax checkpoint, or a checkpoint with all of its items.

    Raises:
        ProbeError: it is damaged, or older than the format that has a `_METADATA`.
    """
    items = (
        [folder]
        if (folder / "_METADATA").exists()
        else sorted(path.parent for path in folder.glob("*/_METADATA"))
    )
    if not items:
        raise ProbeError(f"{folder} has no _METADATA: it is no Orbax checkpoint of today's format")
    arrays, values = [], {}
    for item in items:
        prefix = () if item == folder else (item.name,)
        tree = _Tree(item)
        for keys, entry in tree.entries.items():
            path = (*prefix, *keys)
            if entry.get("skip_deserialize") or entry.get("value_type") in ("None", "string"):
                values[path] = None
                continue
            arrays.append(_array(path, item, ".".join(keys), tree))
    return Contents("Orbax checkpoint", arrays, values)


def stored_arrays(data: Path, names: Iterable[str]) -> dict[str, Array]:
    """Arrays of a checkpoint of `OrbaxStore`; those that are not there are left out.

    Args:
        data: its directory `data`.
        names: as its `state.json` has them.

    Raises:
        ProbeError: it is damaged.
    """
    item = data / _ITEM
    tree = _Tree(item)
    wanted = {name: (_escaped(name),) for name in names}
    return {
        name: _array(keys, item, keys[0], tree)
        for name, keys in wanted.items()
        if keys in tree.entries
    }


class _Tree:
    """What `_METADATA` says of an item."""

    def __init__(self, item: Path) -> None:
        try:
            content = json.loads((item / "_METADATA").read_bytes())
            self.entries: dict[tuple[str, ...], Mapping[str, Any]] = {
                tuple(str(key["key"]) for key in entry["key_metadata"]): entry["value_metadata"]
                for entry in content["tree_metadata"].values()
            }
            self.ocdbt = bool(content.get("use_ocdbt", (item / "manifest.ocdbt").exists()))
            self.zarr3 = bool(content.get("use_zarr3", False))
            # Shared by the arrays, so that an index of many of them is read once.
            self.context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 64 << 20}})
        except OSError as error:
            raise ProbeError(f"{item / '_METADATA'} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ProbeError(f"{item / '_METADATA'} is damaged") from None


def _tree(item: Path) -> _Tree:
    return _Tree(item)


def _array(path: tuple[str, ...], item: Path, name: str, tree: _Tree) -> Array:
    opened = _opened(item, name, tree)
    return Array(path, opened.dtype.name, tuple(opened.shape), _reader(item, name, opened))


def _opened(item: Path, name: str, tree: _Tree) -> Any:
    base = {"driver": "file", "path": f"{item}/"}
    if tree.ocdbt:
        store: dict[str, Any] = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    else:
        store = {"driver": "file", "path": f"{item / name}/"}
    spec = {"driver": "zarr3" if tree.zarr3 else "zarr", "kvstore": store}
    try:
        return tensorstore.open(spec, open=True, read=True, context=tree.context).result()
    except Exception as error:  # TensorStore raises ValueError for anything that is not as it was
        raise ProbeError(f"{item}: {name} is damaged: {_line(error)}") from None


def _reader(item: Path, name: str, opened: Any) -> Callable[[], Iterator[np.ndarray]]:
    def read() -> Iterator[np.ndarray]:
        for box in _boxes(tuple(opened.shape), opened.chunk_layout.read_chunk.shape):
            try:
                values = np.asarray(opened[box].read().result()).reshape(-1)
            except Exception as error:
                raise ProbeError(f"{item}: {name} is damaged: {_line(error)}") from None
            for at in range(0, len(values), PIECE):
                piece = values[at : at + PIECE]
                # ml_dtypes' floats: NumPy cannot tell their NaN.
                yield piece if piece.dtype.kind in "fiubc" else piece.astype(np.float32)

    return read


def _boxes(shape: tuple[int, ...], chunk: Any) -> Iterator[tuple[slice, ...]]:
    """The chunks of an array, in order: reading across them would decode some of them twice."""
    steps = [max(1, step or size) for size, step in zip(shape, chunk or shape, strict=True)]
    starts = (range(0, size, step) for size, step in zip(shape, steps, strict=True))
    for corner in itertools.product(*starts):
        yield tuple(
            slice(at, min(at + step, size))
            for at, step, size in zip(corner, steps, shape, strict=True)
        )


def _escaped(name: str) -> str:
    """What `OrbaxStore` makes of a name."""
    return re.sub(r"[^A-Za-z0-9_.\-]", lambda found: f"%{ord(found[0]):02X}", name)


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__
