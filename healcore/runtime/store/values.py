"""Converts nested Python values to JSON, with their arrays in the text or kept elsewhere.

In the JSON an object is a node with one tag. All other values are stored unchanged:
`null true 3 1.5 "text"`, `{"list": […]}`, `{"tuple": […]}`, `{"dict": [[key, value], …]}`,
`{"float": "nan"}`, `{"bytes": base64}`, `{"complex": [re, im]}`, `{"array": {"name": …, …}}`,
`{"deque": {"parts": […], "maxlen": 5}}`, `{"set": […]}`, `{"range": [0, 9, 1]}`,
`{"bytearray": base64}`,
`{"named": {"class": "module.Pair", "fields": [names], "parts": [nodes]}}` (a named tuple).
A dictionary of another type has a "type": "OrderedDict", "Counter", or "defaultdict:int".
Keys are nodes too, so that 0, "0" and (0, 1) stay apart: optimizers number their parameters.
"""

from __future__ import annotations

import base64
import inspect
import json
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
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
_CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_FACTORIES = (None, bool, bytes, dict, float, int, list, set, str, tuple)
_MAPPINGS: dict[str, Callable[[list[tuple[Any, Any]]], dict[Any, Any]]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda items: Counter(dict(items)),
    **{
        f"defaultdict:{getattr(factory, '__name__', None)}": partial(defaultdict, factory)
        for factory in _FACTORIES
    },
}
_CODECS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    float: (repr, float),  # NaN and Inf
    complex: (lambda x: [repr(x.real), repr(x.imag)], lambda x: complex(*map(float, x))),
    range: (lambda x: [x.start, x.stop, x.step], lambda x: range(*x)),
    bytes: (lambda x: base64.b64encode(x).decode(), base64.b64decode),
    bytearray: (lambda x: base64.b64encode(x).decode(), lambda x: bytearray(base64.b64decode(x))),
}
"""Type -> encoder and decoder of the content of its node. The tag is the name of the type."""
_DECODERS = {kind.__name__: decoder for kind, (_, decoder) in _CODECS.items()}
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


def newest_class(base: type, name: str, fields: list[str] | None = None) -> Any:
    """The newest subclass of this name in this program. Imports nothing.

    A notebook may define a class again, so the newest one counts.

    Args:
        base: base class.
        name: name of the class with its module, see `class_name`.
        fields: names of the fields of a named tuple, or None for another class.

    Raises:
        StoreError: this program has no such class.
    """
    queue = base.__subclasses__()
    found = None
    for kind in queue:
        queue += [new for new in kind.__subclasses__() if new not in queue]
        has_fields = fields is None or fields == list(getattr(kind, "_fields", ()))
        if has_fields and class_name(kind) == name:
            found = kind
    if found is None:
        what = f"tensor class {name:.200}"
        if fields is not None:
            what = f"named tuple {name:.200} with the fields {fields!s:.200}"
        raise StoreError(
            f"the checkpoint holds a {what}, but this program has no such "
            "class: import the module that defines it, then restore"
        )
    return found


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
    if kind in _CODECS:
        return {kind.__name__: _CODECS[kind][0](value)}
    if kind in (dict, OrderedDict, Counter, defaultdict):
        name = kind.__name__
        if kind is defaultdict:
            name += f":{getattr(value.default_factory, '__name__', None)}"
        if kind is not defaultdict or value.default_factory in _FACTORIES:
            return _encode_dict(value, name, path, special)
    if _CONTAINERS.get(kind.__name__) is kind:
        return {kind.__name__: _encode_parts(value, path, special)}
    if kind is deque:
        return {"deque": {"parts": _encode_parts(value, path, special), "maxlen": value.maxlen}}
    fields = None
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", None)
    if fields is not None:
        parts = _encode_parts(value, path, special)
        return {"named": {"class": class_name(kind), "fields": list(fields), "parts": parts}}
    node = special(path, value)
    if node is None:
        raise UnsavableState(
            f"{path_text(path)} is a {class_name(kind).removeprefix('builtins.')}, which has no "
            "plain form: keep arrays, numbers, strings, lists, tuples and dictionaries in the "
            f"state, or give the object a state_dict() that returns such values{_advice(kind)}"
        )
    return node


def _advice(kind: type) -> str:
    """The end of the error for a value of a type that has no plain form, for random generators."""
    if issubclass(kind, random.Random) or kind.__module__.startswith("numpy.random"):
        return (
            "; or draw from the global generators (numpy.random.normal, random.random), whose "
            "states are in each checkpoint"
        )
    return ""


