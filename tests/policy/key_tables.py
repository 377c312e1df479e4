"""Writes the tables of keys in the pages of policies: `python -m tests.policy.key_tables`.

Keys, defaults, ranges and sentences are those of the tables of `Policy`. A sentence is the
docstring of the field, in the table or else in the engine's config.
"""

import ast
import functools
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from healcore.core import engine
from healcore.core.baseline import ShiftConfig
from healcore.core.detectors import CAUSES, Detect
from healcore.core.ranges import NONE, Range
from healcore.policy import load, to_dict
from healcore.policy.document import (
    ALL_ACTIONS,
    FAULTS,
    Budget,
    IncidentTable,
    Policy,
    Respond,
    Rollback,
    When,
)

CORE: dict[type, type] = {
    IncidentTable: engine.IncidentConfig,
    Rollback: engine.RollbackConfig,
    Budget: engine.BudgetConfig,
}
"""Tables of a file with the engine's configs of the same keys, which have further sentences."""
PAGES = [Path(__file__).parents[2] / "docs" / name for name in ("policies.md", "other-tools.md")]
PAGE = "\f".join(page.read_text() for page in PAGES)
REQUIRED = object()
LINE = "a non-empty string on one line"
TEXTS = {
    "schema": "1",
    "name": LINE,
    "description": "a string",
    "references": f"a list, each entry {LINE}",
    "to": "list of " + ", ".join(f'"{name}"' for name in (*CAUSES, *FAULTS)),
    "do": "list of " + ", ".join(f'"{name}"' for name in ALL_ACTIONS),
}
"""Ranges that are not a number, a flag or one of a few words."""
HEAD = "key | if missing, range | meaning\n---|---|---"
HEAD_WITH_DEFAULT = "key | `default` | if missing, range | meaning\n---|---|---|---"
"""The head of a table that also has the values of the policy `default`."""
TOGETHER = (("loss_spike", "grad_spike"), ("loss_window", "grad_window"))
"""Detectors with the same keys, which share a section."""


class Key(NamedTuple):
    """A key of a table: its default, its range as text, or the tables that it has."""

    default: Any
    range: str
    tables: tuple[Any, ...]


def keys_of(table: Any) -> dict[str, Key]:
    """The keys of a table, in the order of the file."""
    keys = {}
    hints = get_type_hints(table, include_extras=True)
    for (name, hint), bare in zip(hints.items(), get_type_hints(table).values(), strict=True):
        parts = get_args(bare) or (bare,)
        tables = tuple(part for part in parts if hasattr(part, "_fields"))
        metadata = getattr(hint, "__metadata__", ())
        text = TEXTS.get(name, "") if table in (Policy, Respond) else ""
        if get_origin(hint) is Literal:
            text = "one of " + ", ".join(f'"{word}"' for word in get_args(hint))
        elif hint is bool:
            text = "bool"
        elif not text and metadata and isinstance(metadata[0], Range):
            text = _numbers(metadata[0])
        keys[name] = Key(table._field_defaults.get(name, REQUIRED), text, tables)
    return keys


def _numbers(kept: Range) -> str:
    if kept.kind is int:
        return f"int {kept.ge}–{kept.le}".replace("10000000", "1e7")
    signs = {">": kept.gt, "≥": kept.ge, "<": kept.lt, "≤": kept.le}
    bounds = ", ".join(f"{sign}{bound:g}" for sign, bound in signs.items() if bound is not None)
    return f"float {bounds}".strip() + (f', or "{NONE}"' if kept.none else "")


