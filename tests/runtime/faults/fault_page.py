"""The sections of docs/faults.md, and the line of the log in each."""

import re
from pathlib import Path

from healcore.core.decision import Cause
from tests.healer.run_directory import events

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "faults.md").read_text()
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))


def section_of(cause: Cause) -> str:
    """The section to which the row of a cause links."""
    (target,) = re.findall(rf"^\[`\w+`\]\(#([\w-]+)\) \| `{cause.name}` \|", PAGE, re.M)
    by_anchor = {title.lower().replace(" ", "-"): text for title, text in SECTIONS.items()}
    return by_anchor[target]


def log_line(cause: Cause) -> str:
    """The line of the log that the section of a cause quotes."""
    return re.findall(r"^- \*\*Log.*?\*\*: `(.+)`$", section_of(cause), re.M)[0]


def assert_on_the_page(cause: Cause, printed: str, folder: Path) -> None:
    """A run has printed, or logged as a problem, the page's line, apart from the numbers."""

    def without_numbers(text: str) -> str:
        return re.sub(r"\d[\d.]*(e[+-]?\d+)?", "#", text)

    printed += "".join(each.get("problem") or "" for each in events(folder))
    for piece in log_line(cause).split("…"):
        assert without_numbers(piece) in without_numbers(printed)
