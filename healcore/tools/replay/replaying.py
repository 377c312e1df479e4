"""One trace under one policy: what the policy would have done to a run that already happened.

Offline there is nothing to restore: where a rollback would have been ordered the replay says so and
goes on along the recorded curve. Only where the recorded run itself went back (a resume, a
rollback) does the engine go back with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from healcore.core.engine import Engine
from healcore.core.verdict import Action, Cause
from healcore.history import Incident
from healcore.policy import PolicyLike
from healcore.runtime.host_policy import HostPolicy
from healcore.tools.replay import backends
from healcore.tools.replay.decided import Decided, Judged, decided
from healcore.tools.replay.fitting import resting, sentence
from healcore.tools.replay.incidents import ReplayIncidents
from healcore.tools.replay.lineage import Lineage
from healcore.tools.replay.repeats import Repeats
from healcore.tools.replay.summary import AttemptSummary, Summary, SummaryCounter, in_order
from healcore.tools.traces import Rows, Trace

OnChunk = Callable[[Rows, Judged], None]
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
        backend: numpy, jax or torch, which give the same; None takes NumPy for a short trace and
            JAX, where it is installed, for a long one.
        on_chunk: is shown each chunk as it is judged.
        name: what to call the policy; its own name if None.

    Returns:
        An iterable over the rows whose decision is not neutral. Nothing is read before it is
        iterated over, but for the trace's survey.

    Raises:
        ReplayError: the policy has nothing to judge in this trace.
        healcore.policy.PolicyError: there is no such policy, or it is not a valid one.
        healcore.tools.traces.TraceError: the trace cannot be read.
        healcore.extras.MissingExtraError: the backend's framework is not installed.
    """
    return Replay(trace, policy, backend, on_chunk, name)


class Replay:
    """A replay, to be iterated over once; then `summary` and `incidents` are there."""

    def __init__(
        self,
        trace: Trace,
        policy: PolicyLike,
        backend: str | None,
        on_chunk: OnChunk | None,
        name: str | None,
    ) -> None:
        """See `replay`."""
        host = HostPolicy.of(policy)
        self.trace = trace
        self.policy = name or host.name
        self.fingerprint = host.fingerprint or ""
        self.engine: Engine = host.engine
        self._survey = trace.survey()
        self._layout = backends.layout_of(self.engine, self._survey.combinations)
        self.missing = resting(self.engine, self._layout, trace=trace.name, policy=self.policy)
        """Parts of the policy that rest, by the signal that the trace does not log."""
        self.resting = tuple(sentence(*each) for each in self.missing.items())
        """What of the policy rests on this trace, in words."""
        self.backend = backend or backends.choose_backend(
            [(self._survey.rows, len(self._layout.combinations))]
        )
        self._runner = backends.row_runner(self.engine, self._layout, self.backend)
        self._on_chunk = on_chunk
        self._counter, self._cases = SummaryCounter(), ReplayIncidents()
        self._rows: Counter[int] = Counter()
        self._rollbacks: Counter[int] = Counter()
        self._repeats: Counter[int] = Counter()
        self._judged = 0
        self._begun = self._finished = False

    def __iter__(self) -> Iterator[Decided]:
        for judged in self._chunks():
            yield from decided(judged, self.engine)

    def finish(self) -> Summary:
        """Runs to the end without naming single rows; returns the summary."""
        for _ in self._chunks():
            pass
        return self.summary

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """The first `incidents.MOST_KEPT` incidents, in order.

        Raises:
            RuntimeError: the replay has not come to its end.
        """
        self._needs_end()
        return tuple(self._cases.kept)

    @property
    def summary(self) -> Summary:
        """What it came to.

        Raises:
            RuntimeError: the replay has not come to its end.
        """
        self._needs_end()
        survey, counter = self._survey, self._counter
        rows = sum(self._rows.values())
        return Summary(
            trace=self.trace.name,
            policy=self.policy,
            fingerprint=self.fingerprint,
            rows=rows,
            unjudged=rows - self._judged,
            first_step=survey.first_step,
            last_step=survey.last_step,
            attempts=tuple(
                AttemptSummary(
                    each.number,
                    each.source,
                    each.first_step,
                    self._rows[each.number],
                    self._cases.by_attempt[each.number],
                    self._rollbacks[each.number],
                    self._repeats[each.number],
                )
                for each in survey.attempts
            ),
            alarms=counter.alarms,
            causes=in_order(counter.causes, Cause),
            actions=in_order(counter.actions, Action),
            skips=counter.skips,
            clips=counter.clips,
            incidents=self._cases.count,
            rollbacks=counter.rollbacks,
            repeats=counter.repeats,
            spent=counter.spent,
            first_incident=self._cases.first,
            last_incident=self._cases.last,
            first_rollback=counter.first_rollback,
            last_rollback=counter.last_rollback,
            repeat_cuts=counter.repeat_cuts,
            lowest_lr=counter.lowest_lr,
            lowest_lr_first=counter.lowest_lr_first,
            stopped_at=counter.stopped_at,
            stopped_step=counter.stopped_step,
            resting=self.resting,
            problems=survey.problem_count,
        )

    def _needs_end(self) -> None:
        if not self._finished:
            raise RuntimeError("the replay has not come to its end: iterate over it first")

    def _chunks(self) -> Iterator[Judged]:
        if self._begun:
            raise RuntimeError("a replay runs once: call replay() again")
        self._begun = True
        lineage, marker = Lineage(self._runner, self._survey.attempts), Repeats()
        attempt = -1
        for rows in self.trace.rows():
            if rows.attempt != attempt:
                attempt = rows.attempt
                self._cases.begin_attempt(goes_on=lineage.enter(attempt))
            judged = marker.mark(self._judge(rows, lineage))
            self._rows[attempt] += len(rows.index)
            if len(judged.index):
                self._judged += len(judged.index)
                rollbacks, repeats = self._counter.add(judged)
                self._rollbacks[attempt] += rollbacks
                self._repeats[attempt] += repeats
                self._cases.add(judged)
            if self._on_chunk is not None:
                self._on_chunk(rows, judged)
            yield judged
        self._cases.close()
        self._finished = True

    def _judge(self, rows: Rows, lineage: Lineage) -> Judged:
        chunk, places = backends.rows_of(self._layout, self.engine, rows.values, rows.given)
        index = rows.index[places]
        record, due = lineage.run(index, chunk, rows.start)
        return Judged(
            index=index,
            step=rows.step[places],
            attempt=rows.attempt,
            given={name: rows.given[name][places] for name in self._layout.signals},
            record=record,
            due=due,
            again=np.zeros(len(index), bool),
            ends=np.zeros(len(index), bool),
        )
