"""Replays one policy over one recorded trace.

A replay cannot restore a checkpoint. Where a rollback is due, the replay reports the rollback and
continues along the recorded curve. The engine's state is restored only where the recorded run was
resumed or rolled back.
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
from healcore.tools.replay.decided import Decided, select_decided
from healcore.tools.replay.summary import (
    AttemptSummary,
    JudgedRows,
    RepeatMarker,
    ReplayIncidents,
    Summary,
)
from healcore.tools.traces import Attempt, Rows, Trace
from healcore.tools.traces.trace import group_by_signals

ALWAYS_PASSED = ("loss", "grad_norm")
"""Signals that every policy gets, because no update with a non-finite value is applied."""

OnChunk = Callable[[Rows, JudgedRows], None]
"""Called with each chunk of rows and its judged rows."""


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
        policy: the name of a preset, a path of a TOML file, a `Policy`, an `Engine` or its config.
        backend: "numpy", "jax" or "torch", with equal results. None selects JAX, if installed, for
            a long trace, and NumPy otherwise.
        on_chunk: called with each chunk after it is judged.
        name: name of the policy in the results, or None for the policy's own name.

    Returns:
        An iterable over the rows whose decision is not neutral. Until the iteration, only the
        survey of the trace has been read.

    Raises:
        ReplayError: the policy has nothing to judge in this trace.
        healcore.policy.PolicyError: the policy does not exist or is not valid.
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
        self._layout = choose_layout(self.engine, self._survey.combinations)
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
                AttemptSummary(attempt.number, attempt.source, attempt.first_step)
                for attempt in self._survey.attempts
            ),
            inactive=find_inactive(self.engine, self._layout, trace=trace.name, policy=self.policy),
            problems=self._survey.problem_count,
        )
        self._incidents = ReplayIncidents(self._summary)
        self._started = self._finished = False

    def __iter__(self) -> Iterator[Decided]:
        for judged in self._chunks():
            yield from select_decided(judged, self.engine)

    def finish(self) -> Summary:
        """Runs to the end without `Decided` objects, and returns the summary."""
        for _ in self._chunks():
            pass
        return self.summary

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """The first 1000 incidents, in order. Raises RuntimeError before the end of the replay."""
        self._check_finished()
        return tuple(self._incidents.incidents)

    @property
    def summary(self) -> Summary:
        """The counts of the whole replay. Raises RuntimeError before the end of the replay."""
        self._check_finished()
        return self._summary

    def _check_finished(self) -> None:
        if not self._finished:
            raise RuntimeError("the replay is not finished: iterate over it first")

    def _chunks(self) -> Iterator[JudgedRows]:
        if self._started:
            raise RuntimeError("a replay runs once: call replay() again")
        self._started = True
        states, marker = _AttemptStates(self._runner, self._survey.attempts), RepeatMarker()
        attempt = -1
        for rows in self.trace.rows():
            if rows.attempt != attempt:
                attempt = rows.attempt
                self._incidents.begin_attempt(continues=states.begin_attempt(attempt))
            judged = marker.mark(self._judge(rows, states))
            self._summary.add(len(rows.index), judged)
            if len(judged.index):
                self._incidents.add(judged)
            if self._on_chunk is not None:
                self._on_chunk(rows, judged)
            yield judged
        self._incidents.close()
        self._finished = True

    def _judge(self, rows: Rows, states: _AttemptStates) -> JudgedRows:
        values, kind, places = select_judged(self._layout, self.engine, rows.values, rows.logged)
        index = rows.index[places]
        record, due = states.judge(index, values, kind, rows.start)
        return JudgedRows(
            index=index,
            step=rows.step[places],
            attempt=rows.attempt,
            logged={name: rows.logged[name][places] for name in self._layout.signals},
            record=record,
            due=due,
            repeated=np.zeros(len(index), bool),
            ends_run=np.zeros(len(index), bool),
        )


def choose_layout(engine: Engine, combinations: Iterable[frozenset[str]]) -> SignalLayout:
    """Chooses the signals that the engine gets from sets of signals that rows log together."""
    combinations = list(combinations)
    in_trace = frozenset().union(*combinations)
    passed = {_choose_signals(engine, in_row, in_trace) for in_row in combinations}
    return SignalLayout(tuple(sorted(passed - {()})))


def select_judged(
    layout: SignalLayout,
    engine: Engine,
    values: Mapping[str, np.ndarray],
    logged: Mapping[str, np.ndarray],
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Selects the rows that the engine judges.

    Args:
        layout: the layout of the whole trace.
        engine: the engine.
        values: float32 (n,) by signal.
        logged: bool (n,) by signal.

    Returns:
        The values, float32 (m,), of the layout's signals; the place, int32 (m,), of each row's
        combination in the layout; and the places, int (m,), of the judged rows among all rows.
    """
    length = len(next(iter(logged.values()), ()))
    kind = np.full(length, -1, np.int32)
    in_trace = frozenset(layout.signals)
    for in_row, mask in group_by_signals(logged, layout.signals):
        combination = _choose_signals(engine, in_row, in_trace)
        if combination:
            kind[mask] = layout.combinations.index(combination)
    rows = np.flatnonzero(kind >= 0)
    absent = np.full(length, np.nan, np.float32)
    columns = {name: values.get(name, absent)[rows] for name in layout.signals}
    return columns, kind[rows], rows


