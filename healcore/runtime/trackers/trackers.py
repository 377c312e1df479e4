"""Selects trackers and delivers metrics and events to them in threads, without delaying the run."""

from __future__ import annotations

import copy
import importlib.util
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from healcore.core.step_record import StepRecord
from healcore.events.metrics import COMPARED
from healcore.events.process import Process
from healcore.events.schema import ENVELOPE
from healcore.extras import MissingExtraError
from healcore.runtime.trackers.clients import CLIENTS, TrackedRun

MAX_WAIT = 10.0  # seconds for which the end of a run waits for its trackers
MAX_PENDING = 10_000  # limit of pending records of a slow tracker, which then loses the oldest
_INTERVAL = 0.5
"""Seconds between two deliveries, because delivery at every step would compete for the GIL."""

_FIELDS = (
    *("loss", "grad_norm", "threshold", "z", "z_loss", "grad_scale", "lr_scale", "skip"),
    *COMPARED,
)


@runtime_checkable
class Tracker(Protocol):
    """Receiver of metrics and events, for `Healer(trackers=...)`.

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


Selection = tuple[str, Callable[[], Tracker]]
"""Name of a requested tracker, and a function that imports its library and creates it."""


def select(trackers: Any) -> tuple[Selection, ...]:
    """Checks the argument `trackers`, without importing a library.

    Raises:
        ValueError: not a name, "name:place" or `Tracker`.
        MissingExtraError: the library of a name is not installed.
    """
    several = trackers if isinstance(trackers, list | tuple) else (trackers,)
    return () if trackers is None else tuple(map(_select_one, several))


def _select_one(tracker: Any) -> Selection:
    if isinstance(tracker, Tracker) and not isinstance(tracker, type):
        return type(tracker).__name__, lambda: tracker
    name, colon, place = tracker.partition(":") if isinstance(tracker, str) else ("", "", "")
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
    """All trackers of a run. No method raises. Only `close` waits for the trackers."""

    def __init__(self, selected: Iterable[Selection] = ()) -> None:
        self._config: dict[str, Any] = {}
        self._deliveries = [_Delivery(*selection) for selection in selected]

    def start(self, run: str) -> None:
        """Starts to deliver, also earlier records. `run` is the run's id in all processes."""
        for delivery in self._deliveries:
            delivery.queue.appendleft(("start", TrackedRun(run, self._config)))
            delivery.start()

    def metrics(self, step: int, record: StepRecord, fields: Mapping[str, Any]) -> None:
        """Sends the numbers of a step. `fields` are the fields of its line in the metrics file."""
        prefix = f"heal/{fields['engine']}/" if "engine" in fields else "heal/"
        values = {f"{prefix}{name}": float(fields[name]) for name in _FIELDS if name in fields}
        values[f"{prefix}cause"] = float(int(record.cause))
        values[f"{prefix}action"] = float(int(record.action))
        self._send("metrics", step, values)

    def event(self, event: Mapping[str, Any]) -> None:
        """Sends an event."""
        if event["kind"] == "start":
            omitted = (*ENVELOPE, *Process._fields)
            self._config = {name: event[name] for name in event if name not in omitted}
        self._send("event", event)

    def problems(self) -> list[str]:
        """Returns the failures since the last call. A tracker reports only its first failure."""
        return [each.problems.popleft() for each in self._deliveries for _ in tuple(each.problems)]

    def close(self) -> list[str]:
        """Delivers the pending records, for at most `MAX_WAIT` seconds. Returns the failures."""
        for delivery in self._deliveries:
            delivery.ended.set()
        deadline, late = time.monotonic() + MAX_WAIT, f"within {MAX_WAIT:g} s: it loses records"
        for delivery in self._deliveries:
            if delivery.ident is not None:
                delivery.join(max(0.0, deadline - time.monotonic()))
            if delivery.is_alive():
                delivery.problems.append(f"{delivery.name} has not finished {late}")
        problems, self._deliveries = self.problems(), []
        return problems

    def _send(self, method: str, *arguments: Any) -> None:
        for delivery in self._deliveries:
            delivery.queue.append((method, *map(copy.copy, arguments)))


class _Delivery(threading.Thread):
    """The thread of one tracker: a daemon, so that a hanging tracker does not keep the program."""

    def __init__(self, name: str, open_tracker: Callable[[], Tracker]) -> None:
        super().__init__(name=f"tracker {name}", daemon=True)
        self.ended = threading.Event()
        self.queue: deque[tuple[Any, ...]] = deque(maxlen=MAX_PENDING)
        """Calls: a method of the tracker, and its arguments."""
        self.problems: deque[str] = deque()
        """Failures that are not reported yet."""
        self._failed = False
        self._tracker: Tracker | None = None
        """The tracker, or None if it cannot be opened or started."""
        try:  # in the thread of the loop, to which active runs of mlflow and trackio belong
            self._tracker = open_tracker()
        except (Exception, SystemExit) as error:  # from the import or from the client
            self._fail(error)

    def run(self) -> None:
        ended = False
        while not ended:
            ended = self.ended.wait(_INTERVAL)
            for _ in range(len(self.queue)):
                self._call(*self.queue.popleft())
            self._call("flush")
        self._call("close")

    def _call(self, method: str, *args: Any) -> None:
        try:
            if (call := getattr(self._tracker, method, None)) is not None:
                call(*args)
        except BaseException as error:  # some clients raise SystemExit
            self._fail(error)
            if method == "start":
                self._tracker = None

    def _fail(self, error: BaseException) -> None:
        if not self._failed:
            self._failed = True
            why = f"{self.name} fails, training continues: {type(error).__name__}: {error}"
            self.problems.append(why[:1000])
