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
from healcore.tools.replay.scores import Label, Labels, ScoreCollector, severest_order
from healcore.tools.replay.summary import JudgedRows
from healcore.tools.replay.table import ReplayResult
from healcore.tools.replay.trace_replay import ReplayError, replay
from healcore.tools.terminal import console
from healcore.tools.traces import Rows, Trace, TraceError, Unreadable

MAX_PRINTED = 20
"""Number of problems of traces that are printed."""

MAX_ON_PAGE = 60
"""Number of replays on one page, because a browser is slow with more. A picture has fewer."""

_PIPE_WIDTH = 160
"""Width of the table in columns if the width of the output is unknown."""


def survey_all(
    traces: Sequence[Trace], done: Callable[[], None]
) -> tuple[list[Trace], list[Unreadable]]:
    """Surveys every trace, and calls `done` after each. Returns readable and unreadable traces."""
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
        traces: the readable traces from `survey_all`.
        policies: policies by the names that the user passed.
        backend: as for `replay`; None chooses by the number of rows that share a compiled loop.
        jsonl: output for lines of JSON.
        labels: known events, for scores of the policies.
        reports: whether to build reports.
        advance: called with the number of rows of each finished chunk.

    Yields:
        A result, or the reason why the replay failed.
    """
    if backend is None:
        # Traces whose rows have the same combinations of signals share a policy's compiled loop.
        rows: Counter[frozenset[frozenset[str]]] = Counter()
        for survey in (trace.survey() for trace in traces):
            rows[survey.combinations - {frozenset()}] += survey.rows
        loops = [(count, len(combinations)) for combinations, count in rows.items()]
        backend = choose_backend(loops, len(policies))
    for trace in traces:
        label = labels.of(trace.name) if labels else None
        for name, policy in policies.items():
            try:
                yield _replay_one(trace, name, policy, backend, jsonl, label, reports, advance)
            except ReplayError as error:
                yield Unreadable(trace.name, error.problem)
            except TraceError as error:  # the file was removed or changed after the survey
                yield Unreadable(trace.name, str(error))


def _replay_one(
    trace: Trace,
    name: str,
    policy: Policy,
    backend: str,
    jsonl: TextIO | None,
    label: Label | None,
    reports: bool,
    advance: Callable[[int], None],
) -> ReplayResult:
    order_kind = severest_order(policy.engine().config)
    scores = ScoreCollector(order_kind) if label else None
    report = ReplayReport() if reports else None

    def on_chunk(rows: Rows, judged: JudgedRows) -> None:
        for collector in (scores, report):
            if collector is not None:
                collector.add(rows, judged)
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
        order_kind=order_kind,
        label=label,
        score=scores.score(label) if scores and label else None,
        report=report.finish(result, policy, survey_notes(trace)) if report else None,
    )


# -- what is printed and written -------------------------------------------------------------------


class _NothingWrittenError(Exception):
    """No row was replayed, so the existing file stays."""


class Outputs(NamedTuple):
    """Output files of a replay, in addition to the table."""

    jsonl: str | None = None
    """Path, or "-" for standard output, which moves the table to standard error."""
    report: Path | None = None
    png: Path | None = None

    @property
    def reports(self) -> bool:
        """Whether reports are needed."""
        return bool(self.report or self.png)

    def check(self, inputs: Sequence[str]) -> None:
        """Checks that every output can be written and overwrites no input.

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


def show(console: Console, results: Sequence[ReplayResult], traces: Sequence[Trace]) -> None:
    """Prints the tables with their legend, and the problems and notes of the traces."""
    scored = any(result.score is not None for result in results)
    console.print(table.summary_table(results, width=console.width))
    if scored:
        console.print(table.score_table(results))
    surveys = [trace.survey() for trace in traces]
    _print_first(
        console,
        [str(problem) for survey in surveys for problem in survey.problems],
        sum(survey.problem_count for survey in surveys),
        "yellow",
    )
    for line in table.notes(results):
        console.print(Text(line))
    _print_first(
        console,
        [str(note) for survey in surveys for note in survey.notes],
        sum(survey.note_count for survey in surveys),
        "dim",
    )
    console.print(Text(table.legend(results), "dim"))
    if scored:
        console.print(Text(table.SCORED, "dim"))


def draw(outputs: Outputs, results: Sequence[ReplayResult]) -> list[str]:
    """Writes the page and the picture, or raises OutputError. Returns a line to print for each.

    Too many replays are limited to the replays with the most rollbacks and incidents.
    """
    written = []
    ranked = sorted(
        results, key=lambda result: (-result.summary.rollbacks, -result.summary.incidents)
    )
    if outputs.report:
        from healcore.tools.report.page import render

        chosen = {id(result) for result in ranked[:MAX_ON_PAGE]}
        reports = [each.report for each in results if each.report and id(each) in chosen]
        with replacing(outputs.report) as draft:
            page = render(reports, left_out=len(results) - len(reports))
            draft.write_text(page, encoding="utf-8")
        written.append(_written("page", outputs.report, len(reports), len(results)))
    if outputs.png:
        from healcore.tools.report import picture

        reports = [result.report for result in ranked if result.report]
        with replacing(outputs.png) as draft:
            picture.draw(reports, draft)
        shown = len(picture.select_reports(reports))
        written.append(_written("picture", outputs.png, shown, len(results)))
    return written


def _print_first(console: Console, lines: Sequence[str], count: int, style: str) -> None:
    for line in lines[:MAX_PRINTED]:
        console.print(Text(line, style))
    rest = count - len(lines[:MAX_PRINTED])
    if rest:
        console.print(Text(f"and {rest:,} more like these", style))


def _written(kind: str, path: Path, shown: int, count: int) -> str:
    which = f" (the {shown} of {count} replays with the most rollbacks)" if shown < count else ""
    return f"{kind}: {path}{which}"
