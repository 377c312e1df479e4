"""Checks a file of torch before torch reads it: its pickle, and the records of its archive.

`torch.load(weights_only=True)` runs no code of the file, but allocates whatever size it names:
`bytearray(10**10)` takes 12 bytes. So the pickle is read here first, as data. With `mmap=True`
torch does not compare records with tensors either: a tensor could extend beyond its record.
"""

from __future__ import annotations

import math
import mmap
import pickle
import re
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from healcore import regular_file
from healcore.plugins.checkpoint_contents import Damaged, ProbeError
from healcore.runtime.inert_pickle import BadPickle, Global, Made, read

_WIDTHS = {
    "ByteStorage": 1, "CharStorage": 1, "BoolStorage": 1, "UntypedStorage": 1, "ShortStorage": 2,
    "HalfStorage": 2, "BFloat16Storage": 2, "IntStorage": 4, "FloatStorage": 4, "LongStorage": 8,
    "DoubleStorage": 8, "ComplexFloatStorage": 8, "ComplexDoubleStorage": 16,
    "QUInt8Storage": 1, "QInt8Storage": 1, "QInt32Storage": 4, "QUInt4x2Storage": 1,
    "QUInt2x4Storage": 1,
}  # fmt: skip
"""Bytes of an element; 0 for storages of other names."""
_MOST_AXES = 64
_MAGIC = 0x1950A86A20F9469CFC6C
"""The pickled number at the start of a file of torch before 1.6."""
_LITTLE, _NATIVE = (
    (zlib.crc32(order), len(order)) for order in (b"little", sys.byteorder.encode())
)
"""Checksum and size of an archive's record `byteorder`."""
_NUMPY_STATE = re.compile(r"\(3, '[<|]', None, None, None, -1, -1, 0\)")


class Storage(NamedTuple):
    """A storage that a pickle names."""

    key: str
    kind: str
    """Name of its class, "FloatStorage"."""
    width: int
    """Bytes of an element."""
    bytes: int


class TorchPickle(NamedTuple):
    """A pickle of torch, as `inert_pickle` reads it."""

    value: Any
    storages: dict[str, Storage]
    end: int
    """Position of the byte after it."""


def storages(data: Any, at: int = 0) -> TorchPickle:
    """Reads and checks the pickle of torch that begins at a position of bytes or of a mapped file.

    Which calls are allowed is left to `weights_only`.

    Raises:
        BadPickle: it is damaged, or would allocate more than it has storage for.
        pickle.UnpicklingError: it sets the state of an object that is neither a tensor nor a plain
            value.
    """
    found: dict[str, Storage] = {}

    def persistent(pid: Any) -> Storage:
        storage = _storage(pid)
        if storage.bytes >= found.get(storage.key, storage).bytes:
            found[storage.key] = storage
        return storage

    objects: list[Made] = []
    value, end = read(data, at, persistent, objects)
    for made in objects:
        if type(made.what) is Global:
            _CALLS.get(made.what, _nothing)(made.args)
        if made.state is not None:
            _check_state(made)
    return TorchPickle(value, found, end)


def plain_tensor(value: Any) -> tuple[Storage, int, tuple[int, ...], tuple[int, ...]] | None:
    """Storage, offset, shape and strides of a tensor; None for any other value."""
    if type(value) is not Made or value.what not in _TENSORS[:2] or any(value.args[6:]):
        return None
    storage, offset, shape, strides = value.args[:4]
    return storage, offset, _sizes(shape), _sizes(strides)


def _storage(pid: Any) -> Storage:
    """A storage by its id: ("storage", class, key, device, elements[, what it is a view of])."""
    if type(pid) is not tuple or len(pid) not in (5, 6):
        raise BadPickle("the pickle refers to something that is no storage")
    _, kind, key, device, elements = pid[:5]
    view = pid[5] if len(pid) == 6 else None
    plain = (
        pid[0] == "storage"
        and type(kind) is Global
        and type(key) is type(device) is str
        and _is_size(elements)
        and (view is None or (type(view) is tuple and len(view) == 3 and type(view[0]) is str))
    )
    if not plain:
        raise BadPickle("the pickle refers to a storage that is none")
    width = _WIDTHS.get(kind.name, 0)
    return Storage(key, kind.name, width, elements * width)


def _is_size(number: Any) -> bool:
    return type(number) is int and 0 <= number < 1 << 62


