"""Writes the table and the version on docs/events.md, and docs/events.schema.json.

`python -m tests.events.page_tables`
"""

import json
import re
from pathlib import Path
from typing import Any

from healcore import __version__
from healcore.events.kinds import ENVELOPE, KINDS, SCHEMA, EventKind, Trait
from healcore.events.models import EventRecord

PAGE = Path(__file__).parents[2] / "docs" / "events.md"
BEGIN = "<!-- kinds: begin (written by python -m tests.events.page_tables) -->"
END = "<!-- kinds: end -->"
HEAD = "kind | when; what `step` is", "---|---"
JUDGED = " `step` is the step that was judged."  # a star stands for this sentence


def about(kind: EventKind) -> str:
    """When the event is written, and what its `step` is."""
    of_checkpoint = " `step` is the checkpoint's." if Trait.CHECKPOINT in kind.traits else ""
    return kind.when + of_checkpoint + (JUDGED if Trait.JUDGED in kind.traits else "")


def written(page: str) -> str:
    """The page with the table of the present code between its two marks, and the version of now."""
    page = re.sub(r'(?<="environment":{"healcore":")[^"]*', __version__, page)
    assert page.count(BEGIN) == page.count(END) == 1
    before, rest = page.split(BEGIN)
    rows = (f"`{name}` | {about(kind).replace(JUDGED, ' *')}" for name, kind in KINDS.items())
    table = "\n".join([*HEAD, *rows])
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}"


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of one line of an events file.

    The schema accepts unknown kinds and fields, which a later version may add.
    """
    exported = EventRecord.model_json_schema()
    for field in exported["properties"].values():
        field.pop("default", None)  # a field without a value is absent, never null
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"healcore events, schema {SCHEMA}",
        **{name: exported[name] for name in ("type", "properties", "$defs")},
        "required": list(ENVELOPE),
        "allOf": [
            {
                "if": {"properties": {"kind": {"const": name}}, "required": ["kind"]},
                "then": {"description": about(kind), "required": list(kind.required)},
            }
            for name, kind in KINDS.items()
        ],
    }


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    PAGE.with_name("events.schema.json").write_text(json.dumps(json_schema(), indent=2) + "\n")
