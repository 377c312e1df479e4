"""Converts nested Python values to JSON and named arrays, and back.

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
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from healcore.runtime.store.errors import StoreError, UnsavableState, unsavable_error

Node = Any
"""A JSON-safe value as described above."""
Path = tuple[Any, ...]
"""The keys that lead to a value, for its name and for errors."""
Special = Callable[[Path, Any], Node | None]
"""Encodes a value that this module cannot, such as an array. Returns None for an unknown value."""
Fetch = Callable[[str, Any], Any]
"""Decodes the tag and the content of a node whose tag this module does not know."""

_SIMPLE = {type(None), bool, int, str}
"""Types that JSON stores unchanged."""
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
_ENCODERS: dict[type, Callable[[Any], Any]] = {
    float: repr,  # NaN and Inf
    complex: lambda value: [repr(value.real), repr(value.imag)],
    range: lambda value: [value.start, value.stop, value.step],
    bytes: lambda value: base64.b64encode(value).decode(),
    bytearray: lambda value: base64.b64encode(value).decode(),
}
"""Type -> the content of its node. The tag is the name of the type."""
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "complex": lambda content: complex(float(content[0]), float(content[1])),
    "range": lambda content: range(*content),
    "bytes": base64.b64decode,
    "bytearray": lambda content: bytearray(base64.b64decode(content)),
}
_CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def attribute(item: object, name: str) -> Any:
    """An attribute of an item of the state, or None.

    A `__getattr__` is not called: that of `flax.nnx.Rngs` has a value for every name.
    """
    found = inspect.getattr_static(item, name, None) is not None
    return getattr(item, name) if found else None


class Leaf(NamedTuple):
    """One array of a state."""

    name: str
    dtype: str
    """Name of the dtype, such as "bfloat16"."""
    parts: dict[Any, Any]
    """Place -> the part of the array in this process. A whole array has one part, at ""."""
    layout: Any = None
    """The framework's description of the sharding, or None."""


class Flat(NamedTuple):
    """A state as JSON-safe structures and named arrays."""

    entries: dict[str, dict[str, Any]]
    """Name -> structure. In torch: {"tree": node} with "stateful" and "per_rank", and "identity"
    (part -> text that must be equal) for optimizers and schedulers. In JAX: {"tree": node} for an
    object with `state_dict`, {"leaves": [[path, node], …]} for a pytree."""
    leaves: dict[str, Leaf]
    """Name of an array -> the array."""
    treedefs: dict[str, Any]
    """Name -> PyTreeDef in JAX. Not saved: a restore uses the structure of the live pytrees."""


def is_stateful(entry: Mapping[str, Any]) -> bool:
    """Whether an entry is the state of an object with `state_dict`."""
    return entry.get("stateful", "tree" in entry)


def array_types(name: str, entry: Mapping[str, Any]) -> dict[str, str]:
    """Place -> dtype and shape, which must be equal in a saved and a live entry.

    JAX and NumPy arrays may replace each other; random keys may not.
    """
    if "leaves" in entry:
        return {f"{name}{path}": _array_type(node) for path, node in entry["leaves"]}
    return {node["name"]: _array_type({"array": node}) for node in arrays_of(entry)}


def _array_type(node: Node) -> str:
    array = node.get("array") if isinstance(node, dict) else None
    if array is None:
        return "no array"
    kind = f" {array['impl']} key" if array["kind"] == "key" else ""
    return f"{array['dtype']}{tuple(array['shape'])}{kind}"


