"""Logs to Weights & Biases: metrics with `heal/step` as x-axis, alerts, and a table of events."""

from __future__ import annotations

from typing import Any

import wandb

from healcore.runtime.trackers.tracker import EventTable, TrackedRun

_SETTINGS: Any = {"console": "off"}
"""Settings of a new run: standard output is not recorded."""


class Client(EventTable):
    """Logs to the user's run, the active run or a new run, which a restarted program continues.

    The x-axis is the metric `heal/step`, because wandb does not accept a decreasing `step`.
    """

    def __init__(self, where: str | None, user_run: Any) -> None:
        super().__init__()
        self._run: Any = user_run or (wandb.run if where is None else None)
        self._project = where
        self._owned_by_user = self._run is not None

    def start(self, run: TrackedRun) -> None:
        """Creates or continues a run if needed, and declares the x-axis."""
        if not self._owned_by_user:
            # "allow" continues the run with this id in the project, or creates it.
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

        In the user's run, the numbers become part of the row of the user's next `log`. A separate
        row would increase wandb's step, and wandb would reject the user's `log(..., step=epoch)`.
        """
        self._run.log({"heal/step": step, **values}, commit=not self._owned_by_user)

    def _alert(self, title: str, text: str, step: int | None, *, is_error: bool) -> None:
        self._run.alert(title, text, level="ERROR" if is_error else "WARN")

    def close(self) -> None:
        """Logs the table of events, and finishes the run, except a run of the user."""
        table = wandb.Table(columns=self.columns, data=self._rows)
        self._run.log({"heal/events": table}, commit=not self._owned_by_user)
        if not self._owned_by_user:
            self._run.finish()
