"""A checkpoint of healcore's own stores: its structure from `state.json`, its arrays by name."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from healcore.tools.probe.contents.contents import Array, Contents
from healcore.tools.probe.contents.floats import widened
from healcore.tools.probe.verdict import ProbeError

_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_KEY = re.compile(rf"\.(\w+)|\[({_QUOTED})\]|\[<flat index (\d+)>\]|\[([^\]]*)\]")
"""One step of a path as JAX writes it: an attribute, a string, the number of a leaf, a number."""
_READERS = {"dcp": "healcore.torch.probing_dcp", "orbax": "healcore.jax.probing"}


def open_stored(folder: Path, format: str) -> Contents:
    """Opens one checkpoint.

    Args:
        folder: its directory.
        format: of its manifest: "dcp" or "orbax".

    Raises:
        ProbeError: it is damaged, or its format is not known.
    """
    if format not in _READERS:
        raise ProbeError(f"{folder} is of format {format!r}, which this version does not know")
    data = folder / "data"
    leaves = list(_leaves(folder))
    arrays: Mapping[str, Array] = {}
    if data.is_dir():
        names = [content["name"] for _, tag, content in leaves if tag == "array"]
        arrays = importlib.import_module(_READERS[format]).stored_arrays(data, names)
    found, values, notes = [], {}, []
    for path, tag, content in leaves:
        if tag == "array":
            array = _placed(path, content, arrays.get(content["name"]))
            if array is None:
                raise ProbeError(f"{folder}: the data of {content['name']} is not there")
            found.append(array)
        elif tag == "value":
            values[path] = content
        else:
            notes.append(f"{'.'.join(path)} was not looked at: it is a pickled object")
    return Contents(f"checkpoint of healcore ({format})", found, values, tuple(notes))


def _leaves(folder: Path) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """Path, kind and content of everything in the saved state."""
    for file in sorted(folder.glob("state*.json")):
        try:
            entries = json.loads(file.read_bytes())
            for name, entry in entries.items():
                if "tree" in entry:
                    yield from _walk(entry["tree"], (name,))
                for keys, node in entry.get("leaves", ()):
                    yield from _walk(node, (name, *parsed(keys)))
        except (
            OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError
        ) as error:  # fmt: skip
            raise ProbeError(f"{file} is damaged: {error}") from None


def _walk(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    if not isinstance(node, dict):
        yield path, "value", node
    elif "dict" in node:
        for key, part in node["dict"]:
            # Dotted keys are paths of modules: "layers.0.weight".
            parts = str(key).split(".") if not isinstance(key, dict) else [json.dumps(key)]
            yield from _walk(part, (*path, *parts))
    else:
        ((tag, content),) = node.items()
        if tag == "deque":
            tag, content = "list", content["parts"]
        if tag in ("list", "tuple"):
            for number, part in enumerate(content):
                yield from _walk(part, (*path, str(number)))
        elif tag == "float":
            yield path, "value", float(content)
        elif tag in ("array", "pickle"):
            yield path, tag, content


def parsed(keys: str) -> tuple[str, ...]:
    """The parts of a path as JAX writes it: `.opt_state[0].nu['dense']['kernel']`."""
    steps = (found.groups() for found in _KEY.finditer(keys))
    return tuple(
        str(ast.literal_eval(text)) if text is not None else attribute or leaf or number
        for attribute, text, leaf, number in steps
    )


def _placed(path: tuple[str, ...], node: Mapping[str, Any], saved: Array | None) -> Array | None:
    """The array of a node; None if its data is not there."""
    shape = tuple(node["shape"])
    if not np.prod(shape, dtype=np.int64):
        return Array(path, node["dtype"], shape, lambda: iter(()))
    if saved is None:
        return None
    # DCP has NumPy's arrays as bytes, Orbax has them as they are.
    if saved.dtype == "uint8" and node["kind"] in ("numpy", "scalar") and saved.shape != shape:
        dtype = np.dtype(node["dtype"])
        return Array(path, dtype.name, shape, _viewed(saved, dtype.name), saved.storage)
    return saved._replace(path=path, shape=shape)


def _viewed(saved: Array, dtype: str) -> Callable[[], Iterator[np.ndarray]]:
    def read() -> Iterator[np.ndarray]:
        for piece in saved.read():
            yield widened(piece, dtype)

    return read
