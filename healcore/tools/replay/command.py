"""Replays several policies over many traces, prints the tables and writes the files."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rich.console import Console
from rich.text import Text

from healcore.extras import require
from healcore.policy import Policy
from healcore.tools.output_files import check_outputs, replacing
from healcore.tools.replay import table
from healcore.tools.replay.decided import decided_line, summary_line
from healcore.tools.replay.replayed import ReplayError, replay
from healcore.tools.replay.report import replay_report
from healcore.tools.replay.summary import Summary
from healcore.tools.report.run_report import RunReport
from healcore.tools.terminal import console
from healcore.tools.traces import Trace, Unreadable

MAX_PRINTED = 20
"""Number of problems of traces that are printed."""

MAX_ON_PAGE = 60
"""Number of replays on one page, because a browser is slow with more."""

_PIPE_WIDTH = 160
"""Width of the table in columns if the width of the output is unknown."""


class ReplayResult(NamedTuple):
    """One trace under one policy."""

    summary: Summary
    report: RunReport | None


def replay_all(
    traces: Sequence[Trace],
    policies: Mapping[str, Policy],
    jsonl: TextIO | None,
    *,
    reports: bool,
) -> Iterator[ReplayResult | Unreadable]:
    """Replays every policy on every trace.

    Args:
        traces: the traces.
        policies: policies by the names that the user passed.
        jsonl: output for lines of JSON, or None.
        reports: whether to build reports.

    Yields:
        A result, or the reason why the replay failed.
    """
    for trace in traces:
        for name, policy in policies.items():
            try:
                result = replay(trace, policy, name=name)
            except ReplayError as error:
                yield Unreadable(trace.name, error.problem)
                continue
            if jsonl is not None:
                for row in result:
                    jsonl.write(decided_line(trace.name, name, row))
                jsonl.write(summary_line(result.summary))
            yield ReplayResult(result.summary, replay_report(result, policy) if reports else None)


# -- what is printed and written -------------------------------------------------------------------


class _NothingWrittenError(Exception):
    """No row was replayed, so the existing file stays."""


class Outputs(NamedTuple):
    """Output files of a replay, in addition to the table."""

    jsonl: str | None = None
    """Path, or "-" for standard output, which moves the table to standard error."""
    report: Path | None = None

    def check(self, inputs: Sequence[str]) -> None:
        """Checks that every output can be written and overwrites no input.

        Raises OutputError, or MissingExtraError if a drawing library is not installed.
        """
        if self.report:
            require("report", "jinja2")
        names = (None if self.jsonl == "-" else self.jsonl, self.report)
        check_outputs([name for name in names if name is not None], inputs)

    @contextlib.contextmanager
    def lines(self) -> Iterator[Any]:
        """Opens the file for lines of JSON, or yields None. An old file is replaced at the end."""
        if self.jsonl is None or self.jsonl == "-":
            yield None if self.jsonl is None else sys.stdout
            return
        with contextlib.suppress(_NothingWrittenError), replacing(self.jsonl) as draft:
            with open(draft, "w", encoding="ascii", newline="\n") as file:
                yield file
                is_empty = file.seekable() and not file.tell()
            if is_empty:
                raise _NothingWrittenError

    def console(self) -> Console:
        """Returns the console for the table."""
        known = sys.stdout.isatty() or os.environ.get("COLUMNS")
        return console(stderr=self.jsonl == "-", width=None if known else _PIPE_WIDTH)


def show(console: Console, summaries: Sequence[Summary], traces: Sequence[Trace]) -> None:
    """Prints the table with its legend, and the problems and notes of the traces."""
    console.print(table.summary_table(summaries))
    _print_first(
        console,
        [problem for trace in traces for problem in trace.problems],
        sum(trace.problem_count for trace in traces),
        "yellow",
    )
    for line in table.notes(summaries):
        console.print(Text(line))
    trace_notes = [note for trace in traces for note in trace.notes]
    _print_first(console, trace_notes, len(trace_notes), "dim")
    console.print(Text(table.LEGEND, "dim"))


def write_page(path: Path, results: Sequence[ReplayResult]) -> str:
    """Writes the page, or raises OutputError. Returns a line to print."""
    from healcore.tools.report.page import render

    reports = [result.report for result in results[:MAX_ON_PAGE] if result.report]
    with replacing(path) as draft:
        page = render(reports, left_out=len(results) - len(reports))
        draft.write_text(page, encoding="utf-8")
    which = f" (the first {len(reports)} replays)" if len(reports) < len(results) else ""
    return f"page: {path}{which}"


def _print_first(console: Console, lines: Sequence[str], count: int, style: str) -> None:
    for line in lines[:MAX_PRINTED]:
        console.print(Text(line, style))
    rest = count - len(lines[:MAX_PRINTED])
    if rest:
        console.print(Text(f"and {rest:,} more like these", style))
