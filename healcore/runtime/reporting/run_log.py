"""`RunLog`: writes events and metrics to files and trackers, and lines to the console."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from healcore import console
from healcore.console import Console, fitted
from healcore.core.decision import Cause, names_of
from healcore.core.step_record import StepRecord
from healcore.events import Log
from healcore.events.kinds import sentence
from healcore.events.metrics import MetricsLog
from healcore.events.models import EventRecord
from healcore.history import RunHistory
from healcore.runtime.faults.classification import Fault
from healcore.runtime.faults.failures import FAILURES, Severity
from healcore.runtime.reporting.trackers import Trackers
from healcore.runtime.run_options import Hooks

Say = Callable[[str], None]
"""Logs a line: `RunLog.info`, `warning` or `error`."""


@dataclass(eq=False)
class RunLog:
    """Events, metrics and console lines of one rank.

    Everything that a run reports goes through this object, so that the file, the trackers, the
    user's hooks and the console agree:

        event ──> Log (the file) ──> RunHistory (counts, incidents) ──> trackers ──> hooks
        records ──> MetricsLog (the file) ──> trackers
        info, warning, error ──> console
    """

    events: Log
    """The events file; `Log(None)` writes nothing."""
    metrics: MetricsLog = field(default_factory=lambda: MetricsLog(None, process_id=""))
    """The metrics file."""
    console: Console = "auto"
    """Whether lines are printed: True, False or "auto"."""
    silent: bool = False
    """Whether to drop the lines."""
    trackers: Trackers = field(default_factory=Trackers)
    """Receive events and metrics."""
    hooks: Hooks = field(default_factory=Hooks)
    """The user's functions for events."""
    history: RunHistory = field(default_factory=RunHistory)
    """What happened in the run. On rank 0 it includes the events of earlier processes."""
    _named: set[str] = field(default_factory=set)
    """What the lines of `name_page` have named."""

    def event(
        self, kind: str, *, step: int | None, say: Say | None = None, **fields: object
    ) -> EventRecord:
        """Writes an event, and passes it to the trackers and the user's hooks.

        A hook that raises is reported as an event `problem`, and does not stop the run.

        Args:
            kind: kind of the event, a key of `healcore.events.kinds.KINDS`.
            step: index of the optimizer step, or None.
            say: `info`, `warning` or `error`, to log the sentence of the event, or None.
            **fields: the further fields, see `Log.write`.

        Returns:
            The event as a record.
        """
        event = self.events.write(kind, step=step, **fields)
        record = self.history.add(event)
        if kind == "save":  # a kill then loses no rows that a restart does not repeat
            self.metrics.flush()
        self.trackers.event(event)
        if say is not None:
            say(fitted(f"step {step}: {sentence(record)}"))
        for problem in self.hooks.on_event(event):
            self.problem(step, problem)
        return record

    def note(self, step: int | None, why: str, **fields: object) -> None:
        """Writes an event `note`, and logs it at INFO.

        Args:
            step: index of the optimizer step, or None.
            why: what the run has done, one sentence.
            **fields: further fields of the event.
        """
        self.event("note", step=step, say=self.info, why=why, **fields)

    def problem(self, step: int | None, problem: str) -> None:
        """Writes an event `problem`, and logs a warning.

        Args:
            step: index of the optimizer step, or None.
            problem: what went wrong, one sentence.
        """
        self.event("problem", step=step, problem=problem)
        self.warning(problem)

    def assessment(
        self,
        step: int,
        onset: int,
        verdict: str,
        by: str = "earlier_weights",
        *,
        say: Say | None = None,
        **fields: Any,
    ) -> None:
        """Writes the event of a verdict about the weights.

        Args:
            step: index of the optimizer step.
            onset: step from which the weights are worse, or were suspected.
            verdict: "damage", "worse", "recovered", "accepted" or "unknown"; see
                `EventRecord.verdict`.
            by: the evidence; see `EventRecord.by`.
            say: as in `event`.
            **fields: further fields of the event, which may replace other fields, such as `cause`.
        """
        fields = {"onset": onset, "cause": [], "verdict": verdict, "by": by, **fields}
        self.event("assessment", step=step, say=say, **fields)

    def fault(
        self, step: int, fault: Fault, problem: str, *, answer: str | None, **fields: Any
    ) -> None:
        """Writes the event of a fault, and logs a warning, or an error if the run ends.

        Args:
            step: index of the optimizer step.
            fault: the classified exception.
            problem: description of the fault and of the answer to it.
            answer: action of the policy's rule, or None if the exception propagates.
            **fields: further fields of the event.
        """
        ends_run = answer in (None, "save")
        failure = FAILURES[fault.cause]
        severity, write = Severity.WARNING, self.warning
        if ends_run:
            severity, write = failure.severity, self.error
        self.event(
            "fault",
            step=step,
            cause=names_of(fault.cause),
            sign=fault.sign,
            problem=problem,
            severity=severity,
            diagnosis=fault.advice,
            references=list(failure.references),
            answer=answer,
            **fields,
        )
        write(fitted(f"step {step}: {problem}"))
        if ends_run and fault.cause != Cause.UNKNOWN:  # its page would say: read the exception
            self.name_page(failure.name, write)

    def name_page(self, failure: str, write: Say) -> None:
        """Logs, once in a run, which page says what to check.

        Args:
            failure: the name of a failure.
            write: `warning` or `error`.
        """
        if failure not in self._named:
            self._named.add(failure)
            write(f"what to check: docs/faults.md#{failure}")

    def records(
        self, index: int, records: list[StepRecord], *, several: bool, steps_at_once: int = 1
    ) -> None:
        """Writes the metrics of one step.

        Args:
            index: index of the step in the run.
            records: the step as each engine judged it, one record per optimizer that stepped.
            several: whether the run has several optimizers. Then each line names its engine.
            steps_at_once: number of steps of the dispatch that the step belongs to.
        """
        for record in records:
            fields = self.metrics.write(index, record, several=several, steps_at_once=steps_at_once)
            if fields is not None:
                self.trackers.metrics(index, record, fields)

    def info(self, line: str) -> None:
        """Logs at INFO."""
        if not self.silent:
            console.info(line, self.console)

    def warning(self, line: str) -> None:
        """Logs at WARNING."""
        if not self.silent:
            console.warning(line, self.console)

    def error(self, line: str) -> None:
        """Logs at ERROR."""
        if not self.silent:
            console.error(line, self.console)

    def close(self) -> None:
        """Writes the buffered metrics and closes the trackers. Never raises."""
        with suppress(Exception):
            self.trackers.close()
        self.metrics.flush()
