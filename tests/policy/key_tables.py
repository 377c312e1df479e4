"""Writes the tables of keys in the pages of policies: `python -m tests.policy.key_tables`.

Keys, defaults, ranges and sentences are those of the tables of `Policy`. A sentence is the
docstring of the field, in the table or else in the engine's config.
"""

import ast
import dataclasses
import functools
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from healcore.core import engine
from healcore.core.baseline import ShiftConfig
from healcore.core.ranges import NONE
from healcore.policy import load, to_dict
from healcore.policy.document import Detect, Policy
from healcore.policy.responses import Budget, IncidentTable, Respond, Rollback, When
from healcore.policy.tables import keys_of

CORE: dict[type, type] = {
    IncidentTable: engine.IncidentConfig,
    Rollback: engine.RollbackConfig,
    Budget: engine.BudgetConfig,
}
"""Tables of a file with the engine's configs of the same keys, which have further sentences."""
PAGES = [Path(__file__).parents[2] / "docs" / name for name in ("policies.md", "other-tools.md")]
PAGE = "\f".join(page.read_text() for page in PAGES)
WORDS = {
    "a finite number": "float",
    "a whole number from ": "int ",
    "true or false": "bool",
    "10000000": "1e7",
    " to ": "–",
    " above ": " >",
    " of at least ": " ≥",
    " of at most ": " ≤",
    " below ": " <",
    " and ": ", ",
    "a non-empty list, each entry one of ": "list of ",
}
"""Words of a range, and what the page has instead."""
HEAD = "key | if missing, range | meaning\n---|---|---"
HEAD_WITH_DEFAULT = "key | `default` | if missing, range | meaning\n---|---|---|---"
"""The head of a table that also has the values of the policy `default`."""
TOGETHER = (("loss_spike", "grad_spike"), ("loss_window", "grad_window"))
"""Detectors with the same keys, which share a section."""


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
    keys = [{name: key for name, key in keys_of(each).items() if key.value} for each in tables]
    lines = []
    for name, key in keys[0].items():
        same = [each[name] for each in keys]
        assert len({each.value.rule for each in same if each.value}) == 1
        assert key.value is not None
        shown = [_shown(each.default) for each in same]
        default = shown[0] if len(set(shown)) == 1 else " / ".join(shown)
        meaning = _meaning(tables[0], name)
        own = ""
        if of_default is not None:
            is_short = not isinstance(of_default[name], list) and name != "description"
            own = f" | {_shown(of_default[name]) if is_short else '…'}"
        lines.append(f"`{name}`{own} | {default}, {_range(key.value.rule)} | {meaning}")
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


def _range(rule: str) -> str:
    for words, short in WORDS.items() if not rule.startswith("one of") else ():
        rule = rule.replace(words, short)
    return rule


def _shown(default: Any) -> str:
    if default is dataclasses.MISSING:
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
