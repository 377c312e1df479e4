"""Replays several policies over many traces, for the command `healcore replay`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TextIO

from healcore.policy import Policy
from healcore.tools.replay import backends
from healcore.tools.replay.decisions import JudgedRows
from healcore.tools.replay.report import ReplayReport, survey_notes
from healcore.tools.replay.scores import Label, Labels, Score, ScoreCollector, answer_of
from healcore.tools.replay.summary import Summary, decided_line, summary_line
from healcore.tools.replay.trace_replay import ReplayError, replay
from healcore.tools.report.run_report import RunReport
from healcore.tools.traces import Rows, Trace, TraceError, Unreadable


class ReplayResult(NamedTuple):
    """One trace under one policy."""

    summary: Summary
    backend: str
    missing: Mapping[str, tuple[str, ...]]
    """See `Replay.missing`."""
    answer: str
    """The kind of order that is scored: rollbacks, stops, skips or alarms."""
    label: Label | None
    score: Score | None
    report: RunReport | None


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
        traces: those that `surveyed` could read.
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
        backend = backends.choose_backend(loops, len(policies))
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
        missing=result.missing,
        answer=answer,
        label=label,
        score=orders.score(label) if orders and label else None,
        report=report.finish(result, policy, survey_notes(trace)) if report else None,
    )
