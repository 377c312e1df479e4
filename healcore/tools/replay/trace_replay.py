"""Runs one policy over one recorded trace.

Nothing can be restored offline: where a rollback is due, the replay reports it and continues along
the recorded curve. The engine's state is restored only where the recorded run was restored
(a resume, a rollback).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from healcore.core.engine import Engine
from healcore.core.errors import HealcoreError
from healcore.core.step_record import StepRecord
from healcore.history import Incident
from healcore.plugins.rows import (
    MOST_ROWS,
    RowRunner,
    SignalLayout,
    as_record,
    choose_backend,
    empty_columns,
    row_runner,
)
from healcore.policy import PolicyLike
from healcore.runtime.host_policy import HostPolicy
from healcore.tools.replay.decided import Decided, decided
from healcore.tools.replay.summary import (
    AttemptSummary,
    JudgedRows,
    RepeatMarker,
    ReplayIncidents,
    Summary,
)
from healcore.tools.traces import Attempt, Rows, Trace
from healcore.tools.traces.trace import by_signals

ALWAYS = ("loss", "grad_norm")
"""Signals that every policy is given: no update with a non-finite value is applied."""

OnChunk = Callable[[Rows, JudgedRows], None]
"""Called with each chunk of rows and the judged ones among them."""


def replay(
    trace: Trace,
    policy: PolicyLike,
    *,
    backend: str | None = None,
    on_chunk: OnChunk | None = None,
    name: str | None = None,
) -> Replay:
    """Replays a policy over a trace.

    Args:
        trace: from `healcore.tools.traces.open_traces`.
        policy: a preset's name, the path of a TOML file, a `Policy`, an `Engine` or its config.
        backend: numpy, jax or torch, with equal results; None takes NumPy for a short trace and
            JAX, where it is installed, for a long one.
        on_chunk: called with each chunk as it is judged.
        name: what to call the policy; its own name if None.

    Returns:
        An iterable over the rows whose decision is not neutral. Before the iteration only the
        trace's survey is read.

    Raises:
        ReplayError: the policy has nothing to judge in this trace.
        healcore.policy.PolicyError: there is no such policy, or it is not valid.
        healcore.tools.traces.TraceError: the trace cannot be read.
        healcore.extras.MissingExtraError: the backend's framework is not installed.
    """
    return Replay(trace, policy, backend, on_chunk, name)


class Replay:
    """One replay. Iterate over it once, then read `summary` and `incidents`."""

    def __init__(
        self,
        trace: Trace,
        policy: PolicyLike,
        backend: str | None,
        on_chunk: OnChunk | None,
        name: str | None,
    ) -> None:
        host = HostPolicy.of(policy)
        self.trace = trace
        self.policy = name or host.name
        self.fingerprint = host.fingerprint or ""
        self.engine: Engine = host.engine
        self._survey = trace.survey()
        self._layout = layout_of(self.engine, self._survey.combinations)
        self.backend = backend or choose_backend(
            [(self._survey.rows, len(self._layout.combinations))]
        )
        self._runner = row_runner(self.engine.config, self._layout, self.backend)
        self._on_chunk = on_chunk
        self._summary = Summary(
            trace=trace.name,
            policy=self.policy,
            fingerprint=self.fingerprint,
            first_step=self._survey.first_step,
            last_step=self._survey.last_step,
            attempts=tuple(
                AttemptSummary(each.number, each.source, each.first_step)
                for each in self._survey.attempts
            ),
            inactive=inactive_parts(
                self.engine, self._layout, trace=trace.name, policy=self.policy
            ),
            problems=self._survey.problem_count,
        )
        self._incidents = ReplayIncidents(self._summary)
        self._begun = self._finished = False

    def __iter__(self) -> Iterator[Decided]:
        for judged in self._chunks():
            yield from decided(judged, self.engine)

    def finish(self) -> Summary:
        """Runs to the end without building single rows, and returns the summary."""
        for _ in self._chunks():
            pass
        return self.summary

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """The first `MOST_KEPT` incidents, in order. RuntimeError before the replay's end."""
        self._needs_end()
        return tuple(self._incidents.kept)

    @property
    def summary(self) -> Summary:
        """The counts of the whole replay. RuntimeError before its end."""
        self._needs_end()
        return self._summary

    def _needs_end(self) -> None:
        if not self._finished:
            raise RuntimeError("the replay is not finished: iterate over it first")

    def _chunks(self) -> Iterator[JudgedRows]:
        if self._begun:
            raise RuntimeError("a replay runs once: call replay() again")
        self._begun = True
        lineage, marker = Lineage(self._runner, self._survey.attempts), RepeatMarker()
        attempt = -1
        for rows in self.trace.rows():
            if rows.attempt != attempt:
                attempt = rows.attempt
                self._incidents.begin_attempt(goes_on=lineage.enter(attempt))
            judged = marker.mark(self._judge(rows, lineage))
            self._summary.add(len(rows.index), judged)
            if len(judged.index):
                self._incidents.add(judged)
            if self._on_chunk is not None:
                self._on_chunk(rows, judged)
            yield judged
        self._incidents.close()
        self._finished = True

    def _judge(self, rows: Rows, lineage: Lineage) -> JudgedRows:
        values, kind, places = rows_of(self._layout, self.engine, rows.values, rows.given)
        index = rows.index[places]
        record, due = lineage.run(index, values, kind, rows.start)
        return JudgedRows(
            index=index,
            step=rows.step[places],
            attempt=rows.attempt,
            given={name: rows.given[name][places] for name in self._layout.signals},
            record=record,
            due=due,
            again=np.zeros(len(index), bool),
            ends=np.zeros(len(index), bool),
        )