def _sizes(numbers: Any) -> tuple[int, ...]:
    if type(numbers) is Made and numbers.what == Global("torch", "Size") and numbers.args:
        numbers = numbers.args[0]
    if not isinstance(numbers, (tuple, list)) or len(numbers) > _MOST_AXES:
        raise BadPickle("the pickle has a shape that is none")
    if not all(map(_is_size, numbers)):
        raise BadPickle("the pickle has a shape that is none")
    return tuple(numbers)


def _nothing(args: tuple[Any, ...]) -> None:
    """Accepts calls that allocate hardly any memory."""


def _view(args: tuple[Any, ...]) -> None:
    """Checks the arguments of a tensor: (storage, offset, shape, strides, ...)."""
    if len(args) < 4 or type(args[0]) is not Storage or not _is_size(args[1]):
        raise BadPickle("the pickle makes a tensor without a storage")
    storage, offset, shape, strides = args[0], args[1], _sizes(args[2]), _sizes(args[3])
    if len(shape) != len(strides):
        raise BadPickle("the pickle makes a tensor whose shape and strides differ in length")
    span = offset
    if all(shape):
        span += 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if span * storage.width > storage.bytes:
        raise BadPickle(f"a tensor goes beyond the end of its storage {storage.key[:40]}")


def _copied(args: tuple[Any, ...]) -> None:
    """Checks a tensor that torch allocates, with as many elements as its shape has."""
    _view(args)
    if math.prod(_sizes(args[2])) * args[0].width > args[0].bytes:
        raise BadPickle("the pickle makes a tensor of more elements than are stored")


def _copied_tensor(args: tuple[Any, ...]) -> None:
    if not args or type(args[0]) is not Made or args[0].what not in _TENSORS:
        raise BadPickle("the pickle makes a tensor from something that is none")
    _copied(args[0].args)


def _forwarded(args: tuple[Any, ...]) -> None:
    """Checks the inner call of `_rebuild_from_type_v2(function, class, arguments, state)`."""
    function, inner = (args[0], args[2]) if len(args) == 4 else (None, None)
    if (
        type(function) is not Global
        or type(inner) is not tuple
        or _CALLS.get(function) is _forwarded
    ):
        raise BadPickle("the pickle makes a tensor by something that makes none")
    _CALLS.get(function, _nothing)(inner)


def _never(args: tuple[Any, ...]) -> None:
    raise BadPickle("the pickle makes a tensor without a storage")


def _of_parts(args: tuple[Any, ...]) -> None:
    """Checks a dictionary or a set; refuses nested keys, whose hashes could take very long."""
    for arg in args:
        if type(arg) not in (list, tuple, dict, set, frozenset):
            raise BadPickle("the pickle makes a dictionary or a set of something else")
        for part in () if type(arg) is dict else arg:
            key = part[0] if type(part) in (list, tuple) and part else part
            if type(key) in (list, tuple):
                raise BadPickle("the pickle makes a dictionary or a set of nested parts")


def _bytearray(args: tuple[Any, ...]) -> None:
    """Refuses a number, which would make as many zeros."""
    first = args[0] if args else b""
    encoded = type(first) is Made and first.what == _ENCODE
    if not (encoded or type(first) in (bytes, str)):
        raise BadPickle("the pickle makes a bytearray of something that is no text")


def _encode(args: tuple[Any, ...]) -> None:
    if len(args) != 2 or type(args[0]) is not str or args[1] not in ("latin1", "latin-1"):
        raise BadPickle("the pickle encodes something in another way than picklers do")


def _layout(args: tuple[Any, ...]) -> None:
    if len(args) != 1 or type(args[0]) is not str:
        raise BadPickle("the pickle names a layout by something that is no text")


def _sparse(args: tuple[Any, ...]) -> None:
    if not args or type(args[0]) is not Made:
        raise BadPickle("the pickle makes a sparse tensor of no layout")


def _dtype(args: tuple[Any, ...]) -> None:
    if not args or type(args[0]) is not str or not re.fullmatch(r"[a-zA-Z?]\d{0,2}", args[0]):
        raise BadPickle("the pickle makes a dtype of NumPy that is no number's")


