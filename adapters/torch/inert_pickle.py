"""Reads a pickle as data: nothing that the pickle names is imported, called or changed.

The index of a `torch.distributed.checkpoint` is a pickle, and a run that resumes reads it in the
process that trains. Python's own `pickle._Unpickler` reads it here, and gets for each class or
function an empty class of the same name that only keeps what it is called with.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple


class BadPickle(ValueError):
    """The bytes are not a pickle, or the pickle has content that data do not need."""


class Global(NamedTuple):
    """The name of a class or function."""

    module: str
    name: str


class Unpickled:
    """What a pickle would create: a class of this kind has the name of the class or function.

    Attributes:
        args: Arguments of the call.
        state: State that is set, or None.
        items: Elements that are appended or added, or pairs of key and value.
    """

    args: tuple[Any, ...]
    state: Any
    items: list[Any]

    def __new__(cls, *args: Any) -> Unpickled:
        """Keeps the arguments here, because the opcode NEWOBJ calls no `__init__`."""
        made = super().__new__(cls)
        made.args, made.state, made.items = args, None, []
        return made

    def __call__(self, *args: Any) -> Unpickled:
        """What a call of what a call returns would create, as `getattr(Path, "touch")(path)`."""
        return Unpickled(self, *args)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def extend(self, items: Iterable[Any]) -> None:
        """Adds elements, as `list.extend` does, which the unpickler calls."""
        self.items += items

    append = add = lambda self, item: self.items.append(item)


_DICTIONARIES = (
    Global("builtins", "dict"),
    Global("collections", "OrderedDict"),
    Global("collections", "defaultdict"),
)
_LONGEST = 1 << 16
"""Maximum number of characters or bits of a key or a name."""


def read(
    data: bytes,
    persistent: Callable[[Any], Any] | None = None,
    allowed: Callable[[Global], bool] = lambda _: True,
) -> Any:
    """Reads a pickle.

    The value has lists, tuples, numbers, strings, bytes, None, and subclasses and instances of
    `Unpickled`, also for dictionaries and sets. An object may occur in it many times, so a caller
    that visits all parts has to limit its visits. Time and memory are proportional to the length.

    Args:
        data: The pickle; bytes after it are ignored.
        persistent: Takes the id of an object outside of the pickle and returns its replacement.
        allowed: Whether the pickle may have the name of this class or function.

    Raises:
        BadPickle: The pickle is damaged, or has content that data do not need.
    """
    kinds: dict[Global, type[Unpickled]] = {}

    class Reader(pickle._Unpickler):  # type: ignore[name-defined]
        # A dictionary would compute the hash of a key, which never ends for some nested tuples.
        dispatch = {
            code: load
            for code, load in pickle._Unpickler.dispatch.items()  # type: ignore[attr-defined]
            if bytes([code]) not in (pickle.DICT, pickle.FROZENSET, pickle.BYTEARRAY8)
        } | {
            pickle.EMPTY_DICT[0]: lambda self: self.append(self.find_class("builtins", "dict")()),
            pickle.EMPTY_SET[0]: lambda self: self.append(self.find_class("builtins", "set")()),
        }

        def find_class(self, module: str, name: str) -> Any:
            kind = Global(module, name)
            if len(module) + len(name) > _LONGEST or not allowed(kind):
                raise BadPickle(f"it names {module}.{name}"[:200])
            return kinds.setdefault(kind, type(name, (Unpickled,), {"__module__": module}))

        def persistent_load(self, pid: Any) -> Any:
            if persistent is None:
                raise BadPickle("the pickle refers to an object outside of it")
            return persistent(pid)

    try:
        return Reader(io.BytesIO(data)).load()
    except BadPickle:
        raise
    except Exception as error:  # damaged bytes may raise any exception
        raise BadPickle(f"the pickle is damaged ({type(error).__name__})") from None


def name_of(value: Any) -> Global | None:
    """The name of a class or function in a pickle, or None for other values."""
    found = isinstance(value, type) and issubclass(value, Unpickled)
    return Global(value.__module__, value.__name__) if found else None


def as_dict(value: Any) -> Mapping[Any, Any] | None:
    """A dictionary, an `OrderedDict` or a `defaultdict`, or None for other values."""
    if name_of(type(value)) not in _DICTIONARIES:
        return None
    for key, _ in value.items:
        size = len(key) if type(key) is str else key.bit_length() if type(key) is int else 0
        if isinstance(key, tuple) or size > _LONGEST:
            raise BadPickle(f"the pickle has a {type(key).__name__} as a key that is not allowed")
    return dict(value.items)
