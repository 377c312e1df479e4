"""Logs to Trackio: metrics, alerts, and a table of the events."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import trackio
from trackio import context_vars

from healcore.runtime.events.schema import SEVERE
from healcore.runtime.trackers.event_table import EventTable
from healcore.runtime.trackers.tracker import TrackedRun, is_error, text_of, title_of


class Client:
    """Logs to the active run, else to one of its own, which a restarted program continues."""

    def __init__(self, where: str | None, own: Any) -> None:
        self._run: Any = own or (context_vars.current_run.get() if where is None else None)
        self._project = where or os.environ.get("TRACKIO_PROJECT") or "healcore"
        self._users = self._run is not None
        self._events = EventTable()
        self._last = 0

    def start(self, run: TrackedRun) -> None:
        """Opens a run, unless there is one."""
        if not self._users:
            config = {"healcore": run.config}
            self._run = trackio.init(self._project, name=run.id, resume="allow", config=config)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Logs a row."""
        self._last = step
        self._run.log(values, step=step)

    def event(self, event: Mapping[str, Any]) -> None:
        """Adds it to the table, and alerts if a person should know."""
        self._events.add(event)
        if event["kind"] in SEVERE:
            levels = trackio.AlertLevel
            level = levels.ERROR if is_error(event) else levels.WARN
            self._run.alert(title_of(event), text_of(event), level, event["step"])

    def close(self) -> None:
        """Logs the table, and finishes a run of its own."""
        table = trackio.Table(columns=list(self._events.columns), data=self._events.rows)
        self._run.log({"heal/events": table}, step=self._last)
        if not self._users:
            self._run.finish()
