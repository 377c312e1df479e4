"""Small JSON files that contain their own digest (xxh3, 128 bits), which detects a flipped bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from healcore import regular_file

_MOST = 1 << 26
"""Bytes; a manifest of half a million files is as large."""


class ChecksumError(ValueError):
    """Bytes that `dumps` did not write."""


def dumps(content: Mapping[str, Any]) -> bytes:
    """Canonical JSON with a digest of the content; ValueError for NaN and Inf."""
    body = json.loads(_canonical(content))
    return _canonical({**body, "digest": _digest(body)}) + b"\n"


def loads(data: bytes) -> dict[str, Any]:
    """The content that `dumps` was given; ChecksumError if a bit has changed.

    The bytes must be canonical, because JSON ignores a flip in white space or in the case of an
    exponent.
    """
    try:
        content = json.loads(data)
        digest = content.pop("digest")
        whole = digest == _digest(content) and dumps(content) == data  # dumps refuses NaN
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        raise ChecksumError("is not what was written") from None
    if not whole:
        raise ChecksumError("is not what was written: its digest differs")
    return content


def read(path: Path) -> dict[str, Any]:
    """The content of a file; OSError if it cannot be read, ChecksumError if it has changed."""
    return loads(regular_file.read(path, _MOST))


def _canonical(content: Mapping[str, Any]) -> bytes:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode()


def _digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(_canonical(content))