def _encode_parts(value: Collection[Any], path: Path, special: Special) -> list[Node]:
    """The nodes of the items of a container."""
    if set(map(type, value)) <= _PLAIN_TYPES:
        return list(value)
    return [encode(part, (*path, i), special) for i, part in enumerate(value)]


def _encode_dict(value: dict[Any, Any], kind: str, path: Path, special: Special) -> Node:
    """The node of a dictionary; `kind` is a key of `_MAPPINGS`."""
    items = []
    for key, part in value.items():
        if not isinstance(key, (str, int, float, bool, tuple, bytes, type(None))):
            raise UnsavableState(
                f"{path_text(path)} has the key {key!r}, a {type(key).__name__}: "
                "keys are strings, numbers or tuples of them"
            )
        part = encode(part, (*path, key), special)
        items.append([encode(key, path, _reject), part])  # keys hold no arrays
    node: dict[str, Any] = {"dict": items}
    if kind != "dict":
        node["type"] = kind
    # torch keeps the versions of modules in an attribute of the dictionary.
    versions = getattr(value, "_metadata", None)
    if isinstance(versions, Mapping):
        node["versions"] = _encode_dict(dict(versions), "dict", path, special)
    return node


def _reject(path: Path, value: Any) -> None:
    """A `Special` that encodes nothing."""


def decode(node: Node, fetch: Fetch) -> Any:
    """Converts a node back to its value.

    Args:
        node: result of `encode`. A damaged node raises any exception.
        fetch: decodes nodes that `special` has encoded.

    Raises:
        StoreError: this program lacks the class of a named tuple.
    """
    if not isinstance(node, dict):
        return node
    if "dict" in node:
        items = [(decode(key, fetch), decode(part, fetch)) for key, part in node["dict"]]
        value = _MAPPINGS[node.get("type", "dict")](items)
        if "versions" in node and type(value) is not dict:
            value._metadata = decode(node["versions"], fetch)  # type: ignore[attr-defined]
        return value
    ((tag, content),) = node.items()
    if tag in _CONTAINERS:
        if dict in set(map(type, content)):
            content = [decode(part, fetch) for part in content]
        return _CONTAINERS[tag](content)
    if tag == "named":
        kind = newest_class(tuple, content["class"], content["fields"])
        parts = zip(content["fields"], content["parts"], strict=True)
        return tuple.__new__(kind, [decode(part, fetch) for _, part in parts])
    if tag == "deque":
        return deque((decode(part, fetch) for part in content["parts"]), content["maxlen"])
    if tag in _DECODERS:
        return _DECODERS[tag](content)
    return fetch(tag, content)


def arrays_of(node: Any) -> Iterator[dict[str, Any]]:
    """The content of every array node in a node or in some entries, in order.

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


def to_json(node: Node) -> bytes:
    """A node as the bytes of a JSON file."""
    return json.dumps(node, separators=(",", ":"), allow_nan=False).encode()


def base64_text(data: np.ndarray) -> str:
    """Bytes as text."""
    return base64.b64encode(data.tobytes()).decode()


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
    return to_json(encode(value, path, framework_node)).decode()


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


def decode_other(tag: str, content: Any) -> Any:
    """Decodes an array or another value of NumPy, torch or JAX. For `decode`.

    Args:
        tag: "numpy", "number", "torch" or "jax".
        content: the content of the node. The bytes of an array are text of `base64_text`.

    Raises:
        ValueError: the tag is not one of these four.
    """
    if tag == "numpy":
        return unpack_array(content)
    if tag == "number":
        return unpack_array(content)[()]
    if tag in ("torch", "jax"):
        return adapter_registry.find(tag, "plain_values").value_of(content)
    raise ValueError(f"unknown kind of value {tag!r:.40}")


def bytes_of(content: Mapping[str, Any]) -> np.ndarray:
    """The bytes of an array in its node.

    Args:
        content: content of the node, whose bytes are text of `base64_text`.

    Returns:
        The bytes, uint8 (n,), which are read-only.
    """
    return np.frombuffer(base64.b64decode(content["bytes"]), np.uint8)


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
    for name in (dtype.str, dtype.name):  # for dtypes of ml_dtypes only the name works
        try:
            if np.dtype(name) == dtype:
                data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                return {"dtype": name, "shape": list(array.shape), "bytes": base64_text(data)}
        except TypeError:
            continue
    return None


def unpack_array(content: Mapping[str, Any]) -> np.ndarray:
    """Converts JSON of `pack_array` back to the array, in writable memory.

    Args:
        content: result of `pack_array`. Raises any exception for other JSON.
    """
    data = bytes_of(content).copy()
    return data.view(np.dtype(content["dtype"])).reshape(content["shape"])


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
    if content is None:
        return None
    return {tag: content}
