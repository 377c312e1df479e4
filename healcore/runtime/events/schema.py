"""The format as a JSON Schema, and the check that our own events are held to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healcore.runtime.events.fields import ENVELOPE, FIELDS
from healcore.runtime.events.kinds import KINDS
from healcore.runtime.events.reading import SCHEMA


def problems(event: Mapping[str, Any]) -> list[str]:
    """What is wrong with an event, in words; nothing if it is as this version writes it.

    Stricter than `json_schema`: kinds and fields that are not known here, over which a reader of a
    newer file passes, are problems.
    """
    kind = KINDS.get(event.get("kind", ""))
    if kind is None:
        return [f"kind {event.get('kind')!r} is none of {', '.join(KINDS)}"]
    needed = (*ENVELOPE, *kind.needs)
    found = [f"{event['kind']} has no {name}" for name in needed if name not in event]
    for name, value in event.items():
        field = ENVELOPE.get(name) or FIELDS.get(name)
        if field is None:
            found.append(f"{event['kind']} has a field {name!r} that no event has")
        elif not field.shape.fits(value):
            found.append(f"{event['kind']}: {name} is {field.shape.words}, not {value!r:.200}")
    return found


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of one line.

    Open to kinds and fields that a later version adds without a new `schema` number.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"healcore events, schema {SCHEMA}",
        "type": "object",
        "properties": {
            name: {**field.shape.schema, "description": field.about}
            for name, field in (*ENVELOPE.items(), *FIELDS.items())
        },
        "required": list(ENVELOPE),
        "allOf": [
            {
                "if": {"properties": {"kind": {"const": name}}, "required": ["kind"]},
                "then": {"description": kind.when, "required": list(kind.needs)},
            }
            for name, kind in KINDS.items()
        ],
    }
