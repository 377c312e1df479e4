"""Reads a pickle as data: nothing in it is imported, called, made or changed.

A `Global` stands for a class or function that the pickle names, a `Made` for an object that it
makes. The caller decides what they mean, by comparing names.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class BadPickle(ValueError):
    """Bytes that are no pickle, or one that no pickler writes."""


class Global(NamedTuple):
    """The name of a class or function, which is not looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Made:
    """Stands for an object that a pickle would make.

    Attributes:
        what: its class, or the function that returns it; a `Made` if that is made as well.
        args: arguments of the call.
        state: the state that is set; None: none is.
        items: elements that are appended or added, or pairs of key and value that are set.
    """

    __slots__ = ("args", "items", "state", "what")

    def __init__(self, what: Global | Made, args: tuple[Any, ...]) -> None:
        self.what = what
        self.args = args
        self.state: Any = None
        self.items: list[Any] | None = None


def read(
    data: Any,
    at: int = 0,
    persistent: Callable[[Any], Any] | None = None,
    objects: list[Made] | None = None,
) -> tuple[Any, int]:
    """Reads one pickle of protocol 2 to 5, which begins at offset `at` of bytes or a mapped file.

    Returns the value and the offset after the pickle. The value has lists, dictionaries, tuples,
    sets, numbers, strings, bytes, None, `Global` and `Made`. An object may occur in it many times,
    as in the pickle, so a walk through it has to count its steps. Time is proportional to the
    length of the pickle, and memory is at most about 300 times its length.

    `persistent` takes the id of an object outside of the pickle and returns its replacement; None:
    the pickle has none. Every `Made` is appended once to `objects`.

    Raises:
        BadPickle: the pickle is damaged, or has a part that ordinary data do not need: keys that
            are neither simple values nor objects, the state of a value that is no object.
    """
    try:
        return _read(data, at, persistent, [] if objects is None else objects)
    except (IndexError, struct.error):
        raise BadPickle("the pickle ends too early, or pops more than was pushed") from None
    except KeyError:
        raise BadPickle("the pickle refers to an object that does not exist") from None
    except UnicodeDecodeError:
        raise BadPickle("the pickle has a text that is not UTF-8") from None


_U32 = struct.Struct("<I")
_NUMBERS = {0x4D: struct.Struct("<H"), 0x4A: struct.Struct("<i"), 0x47: struct.Struct(">d")}
"""BININT2, BININT and BINFLOAT."""
_SIMPLE = frozenset((float, bool, type(None), Global, Made))
"""Types that are hashed and compared fast. A deeply nested tuple may take for ever."""
_LONGEST_KEY = 1 << 16
"""Characters of a key or a name: one of a megabyte could be compared for every byte."""
_LENGTH = {0x58: 4, 0x8C: 1, 0x8D: 8, 0x42: 4, 0x43: 1, 0x8E: 8, 0x96: 8, 0x55: 1, 0x54: 4}
"""Bytes of the length in front of a text or of bytes, by opcode."""
_TEXT = frozenset((0x58, 0x8C, 0x8D))
_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False, 0x29: ()}


