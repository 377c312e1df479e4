"""Logs to MLflow: metrics in batches, the policy and the newest event of each kind as tags."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import mlflow
from mlflow.entities import Metric

from healcore.runtime.trackers.tracker import TrackedRun, event_text

_ID_TAG = "healcore.run"
_MAX_METRICS = 1000
"""MLflow's limit of metrics in one request."""


class Client:
    """Logs to the active run or a new run, which a restarted program continues."""

    def __init__(self, experiment: str | None) -> None:
        active = None if experiment else mlflow.active_run()
        self._client = mlflow.MlflowClient()
        self._id: str = active.info.run_id if active else ""
        self._is_new = active is None
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "healcore"
        self._metrics: list[Metric] = []
        self._status = "KILLED"

    def start(self, run: TrackedRun) -> None:
        """Creates or continues a run if needed, and tags the run."""
        if self._is_new:
            known = self._client.get_experiment_by_name(self._experiment)
            id = known.experiment_id if known else self._client.create_experiment(self._experiment)
            earlier = self._client.search_runs([id], f"tags.`{_ID_TAG}` = '{run.id}'")
            continued = earlier[0] if earlier else self._client.create_run(id, run_name=run.id)
            self._id = continued.info.run_id
            self._client.update_run(self._id, "RUNNING")
        self._client.set_tag(self._id, _ID_TAG, run.id)
        for name, value in run.config.items():
            self._client.set_tag(self._id, f"healcore.{name}", str(value)[:5000])

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Buffers the numbers, because a request takes a network round trip."""
        now = int(time.time() * 1000)
        self._metrics += [Metric(name, value, now, step) for name, value in values.items()]

    def event(self, event: Mapping[str, Any]) -> None:
        """Sets the tag of the event's kind."""
        self._client.set_tag(self._id, f"healcore.event.{event['kind']}", event_text(event))
        if event["kind"] == "end":
            self._status = "FINISHED" if event["ending"] == "completed" else "FAILED"

    def flush(self) -> None:
        """Sends the buffered numbers."""
        pending, self._metrics = self._metrics, []
        for first in range(0, len(pending), _MAX_METRICS):
            batch = pending[first : first + _MAX_METRICS]
            self._client.log_batch(self._id, metrics=batch, synchronous=True)

    def close(self) -> None:
        """Ends the run, except a run of the user."""
        if self._is_new:
            self._client.set_terminated(self._id, self._status)
