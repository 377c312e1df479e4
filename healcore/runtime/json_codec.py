"""Converts the state of a loader or of a random generator to JSON text and back.

States may hold numbers, strings, containers, and arrays of numpy, torch and JAX: a JAX run may read
from a torch loader. Reading calls no function that the text names.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

from healcore import adapter_registry
from healcore.runtime.store import structure
from healcore.runtime.store.errors import StoreError

_FRAMEWORK_OF_PACKAGE = {"torch": "torch", "jax": "jax", "jaxlib": "jax"}
"""Package of a class -> framework whose adapter converts its values (`node_of`, `value_of`)."""


def dumps(value: Any, path: tuple[Any, ...]) -> str:
    """Converts a value to text. `path` is its place in the state, for error messages.

    Raises:
        UnsavableState: a part has no plain form.
    """

    def encode_other(path: tuple[Any, ...], value: Any) -> structure.Node | None:
        del path
        return _array_node(value) or _framework_node(value)

    return structure.dumps(structure.encode(value, path, encode_other)).decode()


def loads(text: str, path: tuple[Any, ...]) -> Any:
    """Converts text of `dumps` back to the value. Raises StoreError if the text is malformed."""

    def decode_other(tag: str, content: Any) -> Any:
        if tag in ("numpy", "number"):
            return _array(content, number=tag == "number")
        if tag in ("torch", "jax"):
            return adapter_registry.find(tag, "plain_values").value_of(content)
        raise ValueError(f"unknown kind of value {tag!r:.40}")

    try:
        return structure.decode(json.loads(text), decode_other)
    except StoreError as error:
        raise StoreError(f"{structure.place(path)}: {error}") from error
    except Exception as error:  # crafted or damaged text may raise anything
        raise StoreError(
            f"{structure.place(path)} is damaged, or healcore did not write it: "
            f"{type(error).__name__}: {str(error)[:200]}"
        ) from error


def _array_node(value: Any) -> structure.Node | None:
    if type(value) is not np.ndarray and not isinstance(value, np.generic):
        return None
    dtype = _dtype_name(value.dtype)
    if dtype is None:
        return None
    data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    content = {"dtype": dtype, "shape": list(value.shape), "bytes": data}
    return {"numpy" if isinstance(value, np.ndarray) else "number": content}


def _dtype_name(dtype: np.dtype) -> str | None:
    """Name of a dtype for `np.dtype`, or None for dtypes of objects and fields."""
    if dtype.hasobject or dtype.names is not None:
        return None
    for name in (dtype.str, dtype.name):  # for dtypes of ml_dtypes only the name works
        try:
            if np.dtype(name) == dtype:
                return name
        except TypeError:
            continue
    return None


def _array(content: dict[str, Any], *, number: bool) -> Any:
    data = base64.b64decode(content["bytes"])
    array = np.frombuffer(data, np.dtype(content["dtype"])).reshape(content["shape"]).copy()
    return array[()] if number else array


def _framework_node(value: Any) -> structure.Node | None:
    """The node of a torch or JAX value, or None. Imports no framework for other values."""
    for cls in type(value).__mro__:
        package = cls.__module__.partition(".")[0]
        if package in _FRAMEWORK_OF_PACKAGE:
            framework = _FRAMEWORK_OF_PACKAGE[package]
            node = adapter_registry.find(framework, "plain_values").node_of(value)
            return None if node is None else {framework: node}
    return None
