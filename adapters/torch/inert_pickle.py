"""Reads a pickle as data: nothing in the pickle is imported, called or changed.

The index of a `torch.distributed.checkpoint` is a pickle, and a run that resumes reads it in the
process that trains. Limits of the operating system do not stop code, so this module does not
unpickle. It uses Python's own `pickle._Unpickler` with only the opcodes that data need.

A `Global` is the name of a class or function in the pickle. An `Unpickled` describes an object that
the pickle would create. The caller interprets both by comparing names.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class BadPickle(ValueError):
    """The bytes are not a pickle, or the pickle has content that data do not need."""


class Global(NamedTuple):
    """The name of a class or function, which is not imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Unpickled:
    """Describes an object that a pickle would create, or a dictionary.

    Attributes:
        kind: The object's class, the function that returns it, or `DICT`.
        args: Arguments of the call.
        state: State that is set, or None.
        items: Elements that are appended or added, or pairs of key and value.
    """

    __slots__ = ("args", "items", "kind", "state")

    def __init__(self, kind: Any, args: Any = ()) -> None:
        self.kind = kind
        self.args = args
        self.state: Any = None
        self.items: list[Any] = []


DICT = Global("builtins", "dict")
_DICTIONARIES = (
    DICT,
    Global("collections", "OrderedDict"),
    Global("collections", "defaultdict"),
)
_KEYS = (str, int, bool, type(None), Global, Unpickled)
"""Allowed types of keys. A deeply nested tuple could take forever to hash."""
_LONGEST = 1 << 16
"""Maximum number of characters or bits of a key or a name."""


def read(
    data: bytes,
    persistent: Callable[[Any], Any] | None = None,
    objects: list[Unpickled] | None = None,
) -> Any:
    """Reads a pickle of protocol 2 to 5.

    The value has lists, tuples, numbers, strings, bytes, None, `Global` and `Unpickled`. An object
    may occur in it many times, so a caller that visits all parts has to limit its visits. Time and
    memory are proportional to the length of the pickle.

    Args:
        data: The pickle; bytes after it are ignored.
        persistent: Takes the id of an object outside of the pickle and returns its replacement.
        objects: List to which every `Unpickled` except dictionaries is appended.

    Raises:
        BadPickle: The pickle is damaged, or has content that data do not need.
    """
    try:
        return _Reader(io.BytesIO(data), persistent, objects).load()
    except BadPickle:
        raise
    except Exception as error:  # damaged bytes may raise any exception
        raise BadPickle(f"the pickle is damaged ({type(error).__name__})") from None


class _Reader(pickle._Unpickler):  # type: ignore[name-defined]
    """Python's unpickler without dangerous opcodes, whose objects are `Unpickled`."""

    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(
        self,
        file: io.BytesIO,
        persistent: Callable[[Any], Any] | None,
        objects: list[Unpickled] | None,
    ) -> None:
        super().__init__(file)
        self._persistent, self._objects = persistent, objects

    def find_class(self, module: str, name: str) -> Any:
        if len(module) + len(name) > _LONGEST:
            raise BadPickle("the pickle has the name of a class that is too long")
        return Global(module, name)

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise BadPickle("the pickle refers to an object outside of it")
        return self._persistent(pid)

    def _call(self) -> None:
        args = self.stack.pop()
        if type(args) is not tuple or type(self.stack[-1]) not in (Global, Unpickled):
            raise BadPickle("the pickle calls an object that is not a class or function")
        self.stack[-1] = Unpickled(self.stack[-1], args)
        if self._objects is not None:
            self._objects.append(self.stack[-1])

    def _call_with_names(self) -> None:
        if self.stack.pop().items:
            raise BadPickle("the pickle creates an object from named arguments")
        self._call()

    def _build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is not Unpickled or target.kind is DICT or target.state is not None:
            raise BadPickle("the pickle sets the state of an object that is not new")
        target.state = state

    def _dict(self) -> None:
        self.append(Unpickled(DICT))

    def _set(self) -> None:
        self.append(Unpickled(Global("builtins", "set")))

    def _frozenset(self) -> None:
        items = self.pop_mark()
        self._set()
        self.stack[-1].items = items

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1].items.append((key, value))

    def _set_items(self) -> None:
        items = self.pop_mark()
        self.stack[-1].items += zip(items[::2], items[1::2], strict=True)

    def _append(self) -> None:
        value = self.stack.pop()
        self._extend(self.stack[-1], [value])

    def _appends(self) -> None:
        items = self.pop_mark()
        self._extend(self.stack[-1], items)

    def _extend(self, target: Any, items: list[Any]) -> None:
        (target if type(target) is list else target.items).extend(items)

    dispatch = {
        code[0]: pickle._Unpickler.dispatch[code[0]]  # type: ignore[attr-defined]
        for code in (
            pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK,
            pickle.DUP, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT,
            pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.LONG4, pickle.BINFLOAT,
            pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8, pickle.BINBYTES,
            pickle.SHORT_BINBYTES, pickle.BINBYTES8, pickle.EMPTY_TUPLE, pickle.TUPLE,
            pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_LIST, pickle.BINGET,
            pickle.LONG_BINGET, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.GLOBAL,
            pickle.STACK_GLOBAL, pickle.BINPERSID,
        )
    } | {
        pickle.REDUCE[0]: _call, pickle.NEWOBJ[0]: _call, pickle.NEWOBJ_EX[0]: _call_with_names,
        pickle.BUILD[0]: _build, pickle.EMPTY_DICT[0]: _dict, pickle.EMPTY_SET[0]: _set,
        pickle.FROZENSET[0]: _frozenset, pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items, pickle.APPEND[0]: _append, pickle.APPENDS[0]: _appends,
        pickle.ADDITEMS[0]: _appends,
    }  # fmt: skip


def as_dict(value: Any) -> Mapping[Any, Any] | None:
    """A dictionary, an `OrderedDict` or a `defaultdict`, or None for other values."""
    if type(value) is not Unpickled or value.kind not in _DICTIONARIES:
        return None
    for key, _ in value.items:
        size = len(key) if type(key) is str else key.bit_length() if type(key) is int else 0
        if type(key) not in _KEYS or size > _LONGEST:
            raise BadPickle(f"the pickle has a {type(key).__name__} as a key that is not allowed")
    return dict(value.items)
