"""Logs to Weights & Biases, Trackio, MLflow and TensorBoard.

Each client logs to the user's active run, or to a new run that a restarted program continues.
The argument of a constructor is a project, experiment or directory, or None.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from healcore.events.models import validate
from healcore.events.schema import Trait, flag_names, has, sentence

_MAX_CHARACTERS = 1000
"""Limit of the text of an event, because trackers have limits (mlflow: 5,000 in a tag)."""


class TrackedRun(NamedTuple):
    """The identity and the configuration of a run, for its trackers."""

    id: str  # id of the run, the same in all processes and after a resume
    config: dict[str, Any]  # fields of the event `start`, such as policy, mode and framework


def event_text(event: Mapping[str, Any]) -> str:
    """Returns one line about an event."""
    step = event.get("step")
    head = event["kind"] if step is None else f"{event['kind']} at step {step}"
    text = sentence(validate(event)[0])
    return f"{head}: {text}"[:_MAX_CHARACTERS] if text else head


class _Wandb:
    """Metrics, and alerts for severe events.

    The x-axis is the metric `heal/step`, because wandb does not accept a decreasing `step`.
    """

    levels: Any = ("WARN", "ERROR")

    def __init__(self, project: str | None) -> None:
        import wandb

        self._library: Any = wandb
        self._run: Any = None if project else wandb.run
        self._project, self._is_new = project, self._run is None

    def start(self, run: TrackedRun) -> None:
        if self._is_new:
            self._run = self._library.init(
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
        kind = event["kind"]
        if has(kind, Trait.SEVERE):
            causes = flag_names(event.get("cause", ()))
            title = f"healcore: {kind}{f': {causes}' if causes else ''}"
            is_error = kind == "stop" or event.get("severity") == "error"
            self._run.alert(title, event_text(event), self.levels[is_error])

    def close(self) -> None:
        if self._is_new:
            self._run.finish()


class _Trackio(_Wandb):
    def __init__(self, project: str | None) -> None:
        import trackio
        from trackio import context_vars

        self._library = trackio
        self.levels = (trackio.AlertLevel.WARN, trackio.AlertLevel.ERROR)
        self._run = None if project else context_vars.current_run.get()
        self._project = project or os.environ.get("TRACKIO_PROJECT") or "healcore"
        self._is_new = self._run is None

    def start(self, run: TrackedRun) -> None:
        if self._is_new:
            config = {"healcore": run.config}
            self._run = self._library.init(
                self._project, name=run.id, resume="allow", config=config
            )

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)


class _MLflow:
    """Metrics in batches, and as tags the policy and the newest event of each kind."""

    def __init__(self, experiment: str | None) -> None:
        import mlflow
        from mlflow.entities import Metric

        active = None if experiment else mlflow.active_run()
        self._metric: Any = Metric
        self._client = mlflow.MlflowClient()
        self._id: str = active.info.run_id if active else ""
        self._is_new = active is None
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "healcore"
        self._pending: list[Any] = []
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
        now = int(time.time() * 1000)
        self._pending += [self._metric(name, value, now, step) for name, value in values.items()]

    def event(self, event: Mapping[str, Any]) -> None:
        self._client.set_tag(self._id, f"healcore.event.{event['kind']}", event_text(event))
        if event["kind"] == "end":
            self._status = "FINISHED" if event["ending"] == "completed" else "FAILED"

    def flush(self) -> None:
        pending, self._pending = self._pending, []
        for first in range(0, len(pending), 1000):  # the limit of a request
            batch = pending[first : first + 1000]
            self._client.log_batch(self._id, metrics=batch, synchronous=True)

    def close(self) -> None:
        if self._is_new:
            self._client.set_terminated(self._id, self._status)


class _TensorBoard:
    """Scalars, and events as text, in a new event file per process; needs no torch."""

    def __init__(self, directory: str | None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.summary_v2 import text_pb

        # protobuf creates the classes at run time: unknown to type checkers
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._text, self._directory, self._last_step = text_pb, directory, -1

    def start(self, run: TrackedRun) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(self._directory or os.path.join("runs", run.id))
        self.flush, self.close = self._writer.flush, self._writer.close
        policy = run.config.get("policy_toml", run.config["policy"])
        self._add(0, summary=self._text("heal/policy", f"```\n{policy}\n```"))

    def metrics(self, step: int, values: dict[str, float]) -> None:
        if step < self._last_step:  # TensorBoard hides the rows that a rollback has undone
            start = self._events.SessionLog.START
            self._add(step, session_log=self._events.SessionLog(status=start))
        self._last_step = step
        scalar = self._summaries.Summary.Value
        scalars = [scalar(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step, summary=self._summaries.Summary(value=scalars))

    def event(self, event: Mapping[str, Any]) -> None:
        self._add(event["step"] or 0, summary=self._text("heal/events", event_text(event)))

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))


CLIENTS = {"wandb": _Wandb, "trackio": _Trackio, "mlflow": _MLflow, "tensorboard": _TensorBoard}
"""Name of a library -> class of its tracker."""
