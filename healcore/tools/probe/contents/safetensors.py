"""Reads safetensors files: a length, a JSON header, the bytes of the arrays."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from healcore import regular_file
from healcore.plugins.checkpoint_contents import (
    PIECE,
    Array,
    Contents,
    Damaged,
    PathBudget,
    ProbeError,
    shape_of,
)

_MOST_HEADER = 100_000_000
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16",
    "U32": "uint32", "I32": "int32", "U64": "uint64", "I64": "int64",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
}  # fmt: skip
_BYTES = {"bfloat16": 2, "float8_e5m2": 1, "float8_e4m3fn": 1, "float8_e8m0fnu": 1}
_NUMPY = {*_DTYPES.values(), "complex128"} - _BYTES.keys()


def is_safetensors(path: Path) -> bool:
    """Whether a file begins like a safetensors file."""
    with open(path, "rb", opener=regular_file.opener) as file:
        start = file.read(9)
    return len(start) == 9 and start[8:] == b"{" and int.from_bytes(start[:8], "little") >= 2


def read_safetensors(path: Path) -> Contents:
    """Opens a file, with about 30 bytes of memory per byte of its header.

    Raises:
        Damaged: arrays overlap, leave gaps, or have the same name.
        ProbeError: the file is not of the format, or is truncated.
    """
    header, begin = _header(path)
    arrays, places = [], []
    available = path.stat().st_size - begin
    budget = PathBudget(begin)
    for name, entry in header.items():
        if name == "__metadata__":
            if not isinstance(entry, dict) or any(type(text) is not str for text in entry.values()):
                raise Damaged(f"{path}: the __metadata__ in its header is not of strings alone")
            continue
        try:
            dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
            if any(type(number) is not int for number in (*shape, first, last)):
                raise TypeError
            known, shape = _DTYPES.get(dtype), shape_of(shape)
            path_in = budget.take(tuple(name.split(".")))
        except ProbeError as error:
            raise ProbeError(f"{path}: {error}") from None
        except (TypeError, KeyError, ValueError):
            raise ProbeError(f"{path}: the header's entry of {name} is not one") from None
        if not 0 <= first <= last <= available or any(size < 0 for size in shape):
            raise ProbeError(
                f"{path}: {name} lies at bytes {first} to {last} of {available}: the file is cut "
                "short, or its header damaged"
            )
        if known is not None:
            width = _BYTES.get(known) or np.dtype(known).itemsize
            if width * math.prod(shape) != last - first:
                raise ProbeError(
                    f"{path}: {name} is {dtype}{list(shape)}, not {last - first} bytes"
                )
            reader = _reader(path, begin + first, last - first, known, width)
        else:
            reader = _unknown(name, dtype)
        # Not in the model's order: writers sort by size and name.
        arrays.append(Array(path_in, known or dtype, shape, reader, in_order=False))
        places.append((first, last, name))
    _check_places(path, places, available)
    return Contents("safetensors", arrays, {})


def _check_places(path: Path, places: list[tuple[int, int, str]], available: int) -> None:
    """Raises Damaged unless the arrays follow each other without a gap, as the format demands."""
    end = 0
    for first, last, name in sorted(places):
        if first != end:
            how = (
                "overlaps another array" if first < end else f"leaves a gap of {first - end} bytes"
            )
            raise Damaged(f"{path}: {name} {how}: its header is damaged or forged")
        end = last
    if end != available:
        raise Damaged(f"{path}: {available} bytes of arrays are there, its header has {end}")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, or Damaged if a key occurs twice: readers differ in which one they use."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise Damaged(f"{twice} is there twice")
    return found


def _header(path: Path) -> tuple[dict[str, Any], int]:
    size = path.stat().st_size
    with open(path, "rb", opener=regular_file.opener) as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MOST_HEADER, size - 8):
            raise ProbeError(f"{path} is no safetensors file: its header would have {length} bytes")
        try:
            header = json.loads(file.read(length), object_pairs_hook=_without_duplicates)
        except Damaged as error:
            raise Damaged(f"{path}: in its header {error}") from None
        except (ValueError, RecursionError):
            raise ProbeError(f"{path}: its header is no JSON: the file is damaged") from None
    if not isinstance(header, dict):
        raise ProbeError(f"{path}: its header is no JSON object: the file is damaged")
    return header, 8 + length


def _reader(
    path: Path, at: int, length: int, dtype: str, width: int
) -> Callable[[], Iterator[np.ndarray]]:
    def read() -> Iterator[np.ndarray]:
        with open(path, "rb", opener=regular_file.opener) as file:
            file.seek(at)
            left = length
            while left:
                data = file.read(min(left, PIECE * width))
                if len(data) != min(left, PIECE * width):
                    raise ProbeError(f"{path} has become shorter while it was read")
                left -= len(data)
                yield widened(np.frombuffer(data, np.uint8), dtype)

    return read


def _unknown(name: str, dtype: str) -> Callable[[], Iterator[np.ndarray]]:
    def read() -> Iterator[np.ndarray]:
        raise ProbeError(f"{name} is of dtype {dtype[:40]}, which healcore does not know")

    return read


def widened(raw: np.ndarray, dtype: str) -> np.ndarray:
    """The elements in an array's bytes (uint8, little-endian), in a dtype that NumPy can add.

    Raises ValueError for an unknown dtype.
    """
    if dtype == "bfloat16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "float8_e5m2":
        return (raw.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if dtype == "float8_e4m3fn":
        return _e4m3fn()[raw]
    if dtype == "float8_e8m0fnu":  # a power of two; 255 is NaN
        return np.where(raw == 255, np.nan, np.exp2(raw.astype(np.float64) - 127)).astype(
            np.float32
        )
    if dtype in _NUMPY:
        return raw.view(np.dtype(dtype).newbyteorder("<"))
    raise ValueError(f"arrays of {dtype} cannot be read here")


def _e4m3fn() -> np.ndarray:
    bits = np.arange(256)
    exponent, fraction = bits >> 3 & 15, (bits & 7) / 8
    normal = np.where(exponent > 0, 1 + fraction, fraction)
    values = np.where(bits >> 7, -1, 1) * normal * 2.0 ** (np.maximum(exponent, 1) - 7)
    return np.where((bits & 127) == 127, np.nan, values).astype(np.float32)