def layout_of(engine: Engine, combinations: Iterable[frozenset[str]]) -> SignalLayout:
    """The signals that an engine is given, from the sets that rows of the trace log together."""
    combinations = list(combinations)
    logged = frozenset().union(*combinations)
    found = {_given(engine, each, logged) for each in combinations}
    return SignalLayout(tuple(sorted(found - {()})))


def rows_of(
    layout: SignalLayout,
    engine: Engine,
    values: Mapping[str, np.ndarray],
    given: Mapping[str, np.ndarray],
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Selects the rows that the engine judges; `layout` is of the whole trace.

    `values` are float32 (n,) and `given` bool (n,) by signal.

    Returns:
        The values (m,) of the layout's signals, the place int32 (m,) of each row's combination in
        the layout, and the places int (m,) of the judged rows among all rows.
    """
    length = len(next(iter(given.values()), ()))
    kind = np.full(length, -1, np.int32)
    logged = frozenset(layout.signals)
    for here, those in by_signals(given, layout.signals):
        combination = _given(engine, here, logged)
        if combination:
            kind[those] = layout.combinations.index(combination)
    rows = np.flatnonzero(kind >= 0)
    absent = np.full(length, np.nan, np.float32)
    columns = {name: values.get(name, absent)[rows] for name in layout.signals}
    return columns, kind[rows], rows


def _given(engine: Engine, here: frozenset[str], logged: frozenset[str]) -> tuple[str, ...]:
    """The signals that a row is judged by; none without a loss or a gradient norm.

    `update_norm` and `eval_loss` are given only if the policy reads them, as in the adapters. If a
    trace has evaluations, every row has `eval_loss`, NaN where there was none: the engine sees a
    run with evaluations or one without.
    """
    if not here & set(ALWAYS):
        return ()
    there = [name for name in ALWAYS if name in here]
    if "update_norm" in engine.needs and "update_norm" in here:
        there.append("update_norm")
    if "eval_loss" in engine.needs and "eval_loss" in logged:
        there.append("eval_loss")
    return tuple(there)


class Lineage:
    """Carries the engine's state from chunk to chunk and from attempt to attempt."""

    def __init__(self, runner: RowRunner, attempts: Sequence[Attempt]) -> None:
        self._runner = runner
        self._attempts = {each.number: each for each in attempts}
        # Attempts resume after these rows, so the states there are kept.
        self._wanted = sorted(
            {each.resumes_after for each in attempts if each.resumes_after is not None}
        )
        self._kept: dict[int, Any] = {}
        self._state: Any = None
        self._source = ""

    def enter(self, number: int) -> bool:
        """Sets the state in which attempt `number` begins; returns whether it continues the run.

        A resumed attempt has the detectors of its checkpoint, and the current budgets and LR
        multiplier, as after a rollback. An attempt that starts again in the same file is a rollback
        to the first state. An attempt from scratch in a file of its own is another run.
        """
        attempt = self._attempts[number]
        live, self._state = self._state, self._runner.start()
        same, self._source = attempt.source == self._source, attempt.source
        if live is None or (attempt.resumes_after is None and not same):
            return False
        if attempt.resumes_after is not None:
            self._state = self._kept.get(attempt.resumes_after, self._state)
        self._state = self._runner.on_rollback(live, self._state)
        return True

    def run(
        self, index: np.ndarray, values: Mapping[str, np.ndarray], kind: np.ndarray, first: int
    ) -> tuple[StepRecord, np.ndarray]:
        """Judges the rows `index` (n,) of the trace; `first` is the chunk's first index.

        Returns a record of arrays (n,), and bool (n,): a rollback was due.
        """
        # Rows that are not judged change nothing: the state after row w is that after the last
        # judged row up to w. A later chunk may have one, and overwrites the state kept here.
        wanted = self._wanted[bisect_left(self._wanted, first) :]
        places = np.searchsorted(index, np.array(wanted, np.int64), side="right")
        done, parts = 0, [empty_columns(0)]
        for place, after in zip((*places.tolist(), len(index)), (*wanted, None), strict=True):
            for start in range(done, place, MOST_ROWS):
                part = slice(start, min(start + MOST_ROWS, place))
                columns = {name: column[part] for name, column in values.items()}
                self._state, found = self._runner.run(self._state, columns, kind[part])
                parts.append(found)
            done = place
            if after is not None:
                self._kept[after] = self._state
        return as_record(tuple(map(np.concatenate, zip(*parts, strict=True))))


class ReplayError(HealcoreError, ValueError):
    """A trace that a policy cannot be replayed on; the message has the reason and the remedy."""

    def __init__(self, trace: str, problem: str) -> None:
        super().__init__(f"{trace}: {problem}")
        self.problem = problem


def inactive_parts(
    engine: Engine, layout: SignalLayout, *, trace: str, policy: str
) -> dict[str, tuple[str, ...]]:
    """The inactive parts of the policy, by missing signal; ReplayError if nothing can be judged."""
    logged = set(layout.signals)
    if not logged:
        raise ReplayError(
            trace,
            "no row has a loss or a gradient norm, so nothing can be judged; "
            "name the columns that hold them, as in --column loss=NAME --column grad_norm=NAME",
        )
    missing: dict[str, list[str]] = {}
    working = False
    if engine.config.clip is not None:
        if engine.per_tensor:
            missing.setdefault("group_norms", []).append("clip")
        elif "grad_norm" in logged:
            working = True
        else:
            missing.setdefault("grad_norm", []).append("clip")
    if engine.clips_updates:
        missing["update"] = ["update_clip"]
    for name, detector in engine.config.detectors:
        absent = detector.NEEDS - logged
        working |= not absent
        for signal in absent:
            missing.setdefault(signal, []).append(name)
    if not working:
        wanted = ", ".join(sorted(engine.needs)) or "nothing"
        raise ReplayError(
            trace,
            f"policy {policy} reads {wanted}, and this trace logs only "
            f"{', '.join(sorted(logged))}: there is nothing to judge; take a log that has what the "
            "policy reads, or another policy",
        )
    return {signal: tuple(parts) for signal, parts in sorted(missing.items())}
