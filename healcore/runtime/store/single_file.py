"""A small checkpoint of one process as one file, in the format of safetensors.

The writers of DCP and Orbax make several files and directories for each checkpoint. For a state of
kilobytes that takes longer than all the rest of a save. Here such a state is one file, which the
`load_file` of safetensors reads without healcore: the arrays by name, and in the metadata

    manifest    step, attempt and digest, sealed, as in `manifest.json`
    state       structure of the state, Python values, as in `state.json`
    record      the record at the save, sealed, as in `healing.json`; absent without a record

The header is written here and not by the library, because the library takes other arguments in
each version and no bfloat16 without torch. The library checks and reads what is restored.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import xxhash

from healcore import regular_file
from healcore.runtime.store.checksums import DIFFERS, ChecksumError, Digest

FILE = "checkpoint.safetensors"
"""Name of the file in the directory of its checkpoint."""
MAX_BYTES = 16 << 20
"""Largest size of the arrays and of the structure of a state that is saved as one file. The file is
composed in memory. Above this size the fixed cost of DCP and Orbax is small compared with the
copying."""
_MAX_FILE_BYTES = 1 << 28
"""Largest size of a file that is read. A file has at most `MAX_BYTES` of arrays and as much of
structure, which takes twice the bytes as text in a text, and a record of at most 64 MiB."""

_METADATA = "__metadata__"
_ALIGNMENT = 8
"""The header's size is a multiple of this number of bytes, as the library writes it."""
_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32",
    "int32": "I32", "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16",
    "float32": "F32", "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""Name of a dtype -> its name in safetensors. Arrays of other dtypes are stored as bytes."""
DTYPES = {stored: name for name, stored in _DTYPES.items()}
"""Name of a dtype in safetensors -> its name in NumPy, ml_dtypes and torch."""


class ArrayType(NamedTuple):
    """The type of a whole array."""

    dtype: str
    """Name of the dtype in NumPy, ml_dtypes or torch: "bfloat16"."""
    shape: Sequence[int]
    itemsize: int
    """Size of an element in bytes."""

    @property
    def stored(self) -> tuple[str, tuple[int, ...]]:
        """The dtype, as safetensors names it, and the shape in a file."""
        if self.dtype in _DTYPES:
            return _DTYPES[self.dtype], tuple(self.shape)
        return "U8", (math.prod(self.shape) * self.itemsize,)


class Header(NamedTuple):
    """The header of a file, parsed.

    It has step, attempt and record of a checkpoint, so a list of checkpoints reads no arrays.
    """

    manifest: str
    """The sealed manifest."""
    state: str
    """The structure of the state, as JSON."""
    record: str | None
    """The sealed record at the save, or None."""
    table: dict[str, Any]
    """Name of an array -> "dtype", "shape" and "data_offsets"."""
    start: int
    """Position of the first array in the file."""

    @property
    def size(self) -> int:
        """Size of the whole file in bytes."""
        ends = [entry["data_offsets"][1] for entry in self.table.values()]
        return self.start + max(ends, default=0)


def can_hold(names: Sequence[str]) -> bool:
    """Whether a file can hold arrays of these names.

    It cannot if a name is not valid text, or is the key of the metadata. Such a state is saved as
    several files.
    """
    try:
        "".join(names).encode()
    except UnicodeEncodeError:  # half of a surrogate pair: no JSON
        return False
    return _METADATA not in names


class Content:
    """The content of a new file, except its manifest.

    Args:
        arrays: name -> type and bytes, uint8 (n,), of an array; see `can_hold`.
        state: the structure of the state, as JSON.
        record: the sealed record, or None.
    """

    def __init__(
        self,
        arrays: Mapping[str, tuple[ArrayType, np.ndarray]],
        state: bytes,
        record: bytes | None,
    ) -> None:
        texts = {"state": state.decode()}
        if record is not None:
            texts["record"] = record.decode()
        self._header: dict[str, Any] = {_METADATA: texts}
        self._parts: list[Any] = []
        end = 0
        # The largest elements first, so that each array is aligned when the file is mapped.
        for name in sorted(arrays, key=lambda name: -arrays[name][0].itemsize):
            of_type, raw = arrays[name]
            dtype, shape = of_type.stored
            begin, end = end, end + len(raw)
            self._header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
            self._parts.append(raw.data)

    def digest(self) -> Digest:
        """The size and the digest of everything but the manifest.

        The manifest holds this digest, so it cannot be part of what is digested. It has a digest
        of its own, see `checksums.seal`.
        """
        return _digest(self._header, self._parts)

    def with_manifest(self, manifest: bytes) -> bytes:
        """The bytes of the file.

        Args:
            manifest: the sealed manifest, which has the `digest` of everything else.
        """
        texts = {**self._header[_METADATA], "manifest": manifest.decode()}
        header = _header_bytes({**self._header, _METADATA: texts})
        return b"".join([struct.pack("<Q", len(header)), header, *self._parts])


