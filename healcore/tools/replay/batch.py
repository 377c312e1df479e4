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


class NamedPolicy(NamedTuple):
    """A policy, and the name that the user gave it."""

    name: str
    policy: Policy


class ReplayOptions(NamedTuple):
    """What to collect besides the summaries."""

    jsonl: TextIO | None = None
    labels: Labels | None = None
    reports: bool = False


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
    traces: Sequence[Trace], done: Callable[[str], None]
) -> tuple[list[Trace], list[Unreadable]]:
    """Makes the first pass over every trace; `done` is called with each name after its pass."""
    readable, unreadable = [], []
    for trace in traces:
        try:
            trace.survey()
        except (TraceError, OSError) as error:
            unreadable.append(Unreadable(trace.name, str(error)))
        else:
            readable.append(trace)
        done(trace.name)
    return readable, unreadable


def replay_all(
    traces: Sequence[Trace],
    policies: Sequence[NamedPolicy],
    *,
    backend: str | None,
    wanted: ReplayOptions,
    advance: Callable[[str, int], None],
) -> Iterator[ReplayResult | Unreadable]:
    """Replays every policy on every surveyed trace; yields results, or why there is none.

    `backend` is as for `replay`; None chooses by the rows that share a compiled loop. `advance` is
    called with the name of a trace and how many of its rows are done.
    """
    backend = backend or _backend(traces, len(policies))
    for trace in traces:
        for named in policies:
            try:
                yield _one(trace, named, backend, wanted, advance)
            except ReplayError as error:
                yield Unreadable(trace.name, error.problem)
            except TraceError as error:  # the file was removed or changed after the survey
                yield Unreadable(trace.name, str(error))


def _backend(traces: Sequence[Trace], policies: int) -> str:
    """Traces whose rows have the same combinations of signals share a policy's compiled loop."""
    rows: Counter[frozenset[frozenset[str]]] = Counter()
    for trace in traces:
        survey = trace.survey()
        rows[frozenset(each for each in survey.combinations if each)] += survey.rows
    return backends.choose_backend([(count, len(loop)) for loop, count in rows.items()], policies)


def _one(
    trace: Trace,
    named: NamedPolicy,
    backend: str,
    wanted: ReplayOptions,
    advance: Callable[[str, int], None],
) -> ReplayResult:
    label = wanted.labels.of(trace.name) if wanted.labels else None
    answer = answer_of(named.policy.engine().config)
    evidence = ScoreCollector(answer) if label else None
    report = ReplayReport() if wanted.reports else None

    def on_chunk(rows: Rows, judged: JudgedRows) -> None:
        if evidence is not None:
            evidence.add(rows, judged)
        if report is not None:
            report.add(rows, judged)
        advance(trace.name, len(rows.index))

    result = replay(trace, named.policy, backend=backend, on_chunk=on_chunk, name=named.name)
    if wanted.jsonl is None:
        summary = result.finish()
    else:
        for row in result:
            wanted.jsonl.write(decided_line(trace.name, named.name, row))
        summary = result.summary
        wanted.jsonl.write(summary_line(summary))
    return ReplayResult(
        summary=summary,
        backend=backend,
        missing=result.missing,
        answer=answer,
        label=label,
        score=evidence.score(label) if evidence and label else None,
        report=report.finish(result, named.policy, survey_notes(trace)) if report else None,
    )
