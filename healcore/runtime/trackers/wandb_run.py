"""Logs to Weights & Biases: metrics with `heal/step` as x-axis, and alerts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import wandb

from healcore.runtime.trackers.tracker import TrackedRun, alert_of


class Client:
    """Logs to the active run or a new run, which a restarted program continues.

    The x-axis is the metric `heal/step`, because wandb does not accept a decreasing `step`.
    """

    def __init__(self, project: str | None) -> None:
        self._run: Any = None if project else wandb.run
        self._project, self._is_new = project, self._run is None

    def start(self, run: TrackedRun) -> None:
        """Creates or continues a run if needed, and declares the x-axis."""
        if self._is_new:
            quiet: Any = {"console": "off"}  # standard output is not recorded
            # "allow" continues the run with this id in the project, or creates it.
            self._run = wandb.init(
                project=self._project,
                id=run.id,
                resume="allow",
                reinit="create_new",
                settings=quiet,
            )
        self._run.config.update({"healcore": run.config}, allow_val_change=True)
        self._run.define_metric("heal/step", hidden=True)
        self._run.define_metric("heal/*", step_metric="heal/step")

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Logs a row.

        In the user's run, the numbers become part of the row of the user's next `log`. A separate
        row would increase wandb's step, and wandb would reject the user's `log(..., step=epoch)`.
        """
        self._run.log({"heal/step": step, **values}, commit=self._is_new)

    def event(self, event: Mapping[str, Any]) -> None:
        """Sends an alert for a severe event."""
        if alert := alert_of(event):
            self._run.alert(alert.title, alert.text, level="ERROR" if alert.is_error else "WARN")

    def close(self) -> None:
        """Finishes the run, except a run of the user."""
        if self._is_new:
            self._run.finish()
