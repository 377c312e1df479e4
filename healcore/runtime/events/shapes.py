"""The shapes that fields of events have: in JSON Schema, and as a check in Python."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from healcore.core.verdict import Action, Cause

NONFINITE = ("nan", "inf", "-inf")
"""Numbers that JSON does not have, as strings that `float` takes."""

ENDINGS = ("completed", "stopped", "exception", "signal", "interrupted", "killed")
"""How a process ends."""

_LARGEST = 2**53  # above it, readers that have only doubles round


class Shape(NamedTuple):
    """What a value looks like."""

    words: str
    schema: dict[str, Any]
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) or value in NONFINITE


def whole(least: int = 0) -> Shape:
    """A whole number from `least` up."""
    return Shape(
        "whole number" if least == 0 else f"whole number from {least}",
        {"type": "integer", "minimum": least, "maximum": _LARGEST},
        lambda value: type(value) is int and least <= value <= _LARGEST,
    )


def or_null(shape: Shape) -> Shape:
    """The shape, or null."""
    return Shape(
        f"{shape.words}, or null",
        {"anyOf": [shape.schema, {"type": "null"}]},
        lambda value: value is None or shape.fits(value),
    )


def one_of(*names: str) -> Shape:
    """One of a few words."""
    return Shape(
        "one of " + ", ".join(names),
        {"type": "string", "enum": list(names)},
        lambda value: isinstance(value, str) and value in names,
    )


def array(of: Shape, words: str) -> Shape:
    """An array of one shape."""
    return Shape(
        words,
        {"type": "array", "items": of.schema},
        lambda value: isinstance(value, list) and all(of.fits(each) for each in value),
    )


def record(words: str, **parts: Shape) -> Shape:
    """An object with these parts, all of them."""
    return Shape(
        words,
        {
            "type": "object",
            "properties": {name: part.schema for name, part in parts.items()},
            "required": list(parts),
        },
        lambda value: (
            isinstance(value, dict)
            and value.keys() == parts.keys()
            and all(part.fits(value[name]) for name, part in parts.items())
        ),
    )


def matching(words: str, pattern: str) -> Shape:
    """A text of a form."""
    return Shape(
        words,
        {"type": "string", "pattern": pattern},
        lambda value: isinstance(value, str) and re.search(pattern, value) is not None,
    )


TEXT = Shape("text", {"type": "string"}, lambda value: isinstance(value, str))
TRUTH = Shape("true or false", {"type": "boolean"}, lambda value: isinstance(value, bool))
NUMBER = Shape(
    "number",
    {"anyOf": [{"type": "number"}, {"type": "string", "enum": list(NONFINITE)}]},
    _is_number,
)
SECONDS = Shape(
    "seconds", {"type": "number"}, lambda value: type(value) in (int, float) and value == value
)
TIME = matching("date and time", r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$")
VERSIONS = Shape(
    "object of texts",
    {"type": "object", "additionalProperties": {"type": "string"}},
    lambda value: isinstance(value, dict) and all(isinstance(each, str) for each in value.values()),
)
CAUSES = array(one_of(*(str(each.name) for each in Cause)), "array of causes")
ACTIONS = array(one_of(*(str(each.name) for each in Action)), "array of actions")
BATCHES = array(
    Shape(
        "",
        {"type": "array", "items": whole().schema, "minItems": 2, "maxItems": 2},
        lambda value: isinstance(value, list) and len(value) == 2 and all(map(whole().fits, value)),
    ),
    "array of `[epoch, index]`",
)
EVIDENCE = array(record("", name=TEXT, grad_norm=NUMBER), "array of `{name, grad_norm}`")
READINGS = record(
    "`{loss, grad_norm, threshold, z, z_loss}`, numbers",
    loss=NUMBER,
    grad_norm=NUMBER,
    threshold=NUMBER,
    z=NUMBER,
    z_loss=NUMBER,
)
