"""DCP's index (`data/.metadata`) without executing it, and checked before DCP gets to see it.

The index is a pickle, and DCP unpickles it, which runs whatever is in it. Here the instructions of
the pickle are followed with stand-ins: a name stays a name, nothing is imported, called or set on
anything that is not made here. Memory and time are proportional to the size of the file.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from healcore.runtime.store import manifest
from healcore.runtime.store.digest import Digest
from healcore.runtime.store.errors import Untrusted
from healcore.torch.plain_values import DTYPES

INDEX = ".metadata"

Shape = tuple[int, ...]


class Place(NamedTuple):
    """Where one part of a tensor lies."""

    file: str
    offset: int
    length: int
    plain: bool
    """Not compressed, nor transformed otherwise."""


class Entry(NamedTuple):
    """One tensor or value."""

    dtype: str
    """As torch names it; empty for a value, which DCP pickles."""
    shape: Shape
    chunks: list[tuple[Shape, Shape]]
    """Offsets and sizes of its parts."""
    places: dict[Shape | None, Place]
    """Offsets of a part -> where it lies; None for a value."""


class CheckedReader(FileSystemReader):
    """DCP's reader with an index that is read already."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index; the file is not opened again."""
        del args, kwargs
        return self._metadata


def checked(
    data: Path, files: Mapping[str, Digest], wanted: Mapping[str, tuple[str, Shape]]
) -> Metadata:
    """The part of an index that DCP needs for some tensors, made of DCP's own classes.

    Args:
        data: the directory of the index.
        files: of the manifest, all of them verified.
        wanted: name of a tensor -> dtype and shape that it has to have.

    Raises:
        Untrusted: it is not what DCP writes, or says something else than `wanted`.
    """
    entries = read_index(data / INDEX)
    metadata: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for name, (dtype, shape) in wanted.items():
        entry = entries.get(name)
        if entry is None or not entry.dtype:
            raise _refused(data, f"{name:.200} is no tensor in it")
        if (entry.dtype, entry.shape) != (dtype, shape):
            is_in_it = f"{entry.dtype}{list(entry.shape)}"
            raise _refused(data, f"{name:.200} is {is_in_it:.200} in it, not {dtype}{list(shape)}")
        if sum(math.prod(sizes) for _, sizes in entry.chunks) != math.prod(shape):
            raise _refused(data, f"the parts of {name:.200} are not the whole")
        kind = DTYPES[dtype]
        chunks = []
        for number, (offsets, sizes) in enumerate(entry.chunks):
            place = entry.places.get(offsets)
            if place is None or not _fits(offsets, sizes, shape):
                raise _refused(data, f"a part of {name:.200} is outside of it or not there")
            nbytes = kind.itemsize * math.prod(sizes)
            _check_place(data, files, name, place, nbytes)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            at = MetadataIndex(name, torch.Size(offsets), number)
            storage[at] = _StorageInfo(place.file, place.offset, place.length)
        metadata[name] = TensorStorageMetadata(TensorProperties(kind), torch.Size(shape), chunks)
    return Metadata(metadata, storage_data=storage, storage_meta=StorageMeta())


def _fits(offsets: Shape, sizes: Shape, shape: Shape) -> bool:
    return len(offsets) == len(sizes) == len(shape) and all(
        start + size <= whole for start, size, whole in zip(offsets, sizes, shape, strict=True)
    )


def _check_place(
    data: Path, files: Mapping[str, Digest], name: str, place: Place, nbytes: int
) -> None:
    """A file that the manifest knows, beside the index, with room for the part.

    Raises:
        Untrusted: it is something else.
    """
    known = files.get(f"{manifest.DATA}/{place.file}")
    if known is None or Path(place.file).name != place.file:
        raise _refused(data, f"{name:.200} would be read from {place.file!r:.200}")
    if not place.plain or place.offset + place.length > known.bytes or nbytes > place.length:
        raise _refused(data, f"{name:.200} does not lie in {place.file} as DCP writes it")


