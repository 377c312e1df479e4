"""Selects trackers and delivers metrics and events to them in threads, without delaying the run."""

from __future__ import annotations

import copy
import importlib.util
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from healcore.adapter_registry import MissingExtraError
from healcore.core.step_record import StepRecord
from healcore.events.kinds import ENVELOPE, Trait, flags_text, has, sentence
from healcore.events.metrics import COMPARED, NUMBERS
from healcore.events.models import validate
from healcore.events.process import Process

MAX_WAIT = 10.0  # seconds for which the end of a run waits for its trackers
MAX_PENDING = 10_000  # limit of pending records of a slow tracker, which then loses the oldest
_INTERVAL = 0.5
"""Seconds between two deliveries, because delivery at every step would compete for the GIL."""

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

    All methods are called in one thread. An event may come before the numbers of its step. Methods
    may block or raise: the training continues, and healcore reports the first error. Optional
    methods: `start(run)` gets a `TrackedRun` and is called first, `flush()` twice a second,
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
Selection = tuple[str, Callable[[], Tracker]]
"""Name of a requested tracker, and a function that imports its library and creates it."""


def select(trackers: object) -> tuple[Selection, ...]:
    """Checks the argument `trackers` of a `Healer`, without importing a library.

    Args:
        trackers: None, a `Tracker`, a name such as "wandb", a name with a place such as
            "wandb:PROJECT" or "tensorboard:DIRECTORY", or a list of these.

    Returns:
        One selection for each tracker.

    Raises:
        ValueError: not a name, "name:place" or `Tracker`.
        MissingExtraError: the library of a name is not installed.
    """
    if trackers is None:
        return ()
    several = trackers if isinstance(trackers, list | tuple) else [trackers]
    return tuple(map(_select_one, several))


def _select_one(tracker: object) -> Selection:
    if isinstance(tracker, Tracker) and not isinstance(tracker, type):
        return type(tracker).__name__, lambda: tracker
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
    return name, lambda: CLIENTS[name](place or None)


