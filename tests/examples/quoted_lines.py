"""Compares the lines that a page quotes with the lines that a program prints."""

import re

from tests.packaging.page_text import HOLE, blocks


def masked(output: str) -> list[str]:
    """The lines with every number and directory masked: digits differ between machines."""
    output = re.sub(r"\S+/tutorial-", "DIR/tutorial-", output)
    output = re.sub(r"postmortem\.\S+\.json", "postmortem.ID.json", output)
    output = re.sub(r"(?<![\w-])\d[\d.]*(e[+-]?\d+)?(?!\w)", "#", output)
    return [" ".join(line.split()) for line in output.splitlines()]


def check_lines(page: str, printed: str) -> None:
    """The one console block of a page was printed, in its order. A HOLE stands for any text.

    The counts of the last line, which has no HOLE, are those of the page.
    """
    (quoted,) = blocks(page, "console")
    assert quoted.splitlines()[-1] in printed, printed
    rest = iter(masked(printed))
    for line in masked(quoted):
        # A progress bar may stand before the line, and advice after it.
        wanted = ".*".join(map(re.escape, line.split(HOLE)))
        assert any(re.search(wanted, each) for each in rest), f"{line!r} is not in:\n{printed}"
