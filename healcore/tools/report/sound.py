"""Events as they can be relied upon: a field is there in its shape, or it is not there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from healcore.runtime.events.fields import ENVELOPE, FIELDS
from healcore.runtime.events.reading import Event

_NAMED = frozenset({"cause", "action", "ordered"})
"""Lists of names: those of a newer healcore are as good to read."""


def sound(event: Event) -> tuple[Event, list[str]]:
    """An event without the fields that this version does not know or that have another shape.

    Args:
        event: as `events.read` gives it: nothing is sure but `schema`, `seq`, `run` and `kind`.

    Returns:
        The event, and the names of known fields that were left out. `step` is always in it, None
        where it was missing or wrong.
    """
    kept: dict[str, Any] = {"step": None}
    wrong = []
    for name, value in event.items():
        field = ENVELOPE.get(name) or FIELDS.get(name)
        if field is None:
            continue
        if field.shape.fits(value) or (name in _NAMED and _all_text(value)):
            kept[name] = value
        else:
            wrong.append(name)
    return kept, wrong


def number(event: Event, name: str) -> float | None:
    """A number, also one that stands there as "nan" or "inf"; None if it is not there."""
    value = event.get(name)
    return None if value is None else float(value)


def words(flags: Sequence[str]) -> str:
    """Names of causes or actions, for a person: "grad spike and loss spike"."""
    return " and ".join(name.lower().replace("_", " ") for name in flags)


def _all_text(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
