"""Logs to Weights & Biases: rows over `heal/step`, alerts, and a table of the events."""

from __future__ import annotations

from typing import Any

import wandb

from healcore.runtime.trackers.tracker import EventTable, TrackedRun

_SETTINGS: Any = {"console": "off"}
"""Settings of an own run, which does not record the program's standard output."""


class Client(EventTable):
    """Logs to the active run, else to an own run, which a restarted program continues.

    wandb refuses a decreasing step, so no step is passed: the axis is `heal/step`.
    """

    def __init__(self, where: str | None, own: Any) -> None:
        super().__init__()
        self._run: Any = own or (wandb.run if where is None else None)
        self._project = where
        self._users = self._run is not None

    def start(self, run: TrackedRun) -> None:
        """Opens an own run if needed, and declares the axis."""
        if not self._users:
            # In wandb an id is unique within a project, and "allow" makes or continues it.
            self._run = wandb.init(
                project=self._project,
                id=run.id,
                resume="allow",
                reinit="create_new",
                settings=_SETTINGS,
            )
        self._run.config.update({"healcore": run.config}, allow_val_change=True)
        self._run.define_metric("heal/step", hidden=True)
        self._run.define_metric("heal/*", step_metric="heal/step")

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Logs a row.

        In a run of the user the numbers join the row of the user's next `log`. A row of their own
        would increase wandb's step, and wandb would refuse `log(..., step=epoch)`.
        """
        self._run.log({"heal/step": step, **values}, commit=not self._users)

    def _alert(self, title: str, text: str, step: int | None, *, is_error: bool) -> None:
        self._run.alert(title, text, level="ERROR" if is_error else "WARN")

    def close(self) -> None:
        """Logs the table, and finishes an own run."""
        rows: Any = self._rows
        table = wandb.Table(columns=self.columns, data=rows)
        self._run.log({"heal/events": table}, commit=not self._users)
        if not self._users:
            self._run.finish()
