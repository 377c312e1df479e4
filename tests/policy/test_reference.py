"""docs/policies.md lists every table and key of the format, with its default and its rule."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic_core import PydanticUndefined

from healcore.policy import Policy, loads
from healcore.policy.clip import KINDS, Shift
from healcore.policy.respond import Respond, When
from healcore.policy.table import NONE, Table

PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()


def headings() -> Iterator[tuple[str, type[Table]]]:
    """Every table as the page heads it."""
    yield "Top of the file", Policy
    for kind, table in KINDS.items():
        if kind != NONE:
            yield f'`[clip]` with `kind = "{kind}"`', table
    yield "`[….shift]`", Shift
    for name in ("incident", "rollback", "lr", "budget", "retry", "skip_batch", "hang"):
        yield f"`[{name}]`", tables_in(Policy.model_fields[name].annotation)[0]
    detect = tables_in(Policy.model_fields["detect"].annotation)[0]
    for name, field in detect.model_fields.items():
        yield f"`[detect.{name}]`", tables_in(field.annotation)[0]
    yield "`[[respond]]`", Respond
    yield "`when`", When


def tables_in(annotation) -> list[type[Table]]:
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return [annotation]
    return [table for part in typing.get_args(annotation) for table in tables_in(part)]


def rows(table: type[Table]) -> Iterator[str]:
    """The first three cells of each key's row."""
    for name, field in table.model_fields.items():
        if tables_in(field.annotation) or name == "kind":
            continue
        default, rule = field.default, field.metadata[0].rule
        if default is PydanticUndefined:
            shown = "required"
        elif default is None:
            shown = f'`"{NONE}"`'
        elif isinstance(default, bool):
            shown = f"`{str(default).lower()}`"
        elif isinstance(default, tuple):
            shown = "`[]`"
        else:
            shown = f'`"{default}"`' if isinstance(default, str) else f"`{default}`"
        yield f"| `{field.alias or name}` | {shown} | {rule} |"


@pytest.mark.parametrize(
    ("heading", "table"), list(headings()), ids=lambda x: x if type(x) is str else ""
)
def test_every_key_is_in_its_section(heading, table):
    assert f"## {heading}\n" in PAGE
    section = re.split(r"^#+ ", PAGE.partition(f"## {heading}\n")[2], maxsplit=1, flags=re.M)[0]
    wanted = list(rows(table))
    missing = "\n".join(row for row in wanted if row not in section)
    assert not missing, f"write in docs/policies.md under {heading}:\n{missing}"
    assert sum(line.startswith("| `") for line in section.splitlines()) == len(wanted)


def test_the_examples_on_the_page_load():
    blocks = re.findall(r"^```toml\n(.*?)^```", PAGE, flags=re.M | re.S)
    assert blocks
    for block in blocks:
        loads(block, source="docs/policies.md")
