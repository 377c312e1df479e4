"""Logs to Weights & Biases, Trackio and MLflow.

Each client logs to the user's active run, or to a new run that a restarted program continues.
Arguments of the constructors: project or experiment, or None for the active run or a default.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from healcore.runtime.trackers.tracker import TrackedRun, alert_of, event_text


class _Wandb:
    """Metrics, and alerts for severe events.

    The x-axis is the metric `heal/step`, because wandb does not accept a decreasing `step`.
    """

    def __init__(self, project: str | None) -> None:
        import wandb

        self._wandb: Any = wandb
        self._run: Any = None if project else wandb.run
        self._project, self._is_new = project, self._run is None

    def start(self, run: TrackedRun) -> None:
        if self._is_new:
            self._run = self._wandb.init(
                project=self._project,
                id=run.id,
                resume="allow",  # continues the run with this id in the project, or creates it
                reinit="create_new",
                settings={"console": "off"},  # standard output is not recorded
            )
        self._run.config.update({"healcore": run.config}, allow_val_change=True)
        self._run.define_metric("heal/step", hidden=True)
        self._run.define_metric("heal/*", step_metric="heal/step")

    def metrics(self, step: int, values: dict[str, float]) -> None:
        # In the user's run, the numbers become part of the row of the user's next `log`. A separate
        # row would increase wandb's step, and wandb would reject the user's `log(..., step=epoch)`.
        self._run.log({"heal/step": step, **values}, commit=self._is_new)

    def event(self, event: Mapping[str, Any]) -> None:
        if alert := alert_of(event):
            title, text, is_error = alert
            self._run.alert(title, text, level="ERROR" if is_error else "WARN")

    def close(self) -> None:
        if self._is_new:
            self._run.finish()


class _Trackio:
    """Metrics, and alerts for severe events."""

    def __init__(self, project: str | None) -> None:
        import trackio
        from trackio import context_vars

        self._trackio: Any = trackio
        self._run: Any = None if project else context_vars.current_run.get()
        self._project = project or os.environ.get("TRACKIO_PROJECT") or "healcore"
        self._is_new = self._run is None

    def start(self, run: TrackedRun) -> None:
        if self._is_new:
            config = {"healcore": run.config}
            self._run = self._trackio.init(
                self._project, name=run.id, resume="allow", config=config
            )

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def event(self, event: Mapping[str, Any]) -> None:
        if alert := alert_of(event):
            title, text, is_error = alert
            levels = self._trackio.AlertLevel
            self._run.alert(title, text, levels.ERROR if is_error else levels.WARN, event["step"])

    def close(self) -> None:
        if self._is_new:
            self._run.finish()


class _MLflow:
    """Metrics in batches, and as tags the policy and the newest event of each kind."""

    def __init__(self, experiment: str | None) -> None:
        import mlflow

        active = None if experiment else mlflow.active_run()
        self._mlflow: Any = mlflow
        self._client = mlflow.MlflowClient()
        self._id: str = active.info.run_id if active else ""
        self._is_new = active is None
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "healcore"
        self._metrics: list[Any] = []
        self._status = "KILLED"

    def start(self, run: TrackedRun) -> None:
        client, tag = self._client, "healcore.run"
        if self._is_new:
            known = client.get_experiment_by_name(self._experiment)
            id = known.experiment_id if known else client.create_experiment(self._experiment)
            earlier = client.search_runs([id], f"tags.`{tag}` = '{run.id}'")
            continued = earlier[0] if earlier else client.create_run(id, run_name=run.id)
            self._id = continued.info.run_id
            client.update_run(self._id, "RUNNING")
        client.set_tag(self._id, tag, run.id)
        for name, value in run.config.items():
            client.set_tag(self._id, f"healcore.{name}", str(value)[:5000])

    def metrics(self, step: int, values: dict[str, float]) -> None:
        now, metric = int(time.time() * 1000), self._mlflow.entities.Metric
        self._metrics += [metric(name, value, now, step) for name, value in values.items()]

    def event(self, event: Mapping[str, Any]) -> None:
        self._client.set_tag(self._id, f"healcore.event.{event['kind']}", event_text(event))
        if event["kind"] == "end":
            self._status = "FINISHED" if event["ending"] == "completed" else "FAILED"

    def flush(self) -> None:
        pending, self._metrics = self._metrics, []
        for first in range(0, len(pending), 1000):  # the limit of a request
            batch = pending[first : first + 1000]
            self._client.log_batch(self._id, metrics=batch, synchronous=True)

    def close(self) -> None:
        if self._is_new:
            self._client.set_terminated(self._id, self._status)


CLIENTS = {"wandb": _Wandb, "trackio": _Trackio, "mlflow": _MLflow}
"""Name of a library -> class of its tracker."""
