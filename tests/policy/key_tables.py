"""Writes the tables of keys in docs/policies.md: `python -m tests.policy.key_tables`.

Keys, defaults and ranges are those of the models in `healcore.policy`. The meaning is the docstring
of the field, in the model or else in the core's config.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic_core import PydanticUndefined

from healcore.policy.clip import KINDS, Shift
from healcore.policy.document import Policy
from healcore.policy.respond import Respond, When
from healcore.policy.table import NONE, AtMost, Table

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"
BEGIN = "<!-- keys: begin (written by python -m tests.policy.key_tables) -->"
END = "<!-- keys: end -->"
HEAD = "| key | default | range | meaning |\n|---|---|---|---|"
TOGETHER = (("loss_spike", "grad_spike", "update_spike"), ("loss_window", "grad_window"))
"""Detectors with the same keys, which share a section."""


def tables_in(annotation: Any) -> tuple[type[Table], ...]:
    """The tables that an annotation names."""
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return (annotation,)
    return tuple(table for part in get_args(annotation) for table in tables_in(part))


def sections() -> Iterator[tuple[str, tuple[type[Table], ...]]]:
    """Every section with keys: its heading on the page, and its tables."""
    yield "Top of the file", (Policy,)
    for kind, table in KINDS.items():
        if kind != NONE:
            yield f'`[clip]` with `kind = "{kind}"`', (table,)
    yield "`[….shift]`", (Shift,)
    for name in ("incident", "rollback", "lr", "budget", "retry", "skip_batch", "hang"):
        yield f"`[{name}]`", tables_in(Policy.model_fields[name].annotation)[:1]
    detect = tables_in(Policy.model_fields["detect"].annotation)[0].model_fields
    first = {names[0]: names for names in TOGETHER}
    later = {name for names in TOGETHER for name in names[1:]}
    for name in detect:
        if name not in later:
            names = first.get(name, (name,))
            heading = ", ".join(f"`[detect.{each}]`" for each in names)
            yield heading, tuple(tables_in(detect[each].annotation)[0] for each in names)
    yield "`[[respond]]`", (Respond,)
    yield "`when`", (When,)


def table_of(tables: tuple[type[Table], ...]) -> str:
    """The table of a section, or nothing for a table without keys.

    Where tables of one section differ in a default, all defaults stand in the order of the heading.
    """
    rows = [list(_rows(table)) for table in tables]
    lines = []
    for same in zip(*rows, strict=True):
        key, _, rule, meaning = same[0]
        assert all((other[0], other[2]) == (key, rule) for other in same)
        defaults = [each[1] for each in same]
        default = defaults[0] if len(set(defaults)) == 1 else " / ".join(defaults)
        lines.append(f"| `{key}` | {default} | {rule} | {meaning} |")
    return "\n".join((HEAD, *lines)) if lines else ""


def _rows(table: type[Table]) -> Iterator[tuple[str, str, str, str]]:
    for name, field in table.model_fields.items():
        if tables_in(field.annotation) or name == "kind":
            continue
        key = field.alias or name
        yield key, _shown(field.default), short(field.metadata[0].rule), _meaning(table, name)


def _meaning(table: type[Table], name: str) -> str:
    """The docstring without what another column says, and the largest value in terms of a key."""
    text = re.sub(
        r" Static\b.*|, in \([\d, ]+\)(?=\.)|; above \d(?=\.)", "", meaning_of(table, name)
    )
    text = re.sub(r"\bNone\b", f'`"{NONE}"`', text)
    for rule in table.rules:
        if isinstance(rule, AtMost) and rule.key == name and "at most `" not in text:
            text += f" At most `{rule.limit}`."
    return text


def _shown(default: Any) -> str:
    if default is PydanticUndefined:
        return "required"
    if default is None:
        return f'`"{NONE}"`'
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, tuple):
        return "`[]`"
    return f'`"{default}"`' if isinstance(default, str) else f"`{default}`"


def short(rule: str) -> str:
    """The rule of a value, as error messages state it, in the notation of the page."""
    rule, optional, _ = rule.partition(f', or "{NONE}"')
    absent = f', or `"{NONE}"`' if optional else ""
    whole = re.fullmatch(r"a whole number from (\d+) to (\d+)", rule)
    if whole:
        return f"int, {whole[1]} to {int(whole[2]):,}"
    number = re.fullmatch(r"a finite number(.*)", rule)
    if number:
        low = re.search(r"(above|at least) (\S+)", number[1])
        high = re.search(r"(below|at most) (\S+)", number[1])
        left = f"{low[2]} {'<' if low[1] == 'above' else '≤'} " if low and high else ""
        right = f" {'<' if high[1] == 'below' else '≤'} {high[2]}" if low and high else ""
        if low and not high:
            right = f" {'>' if low[1] == 'above' else '≥'} {low[2]}"
        assert low or not high
        return f"{left}float{right}{absent}"
    choices = re.fullmatch(r"(a non-empty list, each entry )?one of (.*)", rule)
    if choices:
        names = ", ".join(f"`{each}`" for each in choices[2].split(", "))
        return f"list of {names}" if choices[1] else names
    return {"true or false": "bool"}.get(rule, rule)


def meaning_of(table: type[Table], name: str) -> str:
    """The docstring of a field, on one line."""
    for model in table.__mro__:
        core = model.__dict__.get("core")
        for cls in (model, *(core.__mro__ if core else ())):
            found = _docstrings(cls).get(name) if cls.__module__.startswith("healcore") else None
            if found:
                return found
    raise LookupError(f"{table.__name__}.{name} has no docstring")


@functools.cache
def _docstrings(cls: type) -> dict[str, str]:
    """Field -> its docstring, in the source of one class."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    pairs = zip(node.body, node.body[1:], strict=False)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairs
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def section_of(page: str, heading: str) -> str:
    """The text below a heading."""
    assert page.count(f"## {heading}\n") == 1, heading
    return re.split(r"^#+ ", page.partition(f"## {heading}\n")[2], maxsplit=1, flags=re.M)[0]


def written(page: str) -> str:
    """The page with the tables of the present code, each between its two marks."""
    for heading, tables in sections():
        before = section_of(page, heading)
        marked = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", flags=re.S)
        block = f"{BEGIN}\n\n{table_of(tables)}\n\n{END}"
        assert len(marked.findall(before)) == bool(table_of(tables)), heading
        after = marked.sub(lambda _, block=block: block, before)
        page = page.replace(f"## {heading}\n{before}", f"## {heading}\n{after}")
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