def checked_names(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state; StoreError unless it is a non-empty mapping with string keys."""
    if not isinstance(state, Mapping) or not state:
        raise StoreError(
            f"the state to save is a non-empty mapping of names to values, not {state!r:.60}"
        )
    for name in state:
        if not isinstance(name, str):
            raise StoreError(f"names in the state are strings, not {name!r}")
    return state


class Names:
    """Makes a unique name for every array from its place, such as `optimizer.state.0.exp_avg`.

    If two places give the same name, because a key has a dot, the second name gets a number.
    """

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def at(self, path: Path) -> str:
        """A new unique name for the array at a path."""
        plain = ".".join(str(part) for part in path)
        name, number = plain, 1
        while name in self._taken:
            number += 1
            name = f"{plain}#{number}"
        self._taken.add(name)
        return name


def encode(value: Any, path: Path, special: Special) -> Node:
    """A value as a node; UnsavableState if nothing can encode it."""
    # By exact type: an enum or a NumPy number, which may also be an int, would lose its type.
    kind = type(value)
    if kind in _SIMPLE or (kind is float and math.isfinite(value)):
        return value
    if kind in _ENCODERS:
        return {kind.__name__: _ENCODERS[kind](value)}
    if (mapping := _mapping_of(value)) is not None:
        return _encode_dict(value, mapping, path, special)
    if kind.__name__ in _CONTAINERS and kind is _CONTAINERS[kind.__name__]:
        return {kind.__name__: _encode_parts(value, path, special)}
    if kind is deque:
        return {"deque": {"parts": _encode_parts(value, path, special), "maxlen": value.maxlen}}
    if isinstance(value, tuple) and (fields := getattr(value, "_fields", None)) is not None:
        parts = _encode_parts(value, path, special)
        return {"named": {"class": class_name(kind), "fields": list(fields), "parts": parts}}
    node = special(path, value)
    if node is None:
        raise unsavable_error(place(path), value)
    return node


def class_name(kind: type) -> str:
    """A class's name with its module, as in a checkpoint."""
    return f"{kind.__module__}.{kind.__qualname__}"


def subclasses(kind: type) -> Iterator[Any]:
    """Every subclass that this program has defined, in order of definition. Imports nothing."""
    queue = kind.__subclasses__()
    for subclass in queue:
        yield subclass
        queue += [new for new in subclass.__subclasses__() if new not in queue]


def _mapping_of(value: Any) -> str | None:
    """The key of a dictionary's type in `_MAPPINGS`, or None."""
    if type(value) in (dict, OrderedDict, Counter):
        return type(value).__name__
    if type(value) is defaultdict and value.default_factory in _FACTORIES:
        return f"defaultdict:{getattr(value.default_factory, '__name__', None)}"
    return None


def _encode_parts(value: Collection[Any], path: Path, special: Special) -> list[Node]:
    if set(map(type, value)) <= _SIMPLE:
        return list(value)
    return [encode(part, (*path, i), special) for i, part in enumerate(value)]


def _encode_dict(value: dict[Any, Any], mapping: str, path: Path, special: Special) -> Node:
    items = []
    for key, part in value.items():
        if not isinstance(key, (str, int, float, bool, tuple, bytes, type(None))):
            raise UnsavableState(
                f"{place(path)} has the key {key!r}, a {type(key).__name__}: "
                "keys are strings, numbers or tuples of them"
            )
        part = encode(part, (*path, key), special)
        items.append([encode(key, path, lambda path, value: None), part])  # keys hold no arrays
    node: dict[str, Any] = {"dict": items}
    if mapping != "dict":
        node["type"] = mapping
    # torch keeps the versions of modules in an attribute of the dictionary.
    versions = getattr(value, "_metadata", None)
    if isinstance(versions, Mapping):
        node["versions"] = _encode_dict(dict(versions), "dict", path, special)
    return node


def decode(node: Node, fetch: Fetch) -> Any:
    """The value of a node; StoreError if this program lacks the class of a named tuple."""
    if not isinstance(node, dict):
        return node
    if "dict" in node:
        return _decode_dict(node, fetch)
    ((tag, content),) = node.items()
    if tag in _CONTAINERS:
        if dict in set(map(type, content)):
            content = [decode(part, fetch) for part in content]
        return _CONTAINERS[tag](content)
    if tag == "named":
        kind = _named_tuple(content["class"], content["fields"])
        parts = zip(content["fields"], content["parts"], strict=True)
        return tuple.__new__(kind, [decode(part, fetch) for _, part in parts])
    if tag == "deque":
        return deque((decode(part, fetch) for part in content["parts"]), content["maxlen"])
    return _DECODERS[tag](content) if tag in _DECODERS else fetch(tag, content)


def _decode_dict(node: dict[str, Any], fetch: Fetch) -> dict[Any, Any]:
    items = [(decode(key, fetch), decode(part, fetch)) for key, part in node["dict"]]
    value = _MAPPINGS[node.get("type", "dict")](items)
    if "versions" in node and type(value) is not dict:
        value._metadata = _decode_dict(node["versions"], fetch)  # type: ignore[attr-defined]
    return value


def _named_tuple(name: str, fields: list[str]) -> Any:
    """The newest named tuple class of this name in this program. Imports nothing."""
    candidates = [
        kind
        for kind in subclasses(tuple)
        if class_name(kind) == name and list(getattr(kind, "_fields", ())) == fields
    ]
    if not candidates:
        raise StoreError(
            f"the checkpoint holds a named tuple {name:.200} with the fields {fields!s:.200}, but "
            "this program has no such class: import the module that defines it, then restore"
        )
    return candidates[-1]


def arrays_of(node: Any) -> Iterator[dict[str, Any]]:
    """The content of every array node in a node or an entry, in order."""
    if isinstance(node, dict):
        for tag, content in node.items():
            if tag == "array":
                yield content
            else:
                yield from arrays_of(content)
    elif isinstance(node, list):
        for part in node:
            yield from arrays_of(part)


def nodes_of(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The array nodes of some entries, by array name."""
    return {node["name"]: node for entry in entries.values() for node in arrays_of(entry)}


def dumps(node: Node) -> bytes:
    """A node as the bytes of a JSON file."""
    return json.dumps(node, separators=(",", ":"), allow_nan=False).encode()


def place(path: Path) -> str:
    """A path as a Python expression: `state["model"]["layer"][0]`."""
    return "state" + "".join(f"[{part!r}]" for part in path)
