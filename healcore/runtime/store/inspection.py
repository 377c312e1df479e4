"""Reading every byte of a snapshot once: digests and the finite check together.

In pieces that stay in a core's cache, so that the second reading of a piece costs no memory
bandwidth. Every call in the loops releases the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np
import xxhash

from healcore.runtime.store import finite
from healcore.runtime.store.digest import mapped
from healcore.runtime.store.snapshot import Block, fresh

_PIECE = 1 << 17


class Inspection(NamedTuple):
    """What a snapshot was found to hold."""

    digests: dict[str, str]
    """Key of a block -> xxh3, 128 bits, hexadecimal."""
    nonfinite: tuple[str, ...]
    """All arrays with NaN or Inf, meant or not."""


def inspect(blocks: Iterable[Block]) -> Inspection:
    """Digests of all arrays, and those with NaN or Inf."""
    digests, bad = {}, []
    for block in blocks:
        state, sound = xxhash.xxh3_128(), True
        for at in range(0, len(block.raw), _PIECE):
            piece = block.raw[at : at + _PIECE]
            state.update(piece.data)
            sound = sound and finite.finite_chunk(piece, block.dtype)
        digests[block.key] = state.hexdigest()
        if not sound:
            bad.append(block.name)
    return Inspection(digests, tuple(dict.fromkeys(bad)))


def nonfinite(blocks: Iterable[Block]) -> tuple[str, ...]:
    """Only the names of arrays with NaN or Inf."""
    found = [block.name for block in blocks if not finite.finite(block.raw, block.dtype)]
    return tuple(dict.fromkeys(found))


def unmeant(names: Iterable[str], nonfinite_ok: Collection[str]) -> tuple[str, ...]:
    """Those of some arrays with NaN or Inf where that is not meant.

    Args:
        names: of the arrays.
        nonfinite_ok: patterns of names (`model.*.mask`) where it is, or names.
    """
    return tuple(name for name in names if not matches(name, nonfinite_ok))


def first_difference(blocks: Iterable[Block], digests: dict[str, str]) -> str | None:
    """Name of the first array whose digest is another one now."""
    for block in blocks:
        if xxhash.xxh3_128_hexdigest(block.raw.data) != digests[block.key]:
            return block.key
    return None


def checked_copies(
    blocks: Sequence[Block], digests: dict[str, str], changed: Callable[[str], Exception]
) -> list[np.ndarray]:
    """Copies of the blocks' bytes in fresh memory, checked on the way.

    Args:
        blocks: what to copy.
        digests: what the blocks were when they were saved.
        changed: makes the error for one that is not the same any more.
    """
    sizes = [len(block.raw) for block in blocks]
    copies = fresh(sizes)

    def copy(pair: tuple[Block, np.ndarray]) -> None:
        block, into = pair
        state = xxhash.xxh3_128()
        for at in range(0, len(into), _PIECE):
            piece = into[at : at + _PIECE]
            np.copyto(piece, block.raw[at : at + _PIECE])
            state.update(piece.data)
        if state.hexdigest() != digests[block.key]:
            raise changed(block.key)

    mapped(copy, list(zip(blocks, copies, strict=True)), sum(sizes))
    return copies


def matches(name: str, patterns: Collection[str]) -> bool:
    """Whether a name fits one of the patterns (`*` and `?`), or is one of them."""
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)