def _read(
    data: Any, at: int, persistent: Callable[[Any], Any] | None, objects: list[Made]
) -> tuple[Any, int]:
    size = len(data)
    stack: list[Any] = []
    below: list[list[Any]] = []  # the stack before each mark
    memo: dict[int, Any] = {}  # not a list: an index costs nothing, however large
    globals_: dict[Global, Global] = {}
    while True:
        op = data[at]
        at += 1
        # The most frequent opcodes first.
        if op == 0x71:  # BINPUT
            memo[data[at]] = stack[-1]
            at += 1
        elif op == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif op == 0x68:  # BINGET
            stack.append(memo[data[at]])
            at += 1
        elif op == 0x4B:  # BININT1
            stack.append(data[at])
            at += 1
        elif op == 0x72:  # LONG_BINPUT
            memo[_U32.unpack_from(data, at)[0]] = stack[-1]
            at += 4
        elif op in _LENGTH:
            width = _LENGTH[op]
            start = at + width
            at = start + int.from_bytes(data[at:start], "little")
            if at > size:
                raise IndexError
            part = data[start:at]
            stack.append(str(part, "utf-8", "surrogatepass") if op in _TEXT else bytes(part))
        elif op == 0x28:  # MARK
            below.append(stack)
            stack = []
        elif op == 0x74:  # TUPLE
            made = tuple(stack)
            stack = below.pop()
            stack.append(made)
        elif op == 0x6A:  # LONG_BINGET
            stack.append(memo[_U32.unpack_from(data, at)[0]])
            at += 4
        elif op == 0x85:  # TUPLE1
            stack[-1] = (stack[-1],)
        elif op == 0x86:  # TUPLE2
            last = stack.pop()
            stack[-1] = (stack[-1], last)
        elif op == 0x87:  # TUPLE3
            last, middle = stack.pop(), stack.pop()
            stack[-1] = (stack[-1], middle, last)
        elif op in (0x52, 0x81):  # REDUCE, NEWOBJ
            args = stack.pop()
            stack[-1] = _made(stack[-1], args)
            objects.append(stack[-1])
        elif op == 0x92:  # NEWOBJ_EX
            named, args = stack.pop(), stack.pop()
            if named:
                raise BadPickle("the pickle makes an object from named arguments")
            stack[-1] = _made(stack[-1], args)
            objects.append(stack[-1])
        elif op == 0x51:  # BINPERSID
            if persistent is None:
                raise BadPickle("the pickle refers to something outside it")
            stack.append(persistent(stack.pop()))
        elif op in _NUMBERS:
            stack.append(_NUMBERS[op].unpack_from(data, at)[0])
            at += _NUMBERS[op].size
        elif op == 0x8A:  # LONG1
            end = at + 1 + data[at]
            if end > size:
                raise IndexError
            stack.append(int.from_bytes(data[at + 1 : end], "little", signed=True))
            at = end
        elif op in _CONSTANTS:
            stack.append(_CONSTANTS[op])
        elif op == 0x7D:  # EMPTY_DICT
            stack.append({})
        elif op == 0x5D:  # EMPTY_LIST
            stack.append([])
        elif op == 0x8F:  # EMPTY_SET
            stack.append(set())
        elif op == 0x75:  # SETITEMS
            items = stack
            stack = below.pop()
            _set(stack[-1], items)
        elif op == 0x73:  # SETITEM
            value = stack.pop()
            key = stack.pop()
            _set(stack[-1], [key, value])
        elif op == 0x65:  # APPENDS
            items = stack
            stack = below.pop()
            _extend(stack[-1], items)
        elif op == 0x61:  # APPEND
            last = stack.pop()
            _extend(stack[-1], [last])
        elif op == 0x62:  # BUILD
            state = stack.pop()
            target = stack[-1]
            if type(target) is not Made or target.state is not None:
                raise BadPickle("the pickle sets the state of something that is no new object")
            target.state = state
        elif op == 0x63:  # GLOBAL
            end = data.find(b"\n", at)
            stop = data.find(b"\n", end + 1)
            if min(end, stop) < 0:
                raise IndexError
            name = Global(str(data[at:end], "utf-8"), str(data[end + 1 : stop], "utf-8"))
            stack.append(globals_.setdefault(name, name))
            at = stop + 1
        elif op == 0x93:  # STACK_GLOBAL
            last = stack.pop()
            if type(stack[-1]) is not str or type(last) is not str:
                raise BadPickle("the pickle names a class by something that is no text")
            name = Global(_key(stack[-1]), _key(last))
            stack[-1] = globals_.setdefault(name, name)
        elif op == 0x95:  # FRAME
            at += 8
        elif op == 0x80:  # PROTO
            if not 2 <= data[at] <= 5:
                raise BadPickle(f"the pickle is of protocol {data[at]}")
            at += 1
        elif op == 0x2E:  # STOP
            return stack.pop(), at
        elif op == 0x30:  # POP
            stack.pop()
        elif op == 0x31:  # POP_MARK
            stack = below.pop()
        elif op == 0x32:  # DUP
            stack.append(stack[-1])
        elif op == 0x8B:  # LONG4
            start = at + 4
            at = start + _U32.unpack_from(data, at)[0]
            if at > size:
                raise IndexError
            stack.append(int.from_bytes(data[start:at], "little", signed=True))
        elif op == 0x90:  # ADDITEMS
            items = stack
            stack = below.pop()
            if type(stack[-1]) is set:
                stack[-1].update(map(_key, items))
            else:
                _extend(stack[-1], items)
        elif op == 0x91:  # FROZENSET
            frozen = frozenset(map(_key, stack))
            stack = below.pop()
            stack.append(frozen)
        else:
            raise BadPickle(f"the pickle has the opcode 0x{op:02x}, which is not read")


def _made(what: Any, args: Any) -> Made:
    if type(what) not in (Global, Made) or type(args) is not tuple:
        raise BadPickle("the pickle calls something that is no class or function")
    return Made(what, args)


def _key(key: Any) -> Any:
    """Checks that a key or an element is hashed fast, and returns it."""
    kind = type(key)
    if kind is str or kind is bytes:
        simple = len(key) <= _LONGEST_KEY
    elif kind is int:
        simple = key.bit_length() <= 1024
    elif kind is tuple:
        simple = len(key) <= 16 and all(
            type(part) is not tuple and _key(part) is part for part in key
        )
    else:
        simple = kind in _SIMPLE
    if not simple:
        raise BadPickle(f"the pickle has a {kind.__name__} as a key that is too long or too deep")
    return key


def _set(target: Any, items: list[Any]) -> None:
    if len(items) % 2:
        raise IndexError
    pairs = zip(items[::2], items[1::2], strict=True)
    if type(target) is dict:
        for key, value in pairs:
            target[_key(key)] = value
    elif type(target) is Made:
        target.items = target.items or []
        target.items += [(_key(key), value) for key, value in pairs]
    else:
        raise BadPickle(f"the pickle sets an item of a {type(target).__name__}")


def _extend(target: Any, items: list[Any]) -> None:
    if type(target) is list:
        target += items
    elif type(target) is Made:
        target.items = target.items or []
        target.items += items
    else:
        raise BadPickle(f"the pickle appends to a {type(target).__name__}")


_DICTIONARIES = (Global("collections", "OrderedDict"), Global("collections", "defaultdict"))


def as_dict(value: Any) -> Mapping[Any, Any] | None:
    """A dictionary, an `OrderedDict` or a `defaultdict` as a dictionary; None for other values."""
    if type(value) is dict:
        return value
    if type(value) is Made and value.what in _DICTIONARIES:
        pairs = value.items or ()
        return dict(pair for pair in pairs if type(pair) is tuple and len(pair) == 2)
    return None


def state(value: Any, what: Global) -> Mapping[Any, Any] | None:
    """The attributes of an object of the class `what`; None for other values."""
    if type(value) is Made and value.what == what and type(value.state) is dict:
        return value.state
    return None