def _refused(data: Path, why: str) -> Untrusted:
    return Untrusted(
        f"{data / INDEX} is not what DCP writes: {why}. Nothing was restored: use an older "
        "checkpoint; or, if nobody but you could write to this directory, pass trust=True to the "
        "store, and DCP reads the file itself, running whatever is in it"
    )


# -- reading ---------------------------------------------------------------------------------------


def read_index(path: Path) -> dict[str, Entry]:
    """What an index lists, by name.

    Raises:
        Untrusted: it is not what DCP writes.
    """
    try:
        metadata = _Machine().run(path.read_bytes())
        places: dict[str, dict[Shape | None, Place]] = {}
        for index, info in _dict(_state(metadata, "Metadata")["storage_data"]).items():
            found = _state(index, "MetadataIndex")
            offset = found.get("offset")
            at = None if offset is None else _shape(offset)
            places.setdefault(_text(found["fqn"]), {})[at] = _place(_state(info, "_StorageInfo"))
        kinds = _dict(_state(metadata, "Metadata")["state_dict_metadata"])
        return {_text(name): _entry(kind, places.get(name, {})) for name, kind in kinds.items()}
    except OSError as error:
        raise _refused(path.parent, f"it cannot be read ({error.strerror})") from None
    except Exception as error:  # crafted bytes make anything raise anything
        why = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        raise _refused(path.parent, why) from None


class _Name(NamedTuple):
    """Stands for a class or function that a pickle names."""

    module: str
    name: str


