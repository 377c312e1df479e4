"""Small JSON files with their own digest (xxh3, 128 bits), which detects a flipped bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from healcore import regular_file

_MAX_BYTES = 1 << 26
"""Enough for a manifest of half a million files."""


class ChecksumError(ValueError):
    """The bytes are not the output of `dumps`."""


def dumps(content: Mapping[str, Any]) -> bytes:
    """Canonical JSON with a digest of the content; ValueError for NaN and Inf."""
    body = json.loads(_canonical(content))
    return _canonical({**body, "digest": _digest(body)}) + b"\n"


def loads(data: bytes) -> dict[str, Any]:
    """The content of the output of `dumps`; ChecksumError if a bit has changed.

    The bytes must be canonical, because JSON ignores a flipped bit in white space or in the case of
    an exponent.
    """
    try:
        content = json.loads(data)
        digest = content.pop("digest")
        whole = digest == _digest(content) and dumps(content) == data  # dumps rejects NaN
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        raise ChecksumError("is not what was written") from None
    if not whole:
        raise ChecksumError("is not what was written: its digest differs")
    return content


def read(path: Path) -> dict[str, Any]:
    """The content of a file; OSError if it cannot be read, ChecksumError if it has changed."""
    return loads(regular_file.read(path, _MAX_BYTES))


def _canonical(content: Mapping[str, Any]) -> bytes:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode()


def _digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(_canonical(content))
