"""Logs to MLflow: metrics in batches; the policy and the newest event of each kind as tags."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import mlflow
from mlflow.entities import Metric, RunStatus

from healcore.runtime.trackers.tracker import TrackedRun, text_of

_ID_TAG = "healcore.run"
_PER_REQUEST = 1000
"""MLflow's limit of metrics in one request."""


class Client:
    """Logs to the active run, else to an own run, which a restarted program continues."""

    def __init__(self, where: str | None, own: Any) -> None:
        run = own or (mlflow.active_run() if where is None else None)
        self._client = mlflow.MlflowClient()
        self._users = run is not None
        self._run_id: str = "" if run is None else run.info.run_id
        self._experiment = where or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "healcore"
        self._metrics: list[Metric] = []
        self._status = RunStatus.KILLED

    def start(self, run: TrackedRun) -> None:
        """Opens an own run if needed, and tags the run."""
        if not self._users:
            self._run_id = self._earlier(run.id) or self._new(run.id)
            self._client.update_run(self._run_id, RunStatus.to_string(RunStatus.RUNNING))
        self._client.set_tag(self._run_id, _ID_TAG, run.id)
        for name, value in run.config.items():
            self._client.set_tag(self._run_id, f"healcore.{name}", str(value)[:5000])

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Buffers the numbers: a request per step would be a round trip per step."""
        at = int(time.time() * 1000)
        self._metrics += [Metric(name, value, at, step) for name, value in values.items()]

    def event(self, event: Mapping[str, Any]) -> None:
        """Sets the tag of the event's kind."""
        self._client.set_tag(self._run_id, f"healcore.event.{event['kind']}", text_of(event))
        if event["kind"] == "end":
            completed = event["ending"] == "completed"
            self._status = RunStatus.FINISHED if completed else RunStatus.FAILED

    def flush(self) -> None:
        """Sends the numbers."""
        waiting, self._metrics = self._metrics, []
        for first in range(0, len(waiting), _PER_REQUEST):
            batch = waiting[first : first + _PER_REQUEST]
            self._client.log_batch(self._run_id, metrics=batch, synchronous=True)

    def close(self) -> None:
        """Ends an own run."""
        if not self._users:
            self._client.set_terminated(self._run_id, RunStatus.to_string(self._status))

    def _earlier(self, run: str) -> str | None:
        """The run of an earlier process of the same healcore run."""
        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            return None
        runs = self._client.search_runs([found.experiment_id], f"tags.`{_ID_TAG}` = '{run}'")
        return runs[0].info.run_id if runs else None

    def _new(self, name: str) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = (
            self._client.create_experiment(self._experiment)
            if found is None
            else found.experiment_id
        )
        return self._client.create_run(experiment, run_name=name).info.run_id
