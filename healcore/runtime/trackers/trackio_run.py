"""Logs to Trackio: metrics and alerts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import trackio
from trackio import context_vars

from healcore.runtime.trackers.tracker import TrackedRun, alert_of


class Client:
    """Logs to the active run or a new run, which a restarted program continues."""

    def __init__(self, project: str | None) -> None:
        self._run: Any = None if project else context_vars.current_run.get()
        self._project = project or os.environ.get("TRACKIO_PROJECT") or "healcore"
        self._is_new = self._run is None

    def start(self, run: TrackedRun) -> None:
        """Creates or continues a run if needed."""
        if self._is_new:
            config = {"healcore": run.config}
            self._run = trackio.init(self._project, name=run.id, resume="allow", config=config)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Logs a row."""
        self._run.log(values, step=step)

    def event(self, event: Mapping[str, Any]) -> None:
        """Sends an alert for a severe event."""
        if alert := alert_of(event):
            level = trackio.AlertLevel.ERROR if alert.is_error else trackio.AlertLevel.WARN
            self._run.alert(alert.title, alert.text, level, event["step"])

    def close(self) -> None:
        """Finishes the run, except a run of the user."""
        if self._is_new:
            self._run.finish()
