"""Converts nested Python values to JSON, with their arrays in the text or kept elsewhere.

In the JSON an object is a node with one tag. All other values are stored unchanged:
`null true 3 1.5 "text"`, `{"list": […]}`, `{"tuple": […]}`, `{"dict": [[key, value], …]}`,
`{"float": "nan"}`, `{"bytes": base64}`, `{"complex": [re, im]}`, `{"array": {"name": …, …}}`,
`{"deque": [[…], 5]}`, `{"set": […]}`.
A `Counter` and an `OrderedDict` are like a "dict", with their own tag.
Keys are nodes too, so that 0, "0" and (0, 1) stay apart: optimizers number their parameters.
"""

from __future__ import annotations

import base64
import inspect
import json
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from healcore import adapter_registry
from healcore.runtime.store.checkpoints import StoreError, UnsavableState

Node = Any
"""A JSON-safe value as described above."""
Path = tuple[Any, ...]
"""The keys that lead to a value, for its name and for errors."""
Special = Callable[[Path, Any], Node | None]
"""Encodes a value that this module cannot, such as an array. Returns None for an unknown value."""
Fetch = Callable[[str, Any], Any]
"""Decodes the tag and the content of a node whose tag this module does not know."""

_PLAIN_TYPES = {type(None), bool, int, str}
"""Types that JSON stores unchanged."""
_KEY_TYPES = (str, int, float, bool, tuple, bytes, type(None))
_SEQUENCES = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
_DICTS = {"dict": dict, "OrderedDict": OrderedDict, "Counter": lambda items: Counter(dict(items))}
_LEAVES: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "float": (float, repr, float),  # NaN and Inf
    "complex": (
        complex,
        lambda x: [repr(x.real), repr(x.imag)],
        lambda x: complex(*map(float, x)),
    ),
    "bytes": (bytes, lambda x: base64.b64encode(x).decode(), base64.b64decode),
}
"""Tag, the name of a type -> the type, encoder and decoder of the content of its node."""
_FRAMEWORK_OF_PACKAGE = {"torch": "torch", "jax": "jax", "jaxlib": "jax"}
"""Package of a class -> framework whose adapter converts its values (`node_of`, `value_of`)."""


def attribute(item: object, name: str) -> Any:
    """An attribute of an item of the state, or None.

    A `__getattr__` is not called, because `flax.nnx.Rngs` returns a value for every name.
    """
    if inspect.getattr_static(item, name, None) is None:
        return None
    return getattr(item, name)


def path_text(path: Path) -> str:
    """A path as a Python expression: `state["model"]["layer"][0]`."""
    return "state" + "".join(f"[{part!r}]" for part in path)


def class_name(kind: type) -> str:
    """A class's name with its module, as in a checkpoint."""
    return f"{kind.__module__}.{kind.__qualname__}"


def encode(value: Any, path: Path, special: Special) -> Node:
    """Converts a value to a node.

    Args:
        value: nested containers and numbers of Python, and whatever `special` encodes.
        path: place of the value in the state, for the names of arrays and for errors.
        special: encodes a value that this module cannot, such as an array.

    Raises:
        UnsavableState: nothing can encode the value.
    """
    # By exact type: an enum or a NumPy number, which may also be an int, would lose its type.
    kind = type(value)
    if kind in _PLAIN_TYPES or (kind is float and math.isfinite(value)):
        return value
    tag = kind.__name__
    if tag in _LEAVES and _LEAVES[tag][0] is kind:
        return {tag: _LEAVES[tag][1](value)}
    if kind in (dict, OrderedDict, Counter):
        return {tag: [_encode_item(item, path, special) for item in value.items()]}
    if _SEQUENCES.get(tag) is kind:
        return {tag: _encode_parts(value, path, special)}
    if kind is deque:
        return {"deque": [_encode_parts(value, path, special), value.maxlen]}
    node = special(path, value)
    if node is None:
        raise UnsavableState(
            f"{path_text(path)} is a {class_name(kind).removeprefix('builtins.')}, which has no "
            "plain form: keep arrays, numbers, strings, lists, tuples and dictionaries in the "
            f"state, or give the object a state_dict() that returns such values"
        )
    return node


def _encode_parts(value: Iterable[Any], path: Path, special: Special) -> list[Node]:
    """The nodes of the items of a container."""
    parts = list(value)
    if set(map(type, parts)) <= _PLAIN_TYPES:
        return parts
    return [encode(part, (*path, i), special) for i, part in enumerate(parts)]


def _encode_item(item: tuple[Any, Any], path: Path, special: Special) -> list[Node]:
    """The nodes of a key and its value."""
    key, part = item
    if not isinstance(key, _KEY_TYPES):
        raise UnsavableState(
            f"{path_text(path)} has the key {key!r}, a {type(key).__name__}: "
            "keys are strings, numbers or tuples of them"
        )
    # Keys hold no arrays.
    return [encode(key, path, lambda *_: None), encode(part, (*path, key), special)]


