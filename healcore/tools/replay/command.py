"""Replays several policies over many traces, prints the tables and writes the files."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rich.console import Console
from rich.text import Text

from healcore.extras import require
from healcore.plugins.rows import choose_backend
from healcore.policy import Policy
from healcore.tools.output_files import check_outputs, replacing
from healcore.tools.replay import table
from healcore.tools.replay.decided import decided_line, summary_line
from healcore.tools.replay.report import ReplayReport, survey_notes
from healcore.tools.replay.scores import Label, Labels, ScoreCollector, answer_of
from healcore.tools.replay.summary import JudgedRows
from healcore.tools.replay.table import ReplayResult
from healcore.tools.replay.trace_replay import ReplayError, replay
from healcore.tools.terminal import console
from healcore.tools.traces import Rows, Trace, TraceError, Unreadable

MOST_PRINTED = 20
"""Most problems of traces that are printed one by one."""

MOST_ON_A_PAGE = 60
"""Most replays on one page, since a browser takes long over more. A picture holds fewer."""

_PIPE_WIDTH = 160
"""Width of the table in columns where the width of the output is not known."""


def surveyed(
    traces: Sequence[Trace], done: Callable[[], None]
) -> tuple[list[Trace], list[Unreadable]]:
    """Makes the first pass over every trace; `done` is called after each."""
    readable, unreadable = [], []
    for trace in traces:
        try:
            trace.survey()
        except (TraceError, OSError) as error:
            unreadable.append(Unreadable(trace.name, str(error)))
        else:
            readable.append(trace)
        done()
    return readable, unreadable


def replay_all(
    traces: Sequence[Trace],
    policies: Mapping[str, Policy],
    *,
    backend: str | None = None,
    jsonl: TextIO | None = None,
    labels: Labels | None = None,
    reports: bool = False,
    advance: Callable[[int], None] = lambda rows: None,
) -> Iterator[ReplayResult | Unreadable]:
    """Replays every policy on every surveyed trace.

    Args:
        traces: the traces that `surveyed` could read.
        policies: by the name that the user gave.
        backend: as for `replay`; None chooses by the rows that share a compiled loop.
        jsonl: where lines of JSON are written.
        labels: known events, by which the policies are scored.
        reports: whether curves are kept for a report.
        advance: called with the number of rows just done.

    Yields:
        A result, or why there is none.
    """
    if backend is None:
        # Traces whose rows have the same combinations of signals share a policy's compiled loop.
        rows: Counter[frozenset[frozenset[str]]] = Counter()
        for survey in (trace.survey() for trace in traces):
            rows[frozenset(each for each in survey.combinations if each)] += survey.rows
        loops = [(count, len(loop)) for loop, count in rows.items()]
        backend = choose_backend(loops, len(policies))
    for trace in traces:
        label = labels.of(trace.name) if labels else None
        for name, policy in policies.items():
            try:
                yield _one(trace, name, policy, backend, jsonl, label, reports, advance)
            except ReplayError as error:
                yield Unreadable(trace.name, error.problem)
            except TraceError as error:  # the file was removed or changed after the survey
                yield Unreadable(trace.name, str(error))


def _one(
    trace: Trace,
    name: str,
    policy: Policy,
    backend: str,
    jsonl: TextIO | None,
    label: Label | None,
    reports: bool,
    advance: Callable[[int], None],
) -> ReplayResult:
    answer = answer_of(policy.engine().config)
    orders = ScoreCollector(answer) if label else None
    report = ReplayReport() if reports else None

    def on_chunk(rows: Rows, judged: JudgedRows) -> None:
        for each in (orders, report):
            if each is not None:
                each.add(rows, judged)
        advance(len(rows.index))

    result = replay(trace, policy, backend=backend, on_chunk=on_chunk, name=name)
    if jsonl is None:
        summary = result.finish()
    else:
        for row in result:
            jsonl.write(decided_line(trace.name, name, row))
        summary = result.summary
        jsonl.write(summary_line(summary))
    return ReplayResult(
        summary=summary,
        backend=backend,
        answer=answer,
        label=label,
        score=orders.score(label) if orders and label else None,
        report=report.finish(result, policy, survey_notes(trace)) if report else None,
    )


# -- what is printed and written -------------------------------------------------------------------


class _NothingWrittenError(Exception):
    """Nothing was replayed, so the existing file is kept."""


class Outputs(NamedTuple):
    """Output files of a replay, in addition to the table."""

    jsonl: str | None = None
    """A file, or - for standard output; the table then goes to standard error."""
    report: Path | None = None
    png: Path | None = None

    @property
    def reports(self) -> bool:
        """Whether curves have to be kept."""
        return bool(self.report or self.png)

    def check(self, inputs: Sequence[str]) -> None:
        """Checks before the work that every output can be written; `inputs` are never overwritten.

        Raises OutputError, or MissingExtraError if a drawing library is not installed.
        """
        if self.report:
            require("report", "jinja2")
        if self.png:
            require("report", "matplotlib")
        names = (None if self.jsonl == "-" else self.jsonl, self.report, self.png)
        check_outputs([name for name in names if name is not None], inputs)

    @contextlib.contextmanager
    def lines(self) -> Iterator[Any]:
        """The open file for lines of JSON, or None. It replaces an old file only when complete."""
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
        """The console that the table goes to."""
        known = sys.stdout.isatty() or os.environ.get("COLUMNS")
        return console(stderr=self.jsonl == "-", width=None if known else _PIPE_WIDTH)


def show(console: Console, results: Sequence[ReplayResult], traces: Sequence[Trace]) -> None:
    """Prints the tables, their legend, and the findings in the traces."""
    scored = any(result.score is not None for result in results)
    console.print(table.summary_table(results, width=console.width))
    if scored:
        console.print(table.score_table(results))
    surveys = [trace.survey() for trace in traces]
    _print_first(
        console,
        [str(each) for one in surveys for each in one.problems],
        sum(one.problem_count for one in surveys),
        "yellow",
    )
    for line in table.notes(results):
        console.print(Text(line))
    _print_first(
        console,
        [str(each) for one in surveys for each in one.notes],
        sum(one.note_count for one in surveys),
        "dim",
    )
    console.print(Text(table.legend(results), "dim"))
    if scored:
        console.print(Text(table.SCORED, "dim"))


def draw(outputs: Outputs, results: Sequence[ReplayResult]) -> list[str]:
    """Writes the page and the picture, or raises OutputError; returns a line to print for each.

    If there are too many replays, those with the most rollbacks and incidents are shown.
    """
    written = []
    ranked = sorted(results, key=lambda each: (-each.summary.rollbacks, -each.summary.incidents))
    if outputs.report:
        from healcore.tools.report.page import render

        chosen = {id(each) for each in ranked[:MOST_ON_A_PAGE]}
        reports = [each.report for each in results if each.report and id(each) in chosen]
        with replacing(outputs.report) as draft:
            page = render(reports, left_out=len(results) - len(reports))
            draft.write_text(page, encoding="utf-8")
        written.append(_written("page", outputs.report, len(reports), len(results)))
    if outputs.png:
        from healcore.tools.report import picture

        reports = [each.report for each in ranked if each.report]
        with replacing(outputs.png) as draft:
            picture.draw(reports, draft)
        shown = len(picture.select_reports(reports))
        written.append(_written("picture", outputs.png, shown, len(results)))
    return written


def _print_first(console: Console, lines: Sequence[str], count: int, style: str) -> None:
    for line in lines[:MOST_PRINTED]:
        console.print(Text(line, style))
    rest = count - len(lines[:MOST_PRINTED])
    if rest:
        console.print(Text(f"and {rest:,} more like these", style))


def _written(kind: str, path: Path, shown: int, count: int) -> str:
    which = f" (the {shown} of {count} replays with the most rollbacks)" if shown < count else ""
    return f"{kind}: {path}{which}"
