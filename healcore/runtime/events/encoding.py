"""Python values as JSON, without an exception and without losing the event they belong to.

What JSON has no number for becomes a string that `float` takes back: "nan", "inf", "-inf". null is
taken already, by "not known", and a run that died of NaN should say so.
"""

from __future__ import annotations

import enum
import json
import math
import os
from collections.abc import Mapping, Set
from typing import Any

_LONGEST = 10_000
"""Characters of a text: exceptions may print whole tensors."""


def line(event: Mapping[str, Any]) -> bytes:
    """One line, newline included. ASCII, so that no cut goes through the middle of a character.

    A field that cannot be written becomes a sentence saying so; the others stay.
    """
    fields = (f"{json.dumps(str(name))}:{_text(value)}" for name, value in event.items())
    return f"{{{','.join(fields)}}}\n".encode("ascii")


def _text(value: Any) -> str:
    try:
        return json.dumps(plain(value), allow_nan=False, separators=(",", ":"))
    # Anything: the value is the user's, and so is the code behind its `item` or `__repr__`.
    except Exception as error:
        return json.dumps(f"(could not be written: {type(error).__name__})")


def plain(value: Any) -> Any:
    """What `json` can write.

    Flags become their names, NamedTuples objects with the names of their fields, arrays of no
    dimension numbers. Anything else that JSON does not have becomes its text.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Flag):
        return [each.name for each in type(value) if each.name and each in value]
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        named = getattr(value, "_asdict", None)
        return [plain(each) for each in value] if named is None else plain(named())
    if isinstance(value, Set):
        return sorted((plain(each) for each in value), key=repr)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # NumPy, torch, JAX
        return plain(value.item())
    return _shortened(_worded(value))


def _worded(value: Any) -> str:
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    return str(value) if isinstance(value, str | os.PathLike) else repr(value)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ... ({len(text)} characters)"
