"""Where the results of the command go: the terminal, lines of JSON, a page, a picture."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from healcore.extras import require
from healcore.tools.replay import table
from healcore.tools.replay.running import Result
from healcore.tools.traces import Trace

MOST_TOLD = 20
"""Problems of traces that are printed one by one."""

MOST_ON_A_PAGE = 60
"""Replays on one page: a browser takes long over more. A picture holds fewer still."""

_PIPE_WIDTH = 160
"""Columns of the table where nothing says how wide the output is."""


class OutputError(ValueError):
    """An output that cannot be written; the message says why."""


class Outputs(NamedTuple):
    """Where results go besides the table."""

    jsonl: str | None = None
    """A file, or - for standard output; the table then goes to standard error."""
    report: Path | None = None
    png: Path | None = None

    @property
    def stories(self) -> bool:
        """Whether curves have to be kept."""
        return bool(self.report or self.png)

    def check(self, traces: Sequence[str]) -> None:
        """Before the work.

        Args:
            traces: paths that nothing may be written over.

        Raises:
            OutputError: there is no such folder, or the file is one of the traces.
            healcore.extras.MissingExtraError: what draws is not installed.
        """
        if self.report:
            require("report", "plotly")
        if self.png:
            require("report", "matplotlib")
        for name in (self.jsonl, self.report, self.png):
            if name is None or name == "-":
                continue
            path = Path(name)
            if not path.absolute().parent.is_dir():
                raise OutputError(f"{path} cannot be written: there is no folder {path.parent}")
            if path.is_dir():
                raise OutputError(f"{path} cannot be written: it is a folder; name a file in it")
            for trace in traces:
                if path.exists() and os.path.exists(trace) and path.samefile(trace):
                    raise OutputError(f"{path} is a trace: write to another file")

    def lines(self) -> contextlib.AbstractContextManager[Any]:
        """The open file for lines of JSON, or None."""
        if self.jsonl is None:
            return contextlib.nullcontext()
        if self.jsonl == "-":
            return contextlib.nullcontext(sys.stdout)
        return open(self.jsonl, "w", encoding="ascii", newline="\n")

    def console(self) -> Console:
        """Where the table goes."""
        known = sys.stdout.isatty() or os.environ.get("COLUMNS")
        return _Piped(stderr=self.jsonl == "-", width=None if known else _PIPE_WIDTH)


class _Piped(Console):
    """A reader that has seen enough (`| head`) is no failure; to rich it is, with exit status 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def show(console: Console, results: Sequence[Result], traces: Sequence[Trace]) -> None:
    """The tables, what they mean, and what a reader should know of the traces."""
    console.print(table.summary_table(results, width=console.width))
    if any(result.score is not None for result in results):
        console.print(table.score_table(results))
        console.print(Text(table.SCORED, "dim"))
    console.print(Text(f"{table.LEGEND} Judged with {results[0].backend}.", "dim"))
    for line in table.notes(results):
        console.print(Text(line))
    surveys = [trace.survey() for trace in traces]
    _some(
        console,
        [str(each) for one in surveys for each in one.problems],
        sum(one.problem_count for one in surveys),
        "yellow",
    )
    _some(
        console,
        [str(each) for one in surveys for each in one.notes],
        sum(one.note_count for one in surveys),
        "dim",
    )


def draw(outputs: Outputs, results: Sequence[Result]) -> list[str]:
    """The page and the picture, with the replays in which most happened if there are many.

    Returns:
        A line to print for each.

    Raises:
        OSError: a file cannot be written.
    """
    told = []
    ranked = sorted(results, key=lambda each: (-each.summary.rollbacks, -each.summary.incidents))
    if outputs.report:
        from healcore.tools.report.page import render

        chosen = {id(each) for each in ranked[:MOST_ON_A_PAGE]}
        stories = [each.story for each in results if each.story and id(each) in chosen]
        outputs.report.write_text(render(stories), encoding="utf-8")
        told.append(_written("page", outputs.report, len(stories), len(results)))
    if outputs.png:
        from healcore.tools.report.picture import STORIES
        from healcore.tools.report.picture import draw as picture

        stories = [each.story for each in ranked if each.story]
        picture(stories, outputs.png)
        shown = min(STORIES, len(stories))
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
