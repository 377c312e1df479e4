"""`RunLog`: writes events and metrics to files and trackers, and lines to the console."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from healcore import console
from healcore.console import Console
from healcore.core.step_record import StepRecord
from healcore.core.verdict import names
from healcore.events import Log
from healcore.events.metrics import Metrics
from healcore.events.models import EventRecord
from healcore.events.schema import Trait, has, sentence
from healcore.history import Run
from healcore.runtime.faults import Fault
from healcore.runtime.run_options import Hooks
from healcore.runtime.trackers import Trackers


class RunLog:
    """Events, metrics and console lines of one rank.

    Lines have the level INFO or WARNING; see `healcore.console` for their destination.

    Args:
        events: writer of the events file.
        metrics: writer of the metrics file, or None for no file.
        console: as in `Logging`.
        silent: whether to drop the lines.
        trackers: receive events and metrics.
        hooks: the user's functions for events.
        on_local: called with the sentence of an event that may occur on this rank only, or None.
    """

    def __init__(
        self,
        events: Log,
        *,
        metrics: Metrics | None = None,
        console: Console = "auto",
        silent: bool = False,
        trackers: Trackers | None = None,
        hooks: Hooks | None = None,
        on_local: Callable[[str], object] | None = None,
    ) -> None:
        self.events = events
        self.trackers = Trackers() if trackers is None else trackers
        self.run = Run()
        """The run by its events, on rank 0 including the events of earlier processes."""
        self._metrics = Metrics(None, run=events.run) if metrics is None else metrics
        self._hooks = Hooks() if hooks is None else hooks
        self._console: Console = console
        self._silent = silent
        self._on_local = on_local

    def event(self, kind: str, *, step: int | None, **fields: Any) -> EventRecord:
        """Writes an event, see `Log.write`, and passes it to the trackers and the user's hooks."""
        event = self.events.write(kind, step=step, **fields)
        record = self.run.add(event)
        if self._on_local is not None and has(kind, Trait.LOCAL):
            self._on_local(sentence(record))
        self.trackers.event(event)
        for problem in self._hooks.on_event(event):
            self.problem(step, problem)
        return record

    def problem(self, step: int | None, problem: str) -> None:
        """Writes an event, and logs a warning."""
        self.event("problem", step=step, problem=problem)
        self.warning(problem)

    def fault(
        self, step: int, fault: Fault, problem: str, *, answer: str | None, **fields: Any
    ) -> None:
        """Writes the event of a fault, and logs a warning, or an error without an answer.

        Args:
            step: current step of the run.
            fault: the classified exception.
            problem: description of the fault and of the answer to it.
            answer: action of the policy's rule, or None if the exception propagates.
            fields: further fields of the event.
        """
        self.event(
            "fault",
            step=step,
            cause=names(fault.cause),
            sign=fault.sign,
            problem=problem,
            severity=fault.failure.severity,
            diagnosis=fault.failure.diagnosis,
            references=list(fault.failure.references),
            answer=answer,
            **fields,
        )
        if answer:
            self.warning(f"step {step}: {problem}")
        elif not self._silent:
            diagnosis = fault.failure.diagnosis
            console.error(f"step {step}: {problem}. {diagnosis}", self._console)

    def records(self, index: int, records: list[StepRecord]) -> None:
        """Writes the metrics of one step."""
        for record in records:
            fields = self._metrics.write(index, record, several=len(records) > 1)
            if fields is not None:
                self.trackers.metrics(index, record, fields)

    def info(self, line: str) -> None:
        """Logs at INFO."""
        if not self._silent:
            console.info(line, self._console)

    def warning(self, line: str) -> None:
        """Logs at WARNING."""
        if not self._silent:
            console.warning(line, self._console)

    def report_trackers(self, step: int) -> None:
        """Logs the failures of trackers since the last call."""
        for problem in self.trackers.problems():
            self.problem(step, problem)

    def close(self) -> None:
        """Writes the buffered metrics and closes the trackers. Never raises."""
        with suppress(Exception):
            for problem in self.trackers.close():
                self.warning(problem)
        self._metrics.flush()