def read_header(path: Path) -> Header:
    """Reads the header of a file, without the arrays. `digest_of` checks it bit by bit.

    Raises:
        OSError: the file cannot be read.
        ChecksumError: the header does not have the form that `Content` writes.
    """
    with open(path, "rb", opener=regular_file.opener) as file:
        length = _header_length(file.read(8))
        return _parsed(file.read(length))


def digest_of(path: Path) -> Digest:
    """The digest of an existing file, as `Content.digest`.

    The header must be canonical, because JSON ignores a flipped bit in white space and in the case
    of an escape.

    Raises:
        OSError: the file cannot be read.
        ChecksumError: the header is not as `Content` writes it.
    """
    data = memoryview(regular_file.read(path, _MAX_FILE_BYTES))
    start = 8 + _header_length(data[:8])
    header = _parsed(bytes(data[8:start]))
    texts = {"state": header.state}
    if header.record is not None:
        texts["record"] = header.record
    content = {_METADATA: texts, **header.table}
    whole = {**content, _METADATA: {**texts, "manifest": header.manifest}}
    if _header_bytes(whole) != data[8:start]:
        raise ChecksumError(DIFFERS)
    return _digest(content, [data[start:]])


def read_arrays(path: Path, wanted: Mapping[str, ArrayType]) -> dict[str, np.ndarray]:
    """Reads some arrays of a file; name -> the bytes of the array, uint8 (n,).

    Raises:
        OSError: the file cannot be read.
        ValueError: safetensors rejects the file, or an array is missing or of another type.
    """
    try:
        found = dict(safetensors.deserialize(regular_file.read(path, _MAX_FILE_BYTES)))
    except safetensors.SafetensorError as error:
        raise ValueError(f"safetensors rejects it: {error}") from None
    arrays = {}
    for name, of_type in wanted.items():
        entry = found.get(name, {"dtype": "nothing", "shape": ()})
        stored, required = (entry["dtype"], tuple(entry["shape"])), of_type.stored
        if stored != required:
            raise ValueError(f"{name:.200} is {stored!s:.200}, not {required}")
        arrays[name] = np.frombuffer(entry["data"], np.uint8)
    return arrays


def _header_bytes(header: Mapping[str, Any]) -> bytes:
    """The header as canonical JSON, filled up with spaces as the library does it."""
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    return text + b" " * (-len(text) % _ALIGNMENT)


def _digest(header: Mapping[str, Any], parts: Sequence[Any]) -> Digest:
    """The size and the digest of a header and of what follows it."""
    state, size = xxhash.xxh3_128(), 0
    for part in (_header_bytes(header), *parts):
        state.update(part)
        size += len(part)
    return Digest(size, state.hexdigest())


def _header_length(start: bytes | memoryview) -> int:
    """The length of the header, from the first 8 bytes of a file."""
    if len(start) != 8:
        raise ChecksumError(DIFFERS)
    (length,) = struct.unpack("<Q", start)
    if length > _MAX_FILE_BYTES:
        raise ChecksumError(DIFFERS)
    return length


def _parsed(data: bytes) -> Header:
    """Parses a header. ChecksumError if it does not have the form that `Content` writes."""
    try:
        content = json.loads(data)
        texts = content.pop(_METADATA)
        header = Header(
            texts["manifest"], texts["state"], texts.get("record"), content, 8 + len(data)
        )
        whole = all(type(text) is str for text in texts.values())
        whole = whole and type(header.size) is int
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise ChecksumError(DIFFERS)
    return header
