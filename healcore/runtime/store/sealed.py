"""Small JSON files that notice every flipped bit in themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import xxhash


class Unsealed(ValueError):
    """Bytes that `seal` did not write, or not like that."""


def seal(content: Mapping[str, Any]) -> bytes:
    """Canonical JSON with a digest of the rest in it (xxh3, 128 bits).

    Args:
        content: JSON-safe, without non-finite numbers.
    """
    body = json.loads(_canonical(content))
    return _canonical({**body, "digest": _digest(body)}) + b"\n"


def unseal(data: bytes) -> dict[str, Any]:
    """What was sealed.

    Raises:
        Unsealed: a single bit is not as it was. That the bytes must be canonical catches a flip
            that JSON would not notice, in white space or in the case of an exponent.
    """
    try:
        content = json.loads(data)
        digest = content.pop("digest")
        whole = digest == _digest(content) and seal(content) == data  # NaN cannot be sealed
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        raise Unsealed("is not what was written") from None
    if not whole:
        raise Unsealed("is not what was written: its digest differs")
    return content


def _canonical(content: Mapping[str, Any]) -> bytes:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode()


def _digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(_canonical(content))
