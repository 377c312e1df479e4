"""Real text that every machine with Python has: the standard library's own sources, as bytes."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

from healcore.core.errors import HealcoreError

SYMBOLS = 256
"""A byte-level vocabulary: no tokenizer."""
_HELD_OUT_EVERY = 10
_LARGEST = 4 * 1024 * 1024  # bytes read at most; the list is cut there, always at the same file


class CorpusError(HealcoreError, RuntimeError):
    """The standard library's sources are not where they should be."""


class Corpus(NamedTuple):
    """Text in two parts, split by file, and what knowing little about it is worth."""

    train: np.ndarray
    """uint8 (n,)."""
    held_out: np.ndarray
    """uint8 (m,): every tenth file, which no run ever trains on."""
    files: int
    """How many files both parts are made of."""
    digest: str
    """First 12 hex digits of the SHA-256 of all bytes: the same text gives the same digest."""
    byte_frequency_loss: float
    """Nats per byte on the held-out text for one who knows only how frequent each byte is."""
    byte_pair_loss: float
    """The same for one who also knows which byte follows which: no context beyond one byte."""


def load(root: Path | None = None) -> Corpus:
    """Reads the top-level modules of the standard library in the order of their names.

    Args:
        root: folder to read ``*.py`` from; the running interpreter's library if None.

    Raises:
        CorpusError: there are too few sources (a stripped Python).
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    paths = sorted(root.glob("*.py"), key=lambda path: path.name)
    train, held_out, size = [], [], 0
    for index, path in enumerate(paths):
        text = path.read_bytes()
        size += len(text)
        if size > _LARGEST:
            break
        (held_out if index % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1 else train).append(text)
    if len(held_out) < 1 or size < 10_000:
        raise CorpusError(
            f"the demo trains on the standard library's sources, and {root} holds {len(paths)} of "
            f"them with {size} bytes: use a Python that was installed with its .py files"
        )
    seen, unseen = _bytes(train), _bytes(held_out)
    return Corpus(
        train=seen,
        held_out=unseen,
        files=len(train) + len(held_out),
        digest=hashlib.sha256(seen.tobytes() + unseen.tobytes()).hexdigest()[:12],
        byte_frequency_loss=_byte_frequency_loss(seen, unseen),
        byte_pair_loss=_byte_pair_loss(seen, unseen),
    )


def _bytes(texts: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(texts), np.uint8)


def _byte_frequency_loss(seen: np.ndarray, unseen: np.ndarray) -> float:
    """Cross-entropy in nats of `unseen` under the byte frequencies of `seen`, plus one each."""
    counts = np.bincount(seen, minlength=SYMBOLS) + 1.0
    return float(-np.log(counts / counts.sum())[unseen].mean())


def _byte_pair_loss(seen: np.ndarray, unseen: np.ndarray) -> float:
    """The same under the frequencies of pairs, mixed with those of single bytes."""
    single = np.bincount(seen, minlength=SYMBOLS) + 1.0
    single /= single.sum()
    code = seen[:-1].astype(np.int64) * SYMBOLS + seen[1:]
    pairs = np.bincount(code, minlength=SYMBOLS * SYMBOLS).reshape(SYMBOLS, SYMBOLS)
    pairs = pairs + 4.0 * single
    pairs /= pairs.sum(axis=1, keepdims=True)
    return float(-np.log(pairs[unseen[:-1], unseen[1:]]).mean())
