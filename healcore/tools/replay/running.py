"""Many traces under several policies: the work behind the command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TextIO

from healcore.policy import Policy
from healcore.tools.replay import runners
from healcore.tools.replay.decided import Judged
from healcore.tools.replay.fitting import ReplayError
from healcore.tools.replay.jsonl import decided_line, summary_line
from healcore.tools.replay.replaying import replay
from healcore.tools.replay.report import ReplayReport, survey_notes
from healcore.tools.replay.scoring import Evidence, Label, Labels, Score, answer_of
from healcore.tools.replay.summary import Summary
from healcore.tools.report.run_report import RunReport
from healcore.tools.traces import Rows, Trace, TraceError, Unreadable


class Named(NamedTuple):
    """A policy, and what the user called it."""

    name: str
    policy: Policy


class Wanted(NamedTuple):
    """What is wanted besides the summaries."""

    jsonl: TextIO | None = None
    labels: Labels | None = None
    reports: bool = False


class Result(NamedTuple):
    """One trace under one policy."""

    summary: Summary
    backend: str
    missing: Mapping[str, tuple[str, ...]]
    """Parts of the policy that rest, by the signal that the trace does not log."""
    answer: str
    """What of the policy is scored: rollbacks, stops, skips or alarms."""
    label: Label | None
    score: Score | None
    report: RunReport | None


def surveyed(
    traces: Sequence[Trace], told: Callable[[str], None]
) -> tuple[list[Trace], list[Unreadable]]:
    """The first pass over every trace.

    Args:
        traces: to be read.
        told: called with each name when its pass is done.

    Returns:
        The traces that can be read, and the others.
    """
    readable, unreadable = [], []
    for trace in traces:
        try:
            trace.survey()
        except (TraceError, OSError) as error:
            unreadable.append(Unreadable(trace.name, str(error)))
        else:
            readable.append(trace)
        told(trace.name)
    return readable, unreadable


def replay_all(
    traces: Sequence[Trace],
    policies: Sequence[Named],
    *,
    backend: str | None,
    wanted: Wanted,
    advance: Callable[[str, int], None],
) -> Iterator[Result | Unreadable]:
    """Replays every policy on every trace, trace by trace.

    Args:
        traces: that were surveyed.
        policies: in the order in which results come.
        backend: see `replay`; None chooses by the rows that a compiled loop would be used for.
        wanted: what to collect, and the file to write single rows to.
        advance: called with the name of a trace and how many of its rows are done.

    Yields:
        A result, or why there is none, for each trace and policy.
    """
    backend = backend or _backend(traces, len(policies))
    for trace in traces:
        for named in policies:
            try:
                yield _one(trace, named, backend, wanted, advance)
            except ReplayError as error:
                yield Unreadable(trace.name, error.problem)
            except TraceError as error:  # it went away, or changed, since the survey
                yield Unreadable(trace.name, str(error))


def _backend(traces: Sequence[Trace], policies: int) -> str:
    """Traces whose rows have the same combinations of signals share a policy's compiled loop."""
    rows: Counter[frozenset[frozenset[str]]] = Counter()
    for trace in traces:
        survey = trace.survey()
        rows[frozenset(each for each in survey.combinations if each)] += survey.rows
    return runners.chosen([(count, len(loop)) for loop, count in rows.items()], policies)


def _one(
    trace: Trace,
    named: Named,
    backend: str,
    wanted: Wanted,
    advance: Callable[[str, int], None],
) -> Result:
    label = wanted.labels.of(trace.name) if wanted.labels else None
    answer = answer_of(named.policy.engine().config)
    evidence = Evidence(answer) if label else None
    report = ReplayReport() if wanted.reports else None

    def on_chunk(rows: Rows, judged: Judged) -> None:
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
    return Result(
        summary=summary,
        backend=backend,
        missing=result.missing,
        answer=answer,
        label=label,
        score=evidence.score(label) if evidence and label else None,
        report=report.finish(result, named.policy, survey_notes(trace)) if report else None,
    )