def decode(node: Node, fetch: Fetch) -> Any:
    """Converts a node back to its value.

    Args:
        node: result of `encode`. A damaged node raises any exception.
        fetch: decodes nodes that `special` has encoded.
    """
    if not isinstance(node, dict):
        return node
    ((tag, content),) = node.items()
    if tag in _DICTS:
        return _DICTS[tag]([(decode(key, fetch), decode(part, fetch)) for key, part in content])
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](_decode_parts(content, fetch))
    if tag == "deque":
        parts, maxlen = content
        return deque(_decode_parts(parts, fetch), maxlen)
    return _LEAVES[tag][2](content) if tag in _LEAVES else fetch(tag, content)


def _decode_parts(parts: list[Node], fetch: Fetch) -> list[Any]:
    """The values of the items of a container."""
    if dict not in set(map(type, parts)):
        return parts
    return [decode(part, fetch) for part in parts]


def arrays_of(node: Any) -> Iterator[dict[str, Any]]:
    """The content of every array node in a node or in an entry, in order.

    Args:
        node: a node, or a mapping or list of nodes at any depth.

    Yields:
        The content of each `{"array": content}`: name, dtype, shape and kind.
    """
    if isinstance(node, dict):
        for tag, content in node.items():
            if tag == "array":
                yield content
            else:
                yield from arrays_of(content)
    elif isinstance(node, list):
        for part in node:
            yield from arrays_of(part)


def dumps(value: Any, path: Path) -> str:
    """Converts the state of a loader or a random generator to text, with its arrays.

    The arrays may be of NumPy, torch and JAX: a JAX run may read from a torch loader. The text is
    JSON, and `loads` reads it without calling anything that it names: a pickle could run code.

    Args:
        value: nested Python values, with arrays of NumPy, torch or JAX.
        path: place of the value in the state, for error messages.

    Raises:
        UnsavableState: a part has no plain form.
    """
    node = encode(value, path, framework_node)
    return json.dumps(node, separators=(",", ":"), allow_nan=False)


def loads(text: str, path: Path) -> Any:
    """Converts text of `dumps` back to the value, and calls no function that the text names.

    Args:
        text: result of `dumps`, from a file that anybody may have written.
        path: place of the value in the state, for error messages.

    Raises:
        StoreError: the text is malformed.
    """
    try:
        return decode(json.loads(text), decode_other)
    except StoreError as error:
        raise StoreError(f"{path_text(path)}: {error}") from error
    except Exception as error:  # crafted or damaged text may raise anything
        raise StoreError(
            f"{path_text(path)} is damaged, or healcore did not write it: "
            f"{type(error).__name__}: {str(error)[:200]}"
        ) from error


def framework_node(_: Path, value: Any) -> Node | None:
    """The node of a value of NumPy, torch or JAX, or None. Imports no other framework."""
    if type(value) is np.ndarray:
        tag, content = "numpy", pack_array(value)
    elif isinstance(value, np.generic):
        tag, content = "number", pack_array(value)
    else:
        package = type(value).__module__.partition(".")[0]
        if package not in _FRAMEWORK_OF_PACKAGE:
            return None
        tag = _FRAMEWORK_OF_PACKAGE[package]
        content = adapter_registry.find(tag, "plain_values").node_of(value)
    return None if content is None else {tag: content}


def decode_other(tag: str, content: Any) -> Any:
    """Decodes a node of `framework_node`. For `decode`.

    Raises:
        ValueError: the tag is none of "numpy", "number", "torch" and "jax".
    """
    if tag == "numpy":
        return unpack_array(content)
    if tag == "number":
        return unpack_array(content)[()]
    if tag in ("torch", "jax"):
        return adapter_registry.find(tag, "plain_values").value_of(content)
    raise ValueError(f"unknown kind of value {tag!r:.40}")


def pack_array(array: Any) -> dict[str, Any] | None:
    """Converts a NumPy array or number to JSON.

    Args:
        array: the array, of any shape, or a NumPy number.

    Returns:
        "dtype", "shape" and "bytes". None if the dtype (of objects, of fields) has no name.
    """
    dtype = array.dtype
    if dtype.hasobject or dtype.names is not None:
        return None
    name = dtype.name if dtype.isbuiltin == 2 else dtype.str  # 2: a dtype of ml_dtypes
    text = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": name, "shape": list(array.shape), "bytes": text}


def unpack_array(content: Mapping[str, Any]) -> np.ndarray:
    """Converts JSON of `pack_array` back to the array, in writable memory.

    Args:
        content: result of `pack_array`. Raises any exception for other JSON.
    """
    data = np.frombuffer(base64.b64decode(content["bytes"]), np.uint8).copy()
    return data.view(np.dtype(content["dtype"])).reshape(content["shape"])
