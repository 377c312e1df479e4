"""Checks that an event is exactly as this version writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from healcore.events import schema
from healcore.events.models import EventModel


def problems(event: Mapping[str, Any]) -> list[str]:
    """What is wrong with an event; nothing if it is as this version writes it.

    Stricter than `json_schema`: unknown kinds and fields, which a reader of a newer file ignores,
    are problems.
    """
    kind = schema.KINDS.get(event.get("kind", ""))
    if kind is None:
        return [f"kind {event.get('kind')!r} is none of {', '.join(schema.KINDS)}"]
    known = {field.alias or name for name, field in EventModel.model_fields.items()}
    found = [f"{event['kind']} has no {name}" for name in kind.needs if name not in event]
    found += [
        f"{event['kind']} has a field {name!r} that no event has"
        for name in event
        if name not in known
    ]
    try:
        EventModel.model_validate(event)
    except ValidationError as error:
        wrong = {str(each["loc"][0]): each["msg"] for each in error.errors(include_url=False)}
        found += [
            f"{event['kind']}: {name}: {why}, not {event.get(name, 'left out')!r:.200}"
            for name, why in wrong.items()
        ]
    return found