_ENCODE = Global("_codecs", "encode")
_DTYPE = Global("numpy", "dtype")
_ORDERED = Global("collections", "OrderedDict")
_TENSORS = [Global("torch._utils", f"_rebuild_tensor{tail}") for tail in ("", "_v2", "_v3")]
_CALLS: dict[Global, Callable[[tuple[Any, ...]], None]] = {
    **dict.fromkeys(_TENSORS, _view),
    Global("torch._utils", "_rebuild_qtensor"): _copied,
    Global("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): _copied_tensor,
    Global("torch._utils", "_rebuild_sparse_tensor"): _sparse,
    Global("torch._tensor", "_rebuild_from_type_v2"): _forwarded,
    **{Global("torch", f"{kind}Tensor"): _never for kind in (
        "", "Byte", "Char", "Bool", "Short", "Half", "BFloat16", "Int", "Float", "Long", "Double",
    )},
    **{Global("torch", name): _never for name in _WIDTHS},
    **{Global("torch.storage", name): _never for name in ("UntypedStorage", "TypedStorage")},
    _ORDERED: _of_parts,
    Global("collections", "Counter"): _of_parts,
    Global("builtins", "set"): _of_parts,
    Global("__builtin__", "set"): _of_parts,
    Global("builtins", "bytearray"): _bytearray,
    Global("__builtin__", "bytearray"): _bytearray,
    _ENCODE: _encode,
    Global("torch.serialization", "_get_layout"): _layout,
    _DTYPE: _dtype,
}  # fmt: skip
"""Checks the arguments of what torch would call."""


def _check_state(made: Made) -> None:
    """Allows only the few objects whose state torch itself saves."""
    if made.what == _ORDERED and type(made.state) is dict:
        return
    if made.what == _DTYPE and type(made.state) is tuple and len(made.state) == 8:
        if any(type(part) in (tuple, list, dict, Made) for part in made.state):
            raise BadPickle("the pickle makes a dtype of NumPy that is no number's")
        if _NUMPY_STATE.fullmatch(repr(made.state)):
            return
        raise BadPickle("the pickle makes a dtype of NumPy that is no number's")
    # DTensors: `weights_only` knows them.
    if type(made.what) is not Global or not made.what.module.startswith("torch.distributed."):
        raise pickle.UnpicklingError(f"GLOBAL {made.what} has a state")


class TorchArchive(NamedTuple):
    """An archive whose records fit its pickle."""

    pickled: int
    """Bytes of the pickle."""
    value: Any
    """The pickle, as data."""
    archive: zipfile.ZipFile
    root: str

    def content(self, storage: Storage) -> bytes | None:
        """The bytes of a storage; None if they have another byte order than this machine."""
        record = self.archive.NameToInfo.get(f"{self.root}/byteorder")
        # Without the record (torch before 2.1) torch takes the bytes for little-endian too.
        if (_LITTLE if record is None else (record.CRC, record.file_size)) != _NATIVE:
            return None
        return self.archive.read(f"{self.root}/data/{storage.key}")


def check_archive(archive: zipfile.ZipFile, name: str, size: int) -> TorchArchive:
    """Compares the records of an archive with the storages that its pickle names.

    `size` is that of the archive in bytes. Time and memory are proportional to the pickle and the
    archive's list.

    Raises:
        Damaged: a record is too short.
        ProbeError: torch.save does not write such an archive.
        Exception: see `storages`; or any, if the archive or pickle is damaged.
    """
    records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ProbeError(f"{name} has compressed records, which torch.save does not write")
    if sum(record.file_size for record in records) > size:
        raise Damaged(f"{name} lists more bytes in its records than the file has")
    root = records[0].filename.partition("/")[0]
    sizes = {record.filename: record.file_size for record in records}
    # torch's reader ignores case.
    if len({record.lower() for record in sizes}) != len(records):
        raise Damaged(f"{name} has two records of one name")
    pickled = archive.read(f"{root}/data.pkl")
    found = storages(pickled)
    for key, storage in found.storages.items():
        there = sizes.get(f"{root}/data/{key}")
        if there is not None and there < storage.bytes:
            raise Damaged(
                f"{name}: the record data/{key} is shorter than its tensor: {there} of "
                f"{storage.bytes} bytes"
            )
    return TorchArchive(len(pickled), found.value, archive, root)


def check_legacy_file(path: Path) -> int:
    """Checks a file of torch before 1.6: five pickles, then the storages.

    The result is the size of the value's pickle in bytes. ProbeError if the file names more storage
    than it has bytes, BadPickle if it is damaged or no such file; see also `storages`.
    """
    with (
        open(path, "rb", opener=regular_file.opener) as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        magic, at = read(data)
        if magic != _MAGIC:
            raise BadPickle("it does not begin as a file of torch does")
        for _ in range(2):  # the version of the protocol, and of the system
            _, at = read(data, at)
        _, needed, end = storages(data, at)
        if sum(storage.bytes for storage in needed.values()) > len(data):
            raise ProbeError(f"{path} is cut short: it has fewer bytes than its tensors need")
        keys, _ = read(data, end)
        if type(keys) is not list or any(type(key) is not str for key in keys):
            raise BadPickle("its list of storages is none")
        return end - at
