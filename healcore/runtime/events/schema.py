"""The formats as JSON Schema, and the check that our own events are held to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from healcore.runtime.events.models import KINDS, EventHead, EventModel, MetricsModel
from healcore.runtime.events.reading import SCHEMA

ENVELOPE = tuple(field.alias or name for name, field in EventHead.model_fields.items())
"""Every event has these."""


def problems(event: Mapping[str, Any]) -> list[str]:
    """What is wrong with an event, in words; nothing if it is as this version writes it.

    Stricter than `json_schema`: kinds and fields that are not known here, over which a reader of a
    newer file passes, are problems.
    """
    kind = KINDS.get(event.get("kind", ""))
    if kind is None:
        return [f"kind {event.get('kind')!r} is none of {', '.join(KINDS)}"]
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


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of one line of an events file.

    Open to kinds and fields that a later version adds without a new `schema` number.
    """
    return {
        **_document(EventModel, "events"),
        "allOf": [
            {
                "if": {"properties": {"kind": {"const": name}}, "required": ["kind"]},
                "then": {"description": kind.when, "required": list(kind.needs)},
            }
            for name, kind in KINDS.items()
        ],
    }


def metrics_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of one line of a metrics file."""
    return _document(MetricsModel, "metrics")


def _document(model: type[BaseModel], what: str) -> dict[str, Any]:
    found = model.model_json_schema()
    for name, shape in found["properties"].items():
        if shape.get("default", 0) is None:  # what is not known is left out, and never null
            del found["properties"][name]["default"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"healcore {what}, schema {SCHEMA}",
        **{
            name: found[name]
            for name in ("type", "properties", "required", "$defs")
            if name in found
        },
    }
