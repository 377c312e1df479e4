"""Defines the kinds of events, and exports the format of events as JSON Schema."""

from __future__ import annotations

from typing import Any, NamedTuple

from healcore.events import log
from healcore.events.models import EventHead, EventModel

ENVELOPE = tuple(field.alias or name for name, field in EventHead.model_fields.items())
"""Fields that every event has."""


class EventKind(NamedTuple):
    """One kind of event."""

    when: str
    """When the event is written. Also says what `step` is, if not the current step."""
    required: tuple[str, ...] = ()
    """Required fields, in addition to `ENVELOPE`."""


KINDS: dict[str, EventKind] = {
    "start": EventKind(
        "A process begins. The log adds its process number, host and versions.",
        ("host", "pid", "environment", "policy"),
    ),
    "resume": EventKind(
        "The run continues from a checkpoint of an earlier process.", ("checkpoint",)
    ),
    "alarm": EventKind("A step with a cause. `step` is that step.", ("cause", "readings")),
    "incident": EventKind(
        "An incident begins. `step` is the step that was judged.", ("incident", "onset", "cause")
    ),
    "alert": EventKind(
        "A rule alerts on a cause: at the first step of the cause in an incident; outside of "
        "incidents at its 1st, 10th, 100th, ... step. `step` is the step that was judged.",
        ("cause", "action", "severity", "diagnosis", "references"),
    ),
    "order": EventKind(
        "The policy orders an action on the host. `step` is the step that was judged.",
        ("action", "cause"),
    ),
    "assessment": EventKind(
        "The check for evidence that the model is worse. Only the verdict `damage` rolls back. "
        "`step` is the last step that was judged.",
        ("verdict", "cause"),
    ),
    "save": EventKind("A checkpoint's copy was taken. `step` is the checkpoint's."),
    "save_failed": EventKind(
        "A checkpoint could not be written; training continues. `step` is the checkpoint's.",
        ("problem",),
    ),
    "good": EventKind("A checkpoint is known-good from now on. `step` is the checkpoint's."),
    "damaged": EventKind(
        "The bytes of a checkpoint have changed since the save. `step` is the checkpoint's.",
        ("problem",),
    ),
    "rollback": EventKind(
        "A rollback is done. `step` is the number of steps done when it began, up to one step "
        "after the last judged step.",
        ("checkpoint", "outcome"),
    ),
    "skipped_batches": EventKind("The run skips exactly these batches.", ("batches",)),
    "data": EventKind("The data was positioned after a restart or a rollback.", ("outcome",)),
    "lr": EventKind(
        "The learning-rate multiplier was cut (`action`: `CUT_LR`), left 1, or returned to 1.",
        ("lr_scale_before", "lr_scale"),
    ),
    "hook": EventKind("A hook overrode an order, or raised."),
    "fault": EventKind(
        "An exception was classified, or a step does not return. `answer` is the action; without "
        "`answer` the exception propagates.",
        ("cause", "problem"),
    ),
    "vote": EventKind(
        "The processes of the run have exchanged their observations. Rank 0 reports the result, or "
        "all processes end the run.",
        ("outcome", "why", "of_ranks"),
    ),
    "retried": EventKind("A network call has succeeded after a failure.", ("attempt",)),
    "stop": EventKind("The policy ends the run.", ("why", "diagnosis")),
    "problem": EventKind("A problem that does not stop the run.", ("problem",)),
    "end": EventKind("The process ends. A killed process does not write this event.", ("ending",)),
}

SEVERE = frozenset({"alert", "rollback", "stop", "problem", "save_failed", "damaged", "fault"})
"""Kinds that trackers alert on."""


def json_schema() -> dict[str, Any]:
    """Returns the JSON Schema (draft 2020-12) of one line of an events file.

    The schema accepts unknown kinds and fields, which a later version may add.
    """
    exported = EventModel.model_json_schema()
    for field in exported["properties"].values():
        if field.get("default", 0) is None:  # a field without a value is absent, never null
            del field["default"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"healcore events, schema {log.SCHEMA}",
        **{name: exported[name] for name in ("type", "properties", "required", "$defs")},
        "allOf": [
            {
                "if": {"properties": {"kind": {"const": name}}, "required": ["kind"]},
                "then": {"description": kind.when, "required": list(kind.required)},
            }
            for name, kind in KINDS.items()
        ],
    }
