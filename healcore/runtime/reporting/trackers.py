"""Selects trackers, and passes metrics and events of a run to them."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from healcore.adapter_registry import MissingExtraError
from healcore.core.step_record import StepRecord
from healcore.events.kinds import ENVELOPE, Trait, flags_text, has, sentence
from healcore.events.metrics import COMPARED, NUMBERS
from healcore.events.models import validate
from healcore.events.process import Process

_FIELDS = ("loss", "grad_norm", *NUMBERS, "skip", *COMPARED)


@runtime_checkable
class Tracker(Protocol):
    """Receiver of metrics and events, for `Healer(trackers=...)`.

        class Printer:
            def metrics(self, step, values):
                print(step, values)

            def event(self, event):
                print(event["kind"])

        Healer(..., trackers=Printer())

    The methods are called in the loop, so a slow service needs a thread of its own, as the clients
    of W&B, trackio and TensorBoard have. Methods may raise: the training continues, and healcore
    reports the first error. Optional methods: `start(run)` gets a `TrackedRun` and is called first,
    `close()` at the end of the run.
    """

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Receives the numbers of one optimizer step.

        Args:
            step: index of the step, from 0. Decreases after a rollback or a restart.
            values: name -> number, which may be NaN or Inf. docs/reports.md lists the names.
        """
        ...

    def event(self, event: Mapping[str, Any]) -> None:
        """Receives an event: `kind`, `step`, `time`, `run`, and the fields in docs/events.md."""
        ...


TrackersLike: TypeAlias = str | Tracker | Sequence[str | Tracker] | None
"""The `trackers` argument of a Healer: names such as "wandb:PROJECT", and objects, or None."""


def select(trackers: object) -> tuple[Any, ...]:
    """Checks the argument `trackers` of a `Healer`, without importing a library.

    Args:
        trackers: None, a `Tracker`, a name such as "wandb", a name with a place such as
            "wandb:PROJECT" or "tensorboard:DIRECTORY", or a list of these.

    Returns:
        The trackers. Those of a library import it in their `start`.

    Raises:
        ValueError: not a name, "name:place" or `Tracker`.
        MissingExtraError: the library of a name is not installed.
    """
    if trackers is None:
        return ()
    if not isinstance(trackers, list | tuple):
        trackers = [trackers]
    return tuple(map(_select_one, trackers))


def _select_one(tracker: object) -> Any:
    if isinstance(tracker, Tracker) and not isinstance(tracker, type):
        return tracker
    name = colon = place = ""
    if isinstance(tracker, str):
        name, colon, place = tracker.partition(":")
    if name not in CLIENTS or (colon and not place):
        raise ValueError(
            f'trackers must be {", ".join(CLIENTS)}, a name with a project ("wandb:PROJECT"), or '
            f"objects with the methods metrics(step, values) and event(event), got {tracker!r}"
        )
    if importlib.util.find_spec(name) is None:
        message = f'trackers="{name}" needs {name}, not installed in this environment. '
        raise MissingExtraError(f"{message}Write: pip install {name}", name=name)
    return CLIENTS[name](place or None)


class Trackers:
    """All trackers of a run. No method raises: a broken tracker must not end the training.

    Args:
        trackers: the result of `select`.
    """

    def __init__(self, trackers: Sequence[Any] = ()) -> None:
        self._trackers = trackers
        self._open: list[Any] = []
        self._early: list[Mapping[str, Any]] = []
        """Events before `start`."""
        self._failed: set[str] = set()
        """Names of trackers whose first failure was logged."""
        self._warn: Callable[[str], object] = print

    def start(self, run_id: str, warn: Callable[[str], None]) -> None:
        """Opens the trackers, and sends the events up to now.

        Args:
            run_id: id of the training run, the same in all its processes.
            warn: logs the first failure of a tracker.
        """
        self._warn = warn
        omitted = (*ENVELOPE, *Process._fields)
        config: dict[str, Any] = {}
        if self._early:
            for name, value in self._early[0].items():
                if name not in omitted:
                    config[name] = value
        for tracker in self._trackers:
            if self._call(tracker, "start", TrackedRun(run_id, config)):
                self._open.append(tracker)
        for event in self._early:
            self._call_all("event", event)

    def metrics(self, step: int, record: StepRecord, fields: Mapping[str, Any]) -> None:
        """Sends the numbers of a step.

        Args:
            step: index of the step in the run.
            record: the step as one engine judged it.
            fields: the fields of its line in the metrics file, from `MetricsLog.write`.
        """
        prefix = "heal/"
        if "engine" in fields:  # the run has several optimizers
            prefix = f"heal/{fields['engine']}/"
        numbers = {name: fields[name] for name in _FIELDS if name in fields}
        numbers |= {"cause": int(record.cause), "action": int(record.action)}
        values = {f"{prefix}{name}": float(number) for name, number in numbers.items()}
        self._call_all("metrics", step, values)

    def event(self, event: dict[str, Any]) -> None:
        """Sends an event, from `Log.write`. The first one, `start`, is the run's configuration."""
        if self._open:
            self._call_all("event", event)
        elif self._trackers:
            self._early.append(event)

    def close(self) -> None:
        """Closes the trackers."""
        self._call_all("close")

    def _call_all(self, method: str, *arguments: object) -> None:
        for tracker in self._open:
            self._call(tracker, method, *arguments)

    def _call(self, tracker: Any, method: str, *arguments: object) -> bool:
        """Calls a method that the tracker may have. Logs the tracker's first failure.

        Returns:
            Whether the call succeeded.
        """
        try:
            if hasattr(tracker, method):
                getattr(tracker, method)(*arguments)
        except (Exception, SystemExit) as error:  # some clients raise SystemExit
            name = type(tracker).__name__.strip("_")
            if name not in self._failed:
                self._failed.add(name)
                text = f"tracker {name} fails, training continues: {type(error).__name__}: {error}"
                self._warn(text[:1000])
            return False
        return True


