"""Writes the table of docs/events.md and docs/events.schema.json from the schema.

`python -m tests.events.page_tables`
"""

import json
from pathlib import Path

from healcore.events.schema import KINDS, json_schema

PAGE = Path(__file__).parents[2] / "docs" / "events.md"
BEGIN = "<!-- kinds: begin (written by python -m tests.events.page_tables) -->"
END = "<!-- kinds: end -->"
HEAD = "kind | when; what `step` is", "---|---"
JUDGED = " `step` is the step that was judged."
"""A star stands for this sentence."""


def written(page: str) -> str:
    """The page with the table of the present code between its two marks."""
    assert page.count(BEGIN) == page.count(END) == 1
    before, rest = page.split(BEGIN)
    rows = (f"`{name}` | {kind.about.replace(JUDGED, ' *')}" for name, kind in KINDS.items())
    table = "\n".join([*HEAD, *rows])
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    schema = json.dumps(json_schema(), indent=2)
    PAGE.with_name("events.schema.json").write_text(f"{schema}\n")
