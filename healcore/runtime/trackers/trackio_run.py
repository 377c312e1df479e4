"""Logs to Trackio: metrics, alerts, and a table of the events."""

from __future__ import annotations

import os
from typing import Any

import trackio
from trackio import context_vars

from healcore.runtime.trackers.tracker import EventTable, TrackedRun


class Client(EventTable):
    """Logs to the user's run, the active run or a new run, which a restarted program continues."""

    def __init__(self, where: str | None, user_run: Any) -> None:
        super().__init__()
        self._run: Any = user_run or (context_vars.current_run.get() if where is None else None)
        self._project = where or os.environ.get("TRACKIO_PROJECT") or "healcore"
        self._owned_by_user = self._run is not None
        self._last_step = 0

    def start(self, run: TrackedRun) -> None:
        """Creates or continues a run if needed."""
        if not self._owned_by_user:
            config = {"healcore": run.config}
            self._run = trackio.init(self._project, name=run.id, resume="allow", config=config)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Logs a row."""
        self._last_step = step
        self._run.log(values, step=step)

    def _alert(self, title: str, text: str, step: int | None, *, is_error: bool) -> None:
        levels = trackio.AlertLevel
        self._run.alert(title, text, levels.ERROR if is_error else levels.WARN, step)

    def close(self) -> None:
        """Logs the table of events, and finishes the run, except a run of the user."""
        table = trackio.Table(columns=self.columns, data=self._rows)
        self._run.log({"heal/events": table}, step=self._last_step)
        if not self._owned_by_user:
            self._run.finish()
