"""docs/faults.md has the table of the code."""

from __future__ import annotations

from pathlib import Path

from healcore.core.verdict import Cause
from healcore.runtime.faults import FAILURES

PAGE = (Path(__file__).parents[3] / "docs" / "faults.md").read_text()


def rows() -> list[str]:
    """The table, as the page has to have it."""
    found = []
    for cause, row in FAILURES.items():
        recipe = ", ".join(f"`{word}`" for word in row.recipe) or "none"
        cells = f"`{row.name}`", f"`{cause.name}`", row.severity, recipe, row.diagnosis
        found.append(f"| {' | '.join(cells)} |")
    return found


def test_every_row_is_on_the_page():
    table = [line for line in PAGE.splitlines() if line.startswith("| `") and line.count("|") == 6]
    wanted = rows()
    assert table == wanted, "write in docs/faults.md:\n" + "\n".join(wanted)


def test_every_cause_has_a_row():
    assert set(FAILURES) == set(Cause)