class Trackers:
    """All trackers of a run.

    No method raises, and only `close` waits for the trackers: a slow or broken tracker must neither
    delay nor end the training. A daemon thread delivers, so that a hanging tracker does not keep
    the program:

        training thread:   metrics, event ──> queue     (at most 10,000 records)
        second thread:                        queue ──> each tracker     (twice a second)
    """

    def __init__(self, selected: Iterable[Selection] = ()) -> None:
        self._selected = tuple(selected)
        self._trackers: list[tuple[str, Tracker]] = []
        self._failed: set[str] = set()
        """Names of trackers whose first failure was logged."""
        self._queue: deque[tuple[Any, ...]] = deque(maxlen=MAX_PENDING)
        """Calls: a method of the trackers, and its arguments."""
        self._config: dict[str, Any] = {}
        self._warn: Callable[[str], object] = print
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._deliver, name="trackers", daemon=True)

    def start(self, run_id: str, warn: Callable[[str], None]) -> None:
        """Opens the trackers, and starts to deliver the records, also those before the call.

        They are opened in the thread of the loop, to which an active trackio run belongs.

        Args:
            run_id: id of the training run, the same in all its processes.
            warn: logs the first failure of a tracker.
        """
        self._warn = warn
        for name, make_tracker in self._selected:
            try:
                self._trackers.append((name, make_tracker()))
            except (Exception, SystemExit) as error:  # from the import or from the client
                self._fail(name, error)
        if self._trackers:
            self._queue.appendleft(("start", TrackedRun(run_id, self._config)))
            self._thread.start()

    def metrics(self, step: int, record: StepRecord, fields: Mapping[str, Any]) -> None:
        """Sends the numbers of a step.

        Args:
            step: index of the step in the run.
            record: the step as one engine judged it.
            fields: the fields of its line in the metrics file, from `MetricsLog.write`.
        """
        if not self._selected:
            return
        # With an engine the run has several optimizers.
        prefix = f"heal/{fields['engine']}/" if "engine" in fields else "heal/"
        numbers = {name: fields[name] for name in _FIELDS if name in fields}
        numbers |= {"cause": int(record.cause), "action": int(record.action)}
        values = {f"{prefix}{name}": float(number) for name, number in numbers.items()}
        self._queue.append(("metrics", step, values))

    def event(self, event: Mapping[str, Any]) -> None:
        """Sends an event. The fields of a `start` become the configuration of the run.

        Args:
            event: the event, from `Log.write`.
        """
        if event["kind"] == "start":
            omitted = (*ENVELOPE, *Process._fields)
            self._config = {name: value for name, value in event.items() if name not in omitted}
        if self._selected:
            self._queue.append(("event", event))

    def close(self) -> None:
        """Delivers the pending records, for at most `MAX_WAIT` seconds."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(MAX_WAIT)
        if self._thread.is_alive():
            names = ", ".join(name for name, _ in self._selected)
            self._warn(f"tracker {names} has not finished within {MAX_WAIT:g} s: it loses records")

    def _deliver(self) -> None:
        ended = False
        while not ended:
            ended = self._ended.wait(_INTERVAL)
            for _ in range(len(self._queue)):
                self._call(*self._queue.popleft())
            self._call("flush")
        self._call("close")

    def _call(self, method: str, *arguments: object) -> None:
        """Calls a method of each tracker that has it. A tracker that cannot start is dropped."""
        for name, tracker in [*self._trackers]:
            try:
                call = getattr(tracker, method, None)
                if call is not None:
                    call(*map(copy.copy, arguments))
            except BaseException as error:  # some clients raise SystemExit
                self._fail(name, error)
                if method == "start":
                    self._trackers.remove((name, tracker))

    def _fail(self, name: str, error: BaseException) -> None:
        """Logs the first failure of a tracker."""
        if name not in self._failed:
            self._failed.add(name)
            text = f"tracker {name} fails, training continues: {type(error).__name__}: {error}"
            self._warn(text[:1000])


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
    step = "" if event.get("step") is None else f" at step {event['step']}"
    text = filter(None, [sentence(validate(event)[0]), event.get("diagnosis")])
    return f"{event['kind']}{step}: {'. '.join(text)}"[:1000]


class _Wandb:
    """Metrics, and alerts for severe events.

    The x-axis is the metric `heal/step`, because wandb does not accept a decreasing `step`.
    """

    levels: Any = ("WARN", "ERROR")

    def __init__(self, project: str | None) -> None:
        import wandb

        self._library: Any = wandb
        self._run: Any = None
        if not project:
            self._run = wandb.run  # the user's active run, or None
        self._project = project
        self._is_new = self._run is None

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
        if has(kind, Trait.SEVERE) or "alert" in event:
            causes = flags_text(event.get("alert", event.get("cause", ())))
            title = ": ".join(filter(None, ["healcore", kind, causes]))
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
        self._run = None
        if not project:
            self._run = context_vars.current_run.get()  # the user's active run, or None
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


class _TensorBoard:
    """Scalars, and events as text, in a new event file per process; needs no torch."""

    def __init__(self, directory: str | None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.summary_v2 import text_pb

        # protobuf creates the classes at run time: unknown to type checkers
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._text = text_pb
        self._directory = directory

    def start(self, run: TrackedRun) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(self._directory or os.path.join("runs", run.id))
        self.flush = self._writer.flush
        self.close = self._writer.close

    def metrics(self, step: int, values: dict[str, float]) -> None:
        scalar = self._summaries.Summary.Value
        scalars = [scalar(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step, self._summaries.Summary(value=scalars))

    def event(self, event: Mapping[str, Any]) -> None:
        self._add(event["step"] or 0, self._text("heal/events", event_text(event)))

    def _add(self, step: int, summary: Any) -> None:
        event = self._events.Event(wall_time=time.time(), step=step, summary=summary)
        self._writer.add_event(event)


CLIENTS = {"wandb": _Wandb, "trackio": _Trackio, "tensorboard": _TensorBoard}
"""Name of a library -> class of its tracker."""
