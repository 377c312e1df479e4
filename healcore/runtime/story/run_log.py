"""`RunLog`: writes events and metrics to files and trackers, and lines to the console."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from healcore import console
from healcore.console import Console
from healcore.core.decision import Cause, StepRecord, names
from healcore.events import Log
from healcore.events.log import Metrics
from healcore.events.models import EventRecord
from healcore.history import Run
from healcore.runtime.faults.failures import Fault
from healcore.runtime.run_options import Hooks
from healcore.runtime.story.trackers import Trackers


@dataclass(eq=False)
class RunLog:
    """Events, metrics and console lines of one rank; see `healcore.console` for the lines."""

    events: Log
    metrics: Metrics = field(default_factory=lambda: Metrics(None, run=""))
    console: Console = "auto"
    silent: bool = False  # whether to drop the lines
    trackers: Trackers = field(default_factory=Trackers)  # receive events and metrics
    hooks: Hooks = field(default_factory=Hooks)  # the user's functions for events
    run: Run = field(default_factory=Run)
    """The run by its events, on rank 0 including the events of earlier processes."""

    def event(self, kind: str, *, step: int | None, **fields: Any) -> EventRecord:
        """Writes an event, see `Log.write`, and passes it to the trackers and the user's hooks."""
        event = self.events.write(kind, step=step, **fields)
        record = self.run.add(event)
        self.trackers.event(event)
        for problem in self.hooks.on_event(event):
            self.problem(step, problem)
        return record

    def problem(self, step: int | None, problem: str) -> None:
        """Writes an event, and logs a warning."""
        self.event("problem", step=step, problem=problem)
        self.warning(problem)

    def assessment(
        self, step: int, onset: int, verdict: str, by: str = "earlier_weights", **fields: Any
    ) -> None:
        """Writes the event of a verdict `by` some evidence about the weights."""
        fields = {"onset": onset, "cause": [], "verdict": verdict, "by": by, **fields}
        self.event("assessment", step=step, **fields)

    def fault(
        self, step: int, fault: Fault, problem: str, *, answer: str | None, **fields: Any
    ) -> None:
        """Writes the event of a fault, and logs a warning, or an error if the run ends.

        `problem` describes the fault and the answer to it. `answer` is the action of the policy's
        rule, or None if the exception propagates. `fields` are further fields of the event.
        """
        self.event(
            "fault",
            step=step,
            cause=names(fault.cause),
            sign=fault.sign,
            problem=problem,
            severity=fault.failure.severity,
            diagnosis=fault.advice,
            references=list(fault.failure.references),
            answer=answer,
            **fields,
        )
        if answer in (None, "save"):  # the exception ends the run
            advice = "" if fault.cause == Cause.UNKNOWN else f". {fault.advice}"
            self.error(f"step {step}: {problem}{advice}")
        else:
            self.warning(f"step {step}: {problem}")

    def records(self, index: int, records: list[StepRecord], *, steps_at_once: int = 1) -> None:
        """Writes the metrics of one step, which was dispatched with others at once."""
        several = len(records) > 1
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

    def report_trackers(self, step: int) -> None:
        """Logs the failures of trackers since the last call."""
        for problem in self.trackers.take_problems():
            self.problem(step, problem)

    def close(self) -> None:
        """Writes the buffered metrics and closes the trackers. Never raises."""
        with suppress(Exception):
            for problem in self.trackers.close():
                self.warning(problem)
        self.metrics.flush()
