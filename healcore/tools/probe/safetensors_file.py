"""Reads safetensors files in pieces. The safetensors library validates the header."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from healcore import regular_file
from healcore.plugins.checkpoint_contents import (
    PIECE,
    Array,
    Contents,
    Damaged,
    PathBudget,
    ProbeError,
    first_line,
    shape_of,
)

_LARGEST_HEADER = 100_000_000
"""Bytes. The safetensors library also rejects a larger header."""
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16",
    "U32": "uint32", "I32": "int32", "U64": "uint64", "I64": "int64",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
}  # fmt: skip
_NOT_IN_NUMPY = {"bfloat16", "float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu"}
_NUMPY = {*_DTYPES.values(), "complex128"} - _NOT_IN_NUMPY


def is_safetensors(path: Path) -> bool:
    """Whether a file begins with a safetensors header that fits into the file."""
    with open(path, "rb", opener=regular_file.opener) as file:
        start = file.read(9)
    length = int.from_bytes(start[:8], "little")
    fits = 2 <= length <= min(_LARGEST_HEADER, path.stat().st_size - 8)
    return start[8:] == b"{" and fits


def read_safetensors(path: Path) -> Contents:
    """Opens a file. Needs about 30 bytes of memory per byte of the header.

    Raises:
        Damaged: the header is invalid, or does not match the bytes of the arrays.
        ProbeError: names or shapes are larger than in any model.
    """
    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise Damaged(f"{path}: safetensors rejects its header: {first_line(error)}") from None
    with open(path, "rb", opener=regular_file.opener) as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(begin - 8))
    header.pop("__metadata__", None)
    budget, arrays = PathBudget(begin), []
    for name, entry in header.items():
        code, (first, last) = str(entry["dtype"]), entry["data_offsets"]
        dtype = _DTYPES.get(code, code)
        try:
            keys, shape = budget.take(tuple(name.split("."))), shape_of(entry["shape"])
        except ValueError as error:
            raise ProbeError(f"{path}: {error}") from None
        reader = _reader(path, begin + first, last - first, dtype)
        # Writers sort by size and name, so the order of the model is lost.
        arrays.append(Array(keys, dtype, shape, reader, in_order=False))
    return Contents("safetensors", arrays, {})


def _reader(path: Path, at: int, length: int, dtype: str) -> Callable[[], Iterator[np.ndarray]]:
    piece = PIECE * (np.dtype(dtype).itemsize if dtype in _NUMPY else 2)

    def read() -> Iterator[np.ndarray]:
        with open(path, "rb", opener=regular_file.opener) as file:
            file.seek(at)
            for rest in range(length, 0, -piece):
                data = file.read(min(rest, piece))
                if len(data) != min(rest, piece):
                    raise ProbeError(f"{path} was truncated while it was read")
                yield decode_elements(np.frombuffer(data, np.uint8), dtype)

    return read


def decode_elements(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Converts an array's bytes (uint8, little-endian) to elements of a dtype that NumPy can add.

    Raises ValueError for an unknown dtype.
    """
    if dtype == "bfloat16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "float8_e5m2":
        return (raw.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if dtype == "float8_e4m3fn":
        return _e4m3fn()[raw]
    if dtype == "float8_e8m0fnu":  # a power of two; 255 is NaN
        powers = np.exp2(raw.astype(np.float64) - 127)
        return np.where(raw == 255, np.nan, powers).astype(np.float32)
    if dtype in _NUMPY:
        return raw.view(np.dtype(dtype).newbyteorder("<"))
    raise ValueError(f"arrays of dtype {dtype} cannot be read here")


def _e4m3fn() -> np.ndarray:
    bits = np.arange(256)
    exponent, fraction = bits >> 3 & 15, (bits & 7) / 8
    normal = np.where(exponent > 0, 1 + fraction, fraction)
    values = np.where(bits >> 7, -1, 1) * normal * 2.0 ** (np.maximum(exponent, 1) - 7)
    return np.where((bits & 127) == 127, np.nan, values).astype(np.float32)
