"""Where the results of the command go: the terminal, lines of JSON, a page, a picture."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from healcore.extras import require
from healcore.tools.output_files import check_outputs, replacing
from healcore.tools.replay import remarks, table
from healcore.tools.replay.running import Result
from healcore.tools.terminal import console
from healcore.tools.traces import Trace

MOST_TOLD = 20
"""Problems of traces that are printed one by one."""

MOST_ON_A_PAGE = 60
"""Replays on one page: a browser takes long over more. A picture holds fewer still."""

_PIPE_WIDTH = 160
"""Columns of the table where nothing says how wide the output is."""


class _NothingWrittenError(Exception):
    """Nothing was replayed: what an earlier replay wrote there stays."""


class Outputs(NamedTuple):
    """Where results go besides the table."""

    jsonl: str | None = None
    """A file, or - for standard output; the table then goes to standard error."""
    report: Path | None = None
    png: Path | None = None

    @property
    def reports(self) -> bool:
        """Whether curves have to be kept."""
        return bool(self.report or self.png)

    def check(self, inputs: Sequence[str]) -> None:
        """Before the work.

        Args:
            inputs: paths that nothing may be written over.

        Raises:
            OutputError: there is no such folder, or a file is read, or named twice.
            healcore.extras.MissingExtraError: what draws is not installed.
        """
        if self.report:
            require("report", "plotly", "jinja2")
        if self.png:
            require("report", "matplotlib")
        names = (None if self.jsonl == "-" else self.jsonl, self.report, self.png)
        check_outputs([name for name in names if name is not None], inputs)

    @contextlib.contextmanager
    def lines(self) -> Iterator[Any]:
        """The open file for lines of JSON, or None. The file is there when all of it is."""
        if self.jsonl is None or self.jsonl == "-":
            yield None if self.jsonl is None else sys.stdout
            return
        with contextlib.suppress(_NothingWrittenError), replacing(self.jsonl) as draft:
            with open(draft, "w", encoding="ascii", newline="\n") as file:
                yield file
                nothing = file.seekable() and not file.tell()
            if nothing:
                raise _NothingWrittenError

    def console(self) -> Console:
        """Where the table goes."""
        known = sys.stdout.isatty() or os.environ.get("COLUMNS")
        return console(_Piped, stderr=self.jsonl == "-", width=None if known else _PIPE_WIDTH)


class _Piped(Console):
    """A reader that has seen enough (`| head`) is no failure; to rich it is, with exit status 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def show(console: Console, results: Sequence[Result], traces: Sequence[Trace]) -> None:
    """The tables, what they mean, and what a reader should know of the traces."""
    scored = any(result.score is not None for result in results)
    console.print(table.summary_table(results, width=console.width))
    if scored:
        console.print(table.score_table(results))
    surveys = [trace.survey() for trace in traces]
    _some(
        console,
        [str(each) for one in surveys for each in one.problems],
        sum(one.problem_count for one in surveys),
        "yellow",
    )
    for line in remarks.notes(results):
        console.print(Text(line))
    _some(
        console,
        [str(each) for one in surveys for each in one.notes],
        sum(one.note_count for one in surveys),
        "dim",
    )
    console.print(Text(remarks.legend(results), "dim"))
    if scored:
        console.print(Text(remarks.SCORED, "dim"))


def draw(outputs: Outputs, results: Sequence[Result]) -> list[str]:
    """The page and the picture, with the replays in which most happened if there are many.

    Returns:
        A line to print for each.

    Raises:
        OutputError: a file cannot be written.
    """
    told = []
    ranked = sorted(results, key=lambda each: (-each.summary.rollbacks, -each.summary.incidents))
    if outputs.report:
        from healcore.tools.report.page import render

        chosen = {id(each) for each in ranked[:MOST_ON_A_PAGE]}
        reports = [each.report for each in results if each.report and id(each) in chosen]
        with replacing(outputs.report) as draft:
            page = render(reports, left_out=len(results) - len(reports))
            draft.write_text(page, encoding="utf-8")
        told.append(_written("page", outputs.report, len(reports), len(results)))
    if outputs.png:
        from healcore.tools.report import picture

        reports = [each.report for each in ranked if each.report]
        with replacing(outputs.png) as draft:
            picture.draw(reports, draft)
        shown = len(picture.chosen(reports))
        told.append(_written("picture", outputs.png, shown, len(results)))
    return told


def _some(console: Console, lines: Sequence[str], count: int, style: str) -> None:
    for line in lines[:MOST_TOLD]:
        console.print(Text(line, style))
    rest = count - len(lines[:MOST_TOLD])
    if rest:
        console.print(Text(f"and {rest:,} more like these", style))


def _written(kind: str, path: Path, shown: int, count: int) -> str:
    which = f" (the {shown} of {count} replays in which most happened)" if shown < count else ""
    return f"{kind}: {path}{which}"
