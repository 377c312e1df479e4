"""Converts nested Python values to JSON, with their arrays in the text or kept elsewhere.

In the JSON an object is a node with one tag, the name of a type, and a list of what the type is
made from. All other values are stored unchanged: `null true 3 1.5 "text"`, `{"list": [1, 2]}`,
`{"dict": [[key, value], …]}`, `{"float": ["nan"]}`, `{"deque": [{"list": […]}, 5]}`,
`{"array": {"name": …, …}}`. Keys are nodes too, so that 0, "0" and (0, 1) stay apart: optimizers
number their parameters.
"""

from __future__ import annotations

import base64
import inspect
import json
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
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
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda items: Counter(dict(items)),
}
"""Name of a type -> what makes a value from its items."""
_KINDS: dict[str, tuple[type, Callable[[Any], list[Any]], Callable[[list[Any]], Any]]] = {
    "list": (list, list, list),
    "tuple": (tuple, list, tuple),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "deque": (deque, lambda x: [[*x], x.maxlen], lambda parts: deque(*parts)),
    "float": (float, lambda x: [repr(x)], lambda parts: float(*parts)),  # NaN and Inf
    "complex": (
        complex,
        lambda x: [repr(x.real), repr(x.imag)],
        lambda parts: complex(*map(float, parts)),
    ),
    "bytes": (
        bytes,
        lambda x: [base64.b64encode(x).decode()],
        lambda parts: base64.b64decode(*parts),
    ),
}
"""Name of a type -> the type, the values that it is made from, and what makes it from them."""


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
    if kind in (dict, OrderedDict, Counter):
        items = [(key, part, (*path, key)) for key, part in value.items()]
        # Keys hold no arrays.
        return {
            tag: [[encode(k, at, lambda *_: None), encode(x, at, special)] for k, x, at in items]
        }
    if tag in _KINDS and _KINDS[tag][0] is kind:
        parts = _KINDS[tag][1](value)
        if not set(map(type, parts)) <= _PLAIN_TYPES:
            parts = [encode(part, (*path, i), special) for i, part in enumerate(parts)]
        return {tag: parts}
    node = special(path, value)
    if node is None:
        raise UnsavableState(
            f"{path_text(path)} is a {class_name(kind).removeprefix('builtins.')}, which has no "
            "plain form: keep arrays, numbers, strings, lists, tuples and dictionaries in the "
            f"state, or give the object a state_dict() that returns such values"
        )
    return node


def decode(node: Node, fetch: Fetch) -> Any:
    """Converts a node back to its value.

    Args:
        node: result of `encode`. A damaged node raises any exception.
        fetch: decodes nodes that `special` has encoded.
    """
    if not isinstance(node, dict):
        return node
    ((tag, content),) = node.items()
    if tag in _MAPPINGS:
        return _MAPPINGS[tag]([(decode(key, fetch), decode(part, fetch)) for key, part in content])
    if tag not in _KINDS:
        return fetch(tag, content)
    if dict in set(map(type, content)):
        content = [decode(part, fetch) for part in content]
    return _KINDS[tag][2](content)


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
        tag = type(value).__module__.partition(".")[0].removesuffix("lib")  # jaxlib
        if tag not in ("torch", "jax"):
            return None
        content = adapter_registry.find(tag, "plain_values").node_of(value)
    if content is None:
        return None
    return {tag: content}


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