def _choose_signals(
    engine: Engine, in_row: frozenset[str], in_trace: frozenset[str]
) -> tuple[str, ...]:
    """Chooses the signals of a row for the engine: none without a loss or a gradient norm.

    `update_norm` and `eval_loss` are passed only if the policy reads them, as in the adapters. In a
    trace with evaluations every row has `eval_loss`, which is NaN without an evaluation, because
    the signals of an engine are fixed for a run.
    """
    if not in_row & set(ALWAYS_PASSED):
        return ()
    passed = [name for name in ALWAYS_PASSED if name in in_row]
    if "update_norm" in engine.needs and "update_norm" in in_row:
        passed.append("update_norm")
    if "eval_loss" in engine.needs and "eval_loss" in in_trace:
        passed.append("eval_loss")
    return tuple(passed)


class _AttemptStates:
    """Carries the engine's state from chunk to chunk and from attempt to attempt."""

    def __init__(self, runner: RowRunner, attempts: Sequence[Attempt]) -> None:
        self._runner = runner
        self._attempts = {attempt.number: attempt for attempt in attempts}
        # Attempts resume after these rows, so the states after these rows are saved.
        rows = {attempt.resumes_after for attempt in attempts}
        self._saved_rows = sorted(row for row in rows if row is not None)
        self._saved: dict[int, Any] = {}
        self._state: Any = None
        self._source = ""

    def begin_attempt(self, number: int) -> bool:
        """Sets the first state of an attempt. Returns whether the attempt continues the run.

        As after a rollback, a resumed attempt has the detectors of its checkpoint, and the current
        budgets and LR multiplier. A restart in the same file is a rollback to the first state. An
        attempt from scratch in a separate file is another run.
        """
        attempt = self._attempts[number]
        live, self._state = self._state, self._runner.start()
        same_file, self._source = attempt.source == self._source, attempt.source
        if live is None or (attempt.resumes_after is None and not same_file):
            return False
        if attempt.resumes_after is not None:
            self._state = self._saved.get(attempt.resumes_after, self._state)
        self._state = self._runner.on_rollback(live, self._state)
        return True

    def judge(
        self, index: np.ndarray, values: Mapping[str, np.ndarray], kind: np.ndarray, first: int
    ) -> tuple[StepRecord, np.ndarray]:
        """Judges the rows `index` (n,) of the trace; `first` is the chunk's first index.

        Returns the record, with fields (n,), and whether a rollback was due, bool (n,).
        """
        # Only judged rows change the state, so the state after row r is the state after the last
        # judged row up to r. A later chunk with such a row overwrites the saved state.
        rows = self._saved_rows[bisect_left(self._saved_rows, first) :]
        places = np.searchsorted(index, np.array(rows, np.int64), side="right")
        done, parts = 0, [empty_columns(0)]
        for place, row in zip((*places.tolist(), len(index)), (*rows, None), strict=True):
            for start in range(done, place, MOST_ROWS):
                part = slice(start, min(start + MOST_ROWS, place))
                columns = {name: column[part] for name, column in values.items()}
                self._state, decided = self._runner.run(self._state, columns, kind[part])
                parts.append(decided)
            done = place
            if row is not None:
                self._saved[row] = self._state
        return as_record(tuple(map(np.concatenate, zip(*parts, strict=True))))


class ReplayError(HealcoreError, ValueError):
    """A policy cannot be replayed on a trace. The message has the reason and the remedy."""

    def __init__(self, trace: str, problem: str) -> None:
        super().__init__(f"{trace}: {problem}")
        self.problem = problem


def find_inactive(
    engine: Engine, layout: SignalLayout, *, trace: str, policy: str
) -> dict[str, tuple[str, ...]]:
    """Finds the inactive parts of the policy by missing signal.

    Raises ReplayError if the policy has nothing to judge.
    """
    logged = set(layout.signals)
    if not logged:
        raise ReplayError(
            trace,
            "no row has a loss or a gradient norm, so nothing can be judged; "
            "name their columns, as in --column loss=NAME --column grad_norm=NAME",
        )
    missing: dict[str, list[str]] = {}
    active = False
    if engine.config.clip is not None:
        if engine.per_tensor:
            missing.setdefault("group_norms", []).append("clip")
        elif "grad_norm" in logged:
            active = True
        else:
            missing.setdefault("grad_norm", []).append("clip")
    for name, detector in engine.config.detectors:
        absent = detector.NEEDS - logged
        active |= not absent
        for signal in absent:
            missing.setdefault(signal, []).append(name)
    if not active:
        needed = ", ".join(sorted(engine.needs)) or "nothing"
        raise ReplayError(
            trace,
            f"policy {policy} reads {needed}, but this trace logs only "
            f"{', '.join(sorted(logged))}: pass a log with these signals, or another policy",
        )
    return {signal: tuple(parts) for signal, parts in sorted(missing.items())}