def sections() -> Iterator[tuple[str, tuple[type, ...]]]:
    """Every section with keys: its heading on the page, and its tables."""
    yield "Top of the file", (Policy,)
    keys = keys_of(Policy)
    for table in keys["clip"].tables:
        if table.kind != NONE:  # type: ignore[attr-defined]
            yield f'`[clip]` with `kind = "{table.kind}"`', (table,)  # type: ignore[attr-defined]
    yield "`[….shift]`", (ShiftConfig,)
    for name in ("incident", "rollback", "lr", "budget", "retry", "skip_batch", "hang"):
        yield f"`[{name}]`", keys[name].tables
    detect = keys_of(Detect)
    first = {names[0]: names for names in TOGETHER}
    later = {name for names in TOGETHER for name in names[1:]}
    for name in detect:
        if name not in later:
            names = first.get(name, (name,))
            heading = ", ".join(f"`[detect.{each}]`" for each in names)
            yield heading, tuple(detect[each].tables[0] for each in names)
    yield "`[[respond]]`", (Respond,)
    yield "`when`", (When,)


def in_default(heading: str) -> dict[str, Any] | None:
    """The values of the policy `default` in a section that every policy has, else None."""
    policy = to_dict(load("default"))
    if heading == "Top of the file":
        return policy
    name = heading.strip("`[]")
    return policy.get(name) if name.isidentifier() and name != "respond" else None


def table_of(heading: str, tables: tuple[type, ...]) -> str:
    """The table of a section, or nothing without keys. Defaults are in the heading's order."""
    of_default = in_default(heading)
    keys = [{name: key for name, key in keys_of(each).items() if key.range} for each in tables]
    lines = []
    for name, key in keys[0].items():
        same = [each[name] for each in keys]
        assert len({each.range for each in same}) == 1
        shown = [_shown(each.default) for each in same]
        default = shown[0] if len(set(shown)) == 1 else " / ".join(shown)
        meaning = _meaning(tables[0], name)
        own = ""
        if of_default is not None:
            is_short = not isinstance(of_default[name], list) and name != "description"
            own = f" | {_shown(of_default[name]) if is_short else '…'}"
        lines.append(f"`{name}`{own} | {default}, {key.range} | {meaning}")
    head = HEAD if of_default is None else HEAD_WITH_DEFAULT
    return "\n".join((head, *lines)) if lines else ""


def _meaning(table: type, name: str) -> str:
    """The docstring without what another column says, and the largest value in terms of a key."""
    sentence = {**_docstrings(CORE.get(table, table)), **_docstrings(table)}[name]
    text = re.sub(r" Static\b.*|, in \([\d, ]+\)(?=\.)|; above \d(?=\.)", "", sentence)
    text = re.sub(r", or None\b[^.]*(?=\.)|^Number of ", "", text)
    text = text[0].upper() + text[1:] if text[:2] != "z-" else text
    for key, limit in getattr(table, "AT_MOST", ()):
        if key == name and "at most `" not in text:
            text += f" At most `{limit}`."
    return text


def _shown(default: Any) -> str:
    if default is REQUIRED:
        return "required"
    if default is None:
        default = NONE
    as_written = [] if isinstance(default, tuple) else default
    return f"`{json.dumps(as_written)}`"


@functools.cache
def _docstrings(cls: type) -> dict[str, str]:
    """Field -> its docstring, in the source of one class."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(text.value).split())
        for field, text in zip(node.body, node.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def section_of(page: str, heading: str) -> str:
    """The text below a heading."""
    assert page.count(f"## {heading}\n") == 1, heading
    return re.split(r"^#+ ", page.partition(f"## {heading}\n")[2], maxsplit=1, flags=re.M)[0]


def written(page: str) -> str:
    """The pages with the tables of the present code."""
    for heading, tables in sections():
        before = section_of(page, heading)
        heads = "|".join(map(re.escape, (HEAD, HEAD_WITH_DEFAULT)))
        found = re.findall(rf"^(?:{heads})\n(?:`.*\n)+", before, flags=re.M)
        table = table_of(heading, tables)
        assert len(found) == bool(table), heading
        after = before.replace(found[0], f"{table}\n") if found else before
        page = page.replace(f"## {heading}\n{before}", f"## {heading}\n{after}")
    return page


if __name__ == "__main__":
    for path, text in zip(PAGES, written(PAGE).split("\f"), strict=True):
        path.write_text(text)
