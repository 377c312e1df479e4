"""Reads a checkpoint of a healcore store: the tree in `state.json`, the arrays by name."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from healcore import adapter_registry, regular_file
from healcore.plugins.checkpoint_contents import Array, Contents, PathBudget, ProbeError, shape_of
from healcore.tools.probe import orbax_arrays
from healcore.tools.probe.safetensors_file import decode_elements

_QUOTED = r"""'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+\""""
_KEY = re.compile(rf"\.(\w+)|\[({_QUOTED})\]|\[<flat index (\d+)>\]|\[([^\]]*)\]")
"""One part of a JAX key path: an attribute, a string key, a leaf number or another key."""
_NUMBER = re.compile(r"[a-z]{1,8}\d{0,3}")
"""Name of a numeric dtype. `np.dtype` would also accept a long description of a structure."""


def open_stored(folder: Path, format: str) -> Contents:
    """Opens one checkpoint of a store; `format` is the format in its manifest, "dcp" or "orbax"."""
    if format not in ("dcp", "orbax"):
        raise ProbeError(f"{folder} is of format {format!r}, which this version cannot read")
    data = folder / "data"
    leaves = list(_leaves(folder))
    arrays: Mapping[str, Array] = {}
    if data.is_dir():
        names = [content["name"] for _, tag, content in leaves if tag == "array"]
        dcp = format == "dcp"
        reader = adapter_registry.find("torch", "checkpoint_reader") if dcp else orbax_arrays
        arrays = reader.stored_arrays(data, names)
    opened, values, notes = [], {}, []
    for path, tag, content in leaves:
        if tag == "array":
            array = _array(path, content, arrays.get(content["name"]))
            if array is None:
                raise ProbeError(f"{folder}: the data of {content['name']} is missing")
            opened.append(array)
        elif tag == "value":
            values[path] = content
        else:
            notes.append(f"{'.'.join(path)} was not read: it is a pickled object")
    return Contents(f"checkpoint of healcore ({format})", opened, values, tuple(notes))


def _leaves(folder: Path) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """Yields path, kind ("array", "value" or "pickle") and content of each leaf of the state."""
    for file in sorted(folder.glob("state*.json")):
        try:
            if not file.is_file():
                raise ValueError("it is not a regular file")
            content = regular_file.read(file)
            budget = PathBudget(len(content))
            for name, entry in json.loads(content).items():
                if "tree" in entry:
                    yield from _walk(entry["tree"], (name,), budget)
                for keys, node in entry.get("leaves", ()):
                    yield from _walk(node, (name, *parse_key_path(keys)), budget)
        except (
            OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError, SyntaxError
        ) as error:  # fmt: skip
            raise ProbeError(f"{file} is damaged: {str(error)[:200]}") from None


def _walk(
    node: Any, path: tuple[str, ...], budget: PathBudget
) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    budget.take(path)
    if not isinstance(node, dict):
        yield path, "value", node
    elif "dict" in node:
        for key, part in node["dict"]:
            # A dotted key is a module path: "layers.0.weight".
            parts = str(key).split(".") if not isinstance(key, dict) else [json.dumps(key)]
            yield from _walk(part, (*path, *parts), budget)
    else:
        ((tag, content),) = node.items()
        if tag == "deque":
            tag, content = "list", content["parts"]
        if tag in ("list", "tuple"):
            for number, part in enumerate(content):
                yield from _walk(part, (*path, str(number)), budget)
        elif tag == "float":
            yield path, "value", float(content)
        elif tag == "array":
            if any(type(content[key]) is not str for key in ("name", "dtype", "kind")):
                raise ValueError("an array in it has no name, dtype or kind")
            yield path, tag, {**content, "shape": shape_of(content["shape"])}
        elif tag == "pickle":
            yield path, tag, content


def parse_key_path(keys: str) -> tuple[str, ...]:
    """Splits a JAX key path such as `.opt_state[0].nu['dense']['kernel']` into its parts.

    Matches part by part, because a search takes quadratic time in a hostile text full of brackets.
    The text after the first mismatch is one part.
    """
    parts, at = [], 0
    while at < len(keys):
        match = _KEY.match(keys, at)
        if match is None:
            return (*parts, keys[at:])
        attribute, text, leaf, number = match.groups()
        parts.append(
            str(ast.literal_eval(text)) if text is not None else attribute or leaf or number
        )
        at = match.end()
    return tuple(parts)


def _array(path: tuple[str, ...], node: Mapping[str, Any], saved: Array | None) -> Array | None:
    shape = node["shape"]
    if not math.prod(shape):
        return Array(path, node["dtype"], shape, lambda: iter(()))
    if saved is None:
        return None
    # The DCP store saves NumPy arrays as bytes, the Orbax store as arrays.
    if saved.dtype == "uint8" and node["kind"] in ("numpy", "scalar") and saved.shape != shape:
        dtype = node["dtype"].removeprefix("<")
        name = np.dtype(dtype).name if _NUMBER.fullmatch(dtype) else dtype
        return Array(path, name, shape, _reader(saved, name), saved.storage)
    return saved._replace(path=path, shape=shape)


def _reader(saved: Array, dtype: str) -> Callable[[], Iterator[np.ndarray]]:
    def read() -> Iterator[np.ndarray]:
        for piece in saved.read():
            yield decode_elements(piece, dtype)

    return read