class _Object:
    """Stands for an instance, or for what a call gave."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str, state: Any = None) -> None:
        self.kind = kind
        self.state = state


_CLASSES = {
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_CALLED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    *((module, name) for module in ("pathlib", "pathlib._local")
      for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")),
}  # fmt: skip
_NAMES = _CLASSES | _CALLED | {("torch", name) for name in DTYPES}

_MARK = object()


class _Machine:
    """Follows the instructions that DCP's pickles are made of; any other is an error."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        """What the pickle stands for.

        Raises:
            Exception: it is none of DCP's.
        """
        steps: Mapping[str, Callable[[Any], None]] = self._steps()
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                break
            step = steps.get(opcode.name)
            if step is None:
                raise ValueError(f"it has the instruction {opcode.name}")
            step(argument)
        (result,) = self._stack
        return result

    def _steps(self) -> Mapping[str, Callable[[Any], None]]:
        stack, memo = self._stack, self._memo

        def nothing(argument: Any) -> None:
            del argument

        def push(argument: Any) -> None:
            stack.append(argument)

        def take(number: int) -> Callable[[Any], None]:
            def step(argument: Any) -> None:
                del argument
                stack[len(stack) - number :] = [tuple(stack[len(stack) - number :])]

            return step

        def made(value: Callable[[], Any]) -> Callable[[Any], None]:
            return lambda argument: stack.append(value())

        def tuple_from_mark(argument: Any) -> None:
            del argument
            parts = self._popped()
            stack.append(tuple(parts))

        return {
            **dict.fromkeys(("PROTO", "FRAME"), nothing),
            **dict.fromkeys(
                ("SHORT_BINUNICODE", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"), push
            ),
            "MARK": made(lambda: _MARK),
            "NONE": made(lambda: None),
            "NEWTRUE": made(lambda: True),
            "NEWFALSE": made(lambda: False),
            "EMPTY_TUPLE": made(tuple),
            "EMPTY_LIST": made(list),
            "EMPTY_DICT": made(dict),
            "TUPLE1": take(1),
            "TUPLE2": take(2),
            "TUPLE3": take(3),
            "TUPLE": tuple_from_mark,
            "MEMOIZE": lambda argument: memo.__setitem__(len(memo), stack[-1]),
            "BINPUT": lambda argument: memo.__setitem__(argument, stack[-1]),
            "LONG_BINPUT": lambda argument: memo.__setitem__(argument, stack[-1]),
            "BINGET": lambda argument: stack.append(memo[argument]),
            "LONG_BINGET": lambda argument: stack.append(memo[argument]),
            "APPEND": lambda argument: self._append([stack.pop()]),
            "APPENDS": lambda argument: self._append(self._popped()),
            "SETITEM": lambda argument: self._set(_last_two(stack)),
            "SETITEMS": lambda argument: self._set(self._popped()),
            "STACK_GLOBAL": lambda argument: self._name(_last_two(stack)),
            "NEWOBJ": lambda argument: self._new(_last_two(stack)),
            "REDUCE": lambda argument: self._call(_last_two(stack)),
            "BUILD": lambda argument: self._build(stack.pop()),
        }

    def _popped(self) -> list[Any]:
        """What lies above the last mark."""
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("a mark is missing")
        parts = self._stack[at + 1 :]
        del self._stack[at:]
        return parts

    def _append(self, parts: list[Any]) -> None:
        _list(self._stack[-1]).extend(parts)

    def _set(self, parts: list[Any]) -> None:
        target = _dict(self._stack[-1])
        for key, value in zip(parts[::2], parts[1::2], strict=True):
            if not isinstance(key, (str, _Object)):  # a tuple's hash goes as deep as the tuple
                raise ValueError("a key is no name")
            target[key] = value

    def _name(self, parts: list[Any]) -> None:
        name = _Name(*map(_text, parts))
        if tuple(name) not in _NAMES:
            raise ValueError(f"it names {name.module:.100}.{name.name:.100}")
        self._stack.append(name)

    def _new(self, parts: list[Any]) -> None:
        kind, arguments = parts
        if not isinstance(kind, _Name) or tuple(kind) not in _CLASSES or arguments != ():
            raise ValueError("it makes what DCP does not")
        self._stack.append(_Object(kind.name))

    def _call(self, parts: list[Any]) -> None:
        name, arguments = parts
        if not isinstance(name, _Name) or tuple(name) not in _CALLED:
            raise ValueError("it calls what DCP does not")
        self._stack.append(_Object(name.name, arguments))

    def _build(self, state: Any) -> None:
        target = self._stack[-1]
        if not isinstance(target, _Object) or target.state is not None:
            raise ValueError("it changes what it has not made")
        target.state = state


def _last_two(stack: list[Any]) -> list[Any]:
    last = stack[-2:]
    del stack[-2:]
    return last


def _entry(kind: Any, places: dict[Shape | None, Place]) -> Entry:
    if isinstance(kind, _Object) and kind.kind == "BytesStorageMetadata":
        return Entry("", (), [], places)
    found = _state(kind, "TensorStorageMetadata")
    properties = found["properties"]
    if not isinstance(properties, _Object) or properties.kind != "TensorProperties":
        raise ValueError("a tensor without properties")
    dtype = properties.state[0]
    if not isinstance(dtype, _Name) or dtype.name not in DTYPES:
        raise ValueError("a tensor without a dtype")
    chunks = [_state(each, "ChunkStorageMetadata") for each in _list(found["chunks"])]
    parts = [(_shape(each["offsets"]), _shape(each["sizes"])) for each in chunks]
    return Entry(dtype.name, _shape(found["size"]), parts, places)


def _place(info: dict[Any, Any]) -> Place:
    offset, length = info["offset"], info["length"]
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise ValueError("a place that is none")
    return Place(
        _text(info["relative_path"]), offset, length, not info.get("transform_descriptors")
    )


def _shape(value: Any) -> Shape:
    if not isinstance(value, _Object) or value.kind != "Size":
        raise ValueError("a shape that is none")
    (shape,) = value.state
    if not isinstance(shape, (tuple, list)):
        raise ValueError("a shape that is none")
    if not all(type(size) is int and 0 <= size < 1 << 62 for size in shape) or len(shape) > 64:
        raise ValueError("a shape that no tensor has")
    return tuple(shape)


def _state(value: Any, kind: str) -> dict[Any, Any]:
    if not isinstance(value, _Object) or value.kind != kind:
        raise ValueError(f"something else in the place of a {kind}")
    return _dict(value.state)


def _dict(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise ValueError("no dictionary where one has to be")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError("no list where one has to be")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("no text where it has to be")
    return value