class TrackedRun(NamedTuple):
    """The identity and the configuration of a run, for its trackers."""

    id: str
    """Id of the run, the same in all processes and after a resume."""
    config: dict[str, Any]
    """Fields of the event `start`, such as policy, mode and framework."""


def event_text(event: Mapping[str, Any]) -> str:
    """Writes one line about an event: its kind, its step and its sentence.

    At most 1,000 characters, because a sentence may quote a long error.

    Args:
        event: the event, from `Log.write`.
    """
    step = ""
    if event.get("step") is not None:
        step = f" at step {event['step']}"
    text = filter(None, [sentence(validate(event)[0]), event.get("diagnosis")])
    return f"{event['kind']}{step}: {'. '.join(text)}"[:1000]


class _Wandb:
    """Metrics, and alerts for severe events.

    The x-axis is the metric `heal/step`, because wandb does not accept a decreasing `step`.
    """

    def __init__(self, project: str | None) -> None:
        self._project = project

    def start(self, run: TrackedRun) -> None:
        import wandb

        self._levels: Any = ("WARN", "ERROR")
        self._run: Any = None
        if not self._project:
            self._run = wandb.run  # the user's active run, or None
        self._is_new = self._run is None
        if self._is_new:
            self._run = wandb.init(
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
        if has(kind, Trait.SEVERE) or "alert" in event:
            causes = flags_text(event.get("alert", event.get("cause", ())))
            title = ": ".join(filter(None, ["healcore", kind, causes]))
            is_error = kind == "stop" or event.get("severity") == "error"
            self._run.alert(title, event_text(event), self._levels[is_error])

    def close(self) -> None:
        if self._is_new:
            self._run.finish()


class _Trackio(_Wandb):
    def start(self, run: TrackedRun) -> None:
        import trackio
        from trackio import context_vars

        self._levels = (trackio.AlertLevel.WARN, trackio.AlertLevel.ERROR)
        self._run = None
        if not self._project:
            self._run = context_vars.current_run.get()
        self._is_new = self._run is None
        if self._is_new:
            project = self._project or os.environ.get("TRACKIO_PROJECT") or "healcore"
            config = {"healcore": run.config}
            init = partial(trackio.init, project, name=run.id, resume="allow", config=config)
            self._run = copy_context().run(init)  # it is not the program's active run

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)


class _TensorBoard:
    """Scalars, and events as text, in a new event file per process; needs no torch."""

    def __init__(self, directory: str | None) -> None:
        self._directory = directory

    def start(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        # protobuf creates the classes at run time: unknown to type checkers
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._text = text_pb
        directory = self._directory or os.path.join("runs", run.id)
        self._writer = EventFileWriter(directory, flush_secs=1)
        self.close = self._writer.close

    def metrics(self, step: int, values: dict[str, float]) -> None:
        value = self._summaries.Summary.Value
        scalars = [value(tag=name, simple_value=number) for name, number in values.items()]
        self._add(step, self._summaries.Summary(value=scalars))

    def event(self, event: Mapping[str, Any]) -> None:
        self._add(event["step"] or 0, self._text("heal/events", event_text(event)))

    def _add(self, step: int, summary: Any) -> None:
        event = self._events.Event(wall_time=time.time(), step=step, summary=summary)
        self._writer.add_event(event)


CLIENTS = {"wandb": _Wandb, "trackio": _Trackio, "tensorboard": _TensorBoard}
"""Name of a library -> class of its tracker."""
