"""Delivers metrics and events to trackers in threads, so that trackers cannot delay the run."""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from healcore.core.step_record import StepRecord
from healcore.events.process import Process
from healcore.events.schema import ENVELOPE
from healcore.runtime.trackers.clients import TrackedRun
from healcore.runtime.trackers.tracker import Selection, Tracker

MAX_WAIT = 10.0
"""Seconds for which the end of a run waits for its trackers."""
MAX_PENDING = 10_000
"""Limit of pending records of a slow tracker, which then loses the oldest."""
_INTERVAL = 0.5
"""Seconds between two deliveries, because delivery at every step would compete for the GIL."""

_FIELDS = ("loss", "grad_norm", "threshold", "z", "z_loss", "grad_scale", "lr_scale", "skip")


class Trackers:
    """All trackers of a run. No method raises. Only `close` waits for the trackers."""

    def __init__(self, selected: Iterable[Selection] = ()) -> None:
        self._config: dict[str, Any] = {}
        self._deliveries = [_Delivery(selection) for selection in selected]

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
        return [each.problems.pop() for each in self._deliveries if each.problems]

    def leave(self) -> None:
        """Asks the threads to deliver the pending records and to end. Does not wait for them."""
        for delivery in self._deliveries:
            delivery.ended.set()

    def close(self) -> list[str]:
        """Delivers the pending records, for at most `MAX_WAIT` seconds. Returns the failures."""
        self.leave()
        deadline = time.monotonic() + MAX_WAIT
        for delivery in self._deliveries:
            if delivery.ident is not None:
                delivery.join(max(0.0, deadline - time.monotonic()))
        late = [each.name for each in self._deliveries if each.is_alive()]
        text = f"has not finished within {MAX_WAIT:g} s: it loses records"
        problems = [*self.problems(), *(f"{name} {text}" for name in late)]
        self._deliveries = []
        return problems

    def _send(self, method: str, *arguments: Any) -> None:
        for delivery in self._deliveries:
            delivery.queue.append((method, *map(copy.copy, arguments)))


class _Delivery(threading.Thread):
    """The thread of one tracker: a daemon, so that a hanging tracker does not keep the program."""

    def __init__(self, selection: Selection) -> None:
        super().__init__(name=f"tracker {selection.name}", daemon=True)
        self.ended = threading.Event()
        self.queue: deque[tuple[Any, ...]] = deque(maxlen=MAX_PENDING)
        """Calls: a method of the tracker, and its arguments."""
        self.problems: list[str] = []
        """The first failure, until it is reported."""
        self._failed = False
        self._tracker: Tracker | None = None
        """The tracker, or None if it cannot be opened or started."""
        try:
            self._tracker = selection.open()
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
