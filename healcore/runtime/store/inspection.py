"""Digests of files and arrays, and checks for NaN and Inf.

Digests are xxh3, 128 bits; they detect damage, not malice. xxh3 costs little beside a copy
(measured: 15 to 22 GB/s on one core; crc32 7, sha256 2). Each call in the loops releases the GIL.
Arrays are read in pieces that stay in a core's cache, so a second read of a piece costs no memory
bandwidth.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import numpy as np
import xxhash
from pydantic import Field

from healcore import regular_file
from healcore.runtime.store.host_memory import allocate

_PIECE = 1 << 17
"""Bytes of one read, which fit into a core's cache."""
_WORTH_THREADS = 8 << 20
"""Least number of bytes that are worth several threads."""

A = TypeVar("A")
B = TypeVar("B")


class Digest(NamedTuple):
    """The size and digest of a file."""

    bytes: Annotated[int, Field(ge=0, lt=1 << 63)]
    xxh3_128: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


def digest_of(data: bytes) -> Digest:
    """The digest of a file with this content."""
    return Digest(len(data), xxhash.xxh3_128_hexdigest(data))


class Inspection(NamedTuple):
    """The result of reading the arrays of a copy."""

    digests: dict[str, str]
    """Key of a block -> xxh3, hexadecimal."""
    nonfinite: tuple[str, ...]
    """Names of all arrays with NaN or Inf, allowed or not."""


# -- files ------------------------------------------------------------------------------------


def file_digest(path: Path, *, sync: bool = False) -> Digest:
    """The digest of a file's content; `sync` also waits until the content is on disk."""
    state, size = xxhash.xxh3_128(), 0
    buffer = bytearray(_PIECE)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0, opener=regular_file.opener) as file:
        while count := file.readinto(buffer):
            state.update(view[:count])
            size += count
        if sync:
            os.fsync(file.fileno())
    return Digest(size, state.hexdigest())


def map_in_threads(action: Callable[[A], B], items: Sequence[A], nbytes: int) -> list[B]:
    """Applies an action that releases the interpreter's lock, in threads if `nbytes` is large.

    The results are in no particular order.
    """
    workers = threads() if nbytes >= _WORTH_THREADS else 1
    if workers == 1:
        return [action(item) for item in items]
    # Not one task per item: submitting a task takes as long as a small item.
    with ThreadPoolExecutor(workers) as pool:
        shares = pool.map(lambda first: [*map(action, items[first::workers])], range(workers))
        return [result for share in shares for result in share]


def threads() -> int:
    """Number of threads to read with, at most four: more make neither disk nor memory faster."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(4, cores or 1))


# -- copies in host memory --------------------------------------------------------------------


class Block(NamedTuple):
    """The bytes of one array, or of one part of an array."""

    name: str
    dtype: str
    raw: np.ndarray
    """uint8 (n,), contiguous."""
    part: str = ""
    """Name of the part; empty for the whole array."""

    @property
    def key(self) -> str:
        """Unique among the blocks of a copy."""
        return self.name + self.part


def inspect(blocks: Iterable[Block]) -> Inspection:
    """Digests of all arrays and the names of arrays with NaN or Inf, in one pass."""
    digests, nonfinite = {}, []
    for block in blocks:
        state, finite_so_far = xxhash.xxh3_128(), True
        for at in range(0, len(block.raw), _PIECE):
            piece = block.raw[at : at + _PIECE]
            state.update(piece.data)
            finite_so_far = finite_so_far and finite(piece, block.dtype)
        digests[block.key] = state.hexdigest()
        if not finite_so_far:
            nonfinite.append(block.name)
    return Inspection(digests, tuple(dict.fromkeys(nonfinite)))


def checked_copies(
    blocks: Sequence[Block], digests: dict[str, str], changed: Callable[[str], Exception]
) -> list[np.ndarray]:
    """Copies of the blocks in fresh memory; raises `changed(key)` where the digest differs."""
    copies = [allocate(len(block.raw)) for block in blocks]

    def copy(pair: tuple[Block, np.ndarray]) -> None:
        block, into = pair
        state = xxhash.xxh3_128()
        for at in range(0, len(into), _PIECE):
            piece = into[at : at + _PIECE]
            np.copyto(piece, block.raw[at : at + _PIECE])
            state.update(piece.data)
        if state.hexdigest() != digests[block.key]:
            raise changed(block.key)

    map_in_threads(copy, list(zip(blocks, copies, strict=True)), sum(map(len, copies)))
    return copies


def disallowed(names: Iterable[str], nonfinite_ok: Collection[str]) -> tuple[str, ...]:
    """The names that no pattern of `nonfinite_ok` (`model.*.mask`) matches."""
    return tuple(
        name
        for name in names
        if not any(name == pattern or fnmatchcase(name, pattern) for pattern in nonfinite_ok)
    )


# -- numbers ----------------------------------------------------------------------------------
#
# A number is NaN or Inf exactly if all bits of its exponent are ones. The bits without the sign, as
# an integer, are then at least the bits of infinity. This test needs no bfloat16 type, raises no
# warnings and allocates nothing.

_INFINITY = {
    "float16": (2, 0x7C00),
    "bfloat16": (2, 0x7F80),
    "float32": (4, 0x7F80_0000),
    "float64": (8, 0x7FF0_0000_0000_0000),
    "complex32": (2, 0x7C00),
    "complex64": (4, 0x7F80_0000),
    "complex128": (8, 0x7FF0_0000_0000_0000),
    "float8_e3m4": (1, 0x70),
    "float8_e4m3": (1, 0x78),
    "float8_e5m2": (1, 0x7C),
    "float8_e4m3fn": (1, 0x7F),  # no Inf, one NaN
}
"""Format -> size of a number in bytes, and the bits of infinity."""
_NAN = {
    "float8_e4m3fnuz": 0x80,
    "float8_e5m2fnuz": 0x80,
    "float8_e4m3b11fnuz": 0x80,
    "float8_e8m0fnu": 0xFF,
}
"""Format of one byte without Inf -> the bits of its only NaN."""
# All other formats (integers, bool, 4-bit and 6-bit floats) have no NaN and no Inf.


def finite(raw: np.ndarray, dtype: str) -> bool:
    """Whether an array's bytes, uint8 (n,), hold no NaN or Inf; `dtype` is a name: "bfloat16"."""
    if dtype in _NAN:
        return not bool((raw == _NAN[dtype]).any())
    if dtype not in _INFINITY or not len(raw):
        return True
    # Two maxima: the signed maximum finds positive numbers, the unsigned maximum negative numbers.
    # One maximum over the bits without the sign would need fresh memory, which takes longer.
    size, infinity = _INFINITY[dtype]
    positive, negative = raw.view(f"i{size}").max(), raw.view(f"u{size}").max()
    return bool(positive < infinity and negative < infinity | 1 << 8 * size - 1)
