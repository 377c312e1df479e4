"""Events as they can be relied upon: a field is there in its shape, or it is not there."""

from __future__ import annotations

from collections.abc import Sequence

from healcore.runtime.events.models import EventModel, record
from healcore.runtime.events.reading import Event


def sound(event: Event) -> tuple[Event, list[str]]:
    """An event without the fields that this version does not know or that have another shape.

    Args:
        event: as `events.read` gives it: nothing is sure but `schema`, `seq`, `run` and `kind`.

    Returns:
        The event, and the names of known fields that were left out. `step` is always in it, None
        where it was missing or wrong.
    """
    _, wrong = record(event)
    known = {*EventModel.model_fields, "schema"} - set(wrong)
    return {"step": None, **{n: v for n, v in event.items() if n in known}}, wrong


def number(event: Event, name: str) -> float | None:
    """A number, also one that stands there as "nan" or "inf"; None if it is not there."""
    value = event.get(name)
    return None if value is None else float(value)


def words(flags: Sequence[str]) -> str:
    """Names of causes or actions, for a person: "grad spike and loss spike"."""
    return " and ".join(name.lower().replace("_", " ") for name in flags)
