"""Delivers metrics and events to trackers in threads, so that trackers cannot delay the run."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from healcore.core.step_record import StepRecord
from healcore.events import fork_safety
from healcore.events.log import now
from healcore.runtime.trackers.selection import Selection
from healcore.runtime.trackers.tracker import TrackedRun, Tracker

MAX_WAIT = 10.0
"""Seconds for which the end of a run waits for its trackers."""
MAX_PENDING = 10_000
"""Limit of pending records of a tracker, above which metrics are dropped."""
_MORE_EVENTS = 1_000
"""Number of events accepted above `MAX_PENDING`, so that metrics cannot block events."""
_INTERVAL = 0.5
"""Seconds between two deliveries, because delivery at every step would compete for the GIL."""

_FIELDS = ("loss", "grad_norm", "threshold", "z", "z_loss", "grad_scale", "lr_scale", "skip")


class Trackers:
    """All trackers of a run. No method raises. Only `drain` and `close` wait for the trackers."""

    def __init__(self, selected: Iterable[Selection] = (), *, run: str = "") -> None:
        self._run = run
        self._deliveries: list[_Delivery] = []
        self._problems: list[str] = []
        self._config: dict[str, Any] = {}
        self._deadline: float | None = None
        """Value of `time.monotonic` at which waiting ends, or None before the first wait."""
        for selection in selected:
            try:
                self._deliveries.append(_Delivery(selection.name, selection.open()))
            except (Exception, SystemExit) as error:  # from the import or from the client
                self._problems.append(_failure(selection.name, error))
        fork_safety.watch(self)

    def __len__(self) -> int:
        return len(self._deliveries)

    def start(self, run: str) -> None:
        """Starts to deliver, also earlier records. `run` is the run's id in all processes."""
        for delivery in self._deliveries:
            delivery.start(TrackedRun(run, self._config))

    def metrics(self, step: int, record: StepRecord, fields: Mapping[str, Any]) -> None:
        """Sends the numbers of a step. `fields` are the fields of its line in the metrics file."""
        if not self._deliveries:
            return
        prefix = f"heal/{fields['engine']}/" if "engine" in fields else "heal/"
        values = {f"{prefix}{name}": float(fields[name]) for name in _FIELDS if name in fields}
        values[f"{prefix}cause"] = float(int(record.cause))
        values[f"{prefix}action"] = float(int(record.action))
        for delivery in self._deliveries:
            delivery.put(lambda tracker: tracker.metrics(step, dict(values)), MAX_PENDING)

    def event(self, kind: str, *, step: int | None, **fields: Any) -> None:
        """Sends an event."""
        if not self._deliveries:
            return
        present = {name: value for name, value in fields.items() if value is not None}
        event = {"kind": kind, "step": step, "run": self._run, "time": now(), **present}
        if kind == "start":
            self._config = present
        for delivery in self._deliveries:
            delivery.put(lambda tracker: tracker.event(dict(event)), MAX_PENDING + _MORE_EVENTS)

    def problems(self) -> list[str]:
        """Returns the failures since the last call. A tracker reports only its first failure."""
        problems, self._problems = self._problems, []
        for delivery in self._deliveries:
            problems += delivery.take_problems()
        return problems

    def drain(self) -> None:
        """Waits until all records sent so far are delivered, for at most `MAX_WAIT` seconds."""
        markers = [delivery.add_marker() for delivery in self._deliveries]
        for marker in markers:
            marker.wait(self._seconds_left())

    def leave(self) -> None:
        """Asks the threads to deliver the pending records and to end. Does not wait for them."""
        for delivery in self._deliveries:
            delivery.end()

    def close(self) -> list[str]:
        """Delivers the pending records, ends the trackers and returns a sentence about each loss.

        `drain` and `close` together wait for at most `MAX_WAIT` seconds.
        """
        self.leave()
        problems = self.problems()
        for delivery in self._deliveries:
            delivery.join(self._seconds_left())
            problems += [*delivery.take_problems(), *delivery.losses()]
        self._deliveries = []
        return problems

    def _seconds_left(self) -> float:
        """Returns the rest of `MAX_WAIT` seconds since the first call."""
        if self._deadline is None:
            self._deadline = time.monotonic() + MAX_WAIT
        return max(0.0, self._deadline - time.monotonic())

    def forked(self) -> None:
        """Drops the trackers in a forked child, because threads and run belong to the parent."""
        self._deliveries = []


class _Delivery:
    """One tracker, its queue and its thread.

    `store.background.Background` is unsuitable: it waits for its last job, and a tracker may hang.
    """

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._queue: deque[Callable[[Tracker], None] | threading.Event] = deque()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._ended = False
        self._broken = False
        """Whether the start of the tracker failed, so that it gets no records."""
        self._failed = self._dropped = 0
        """Records for which the tracker raised an error, and records above the queue's limit."""
        self._reported = False
        self._problems: deque[str] = deque()

    def start(self, run: TrackedRun) -> None:
        # A daemon, so that a hanging tracker does not keep the program alive.
        self._thread = threading.Thread(
            target=self._work, args=(run,), name=f"healcore-{self._name}", daemon=True
        )
        self._thread.start()

    def put(self, send: Callable[[Tracker], None], limit: int) -> None:
        if self._broken:
            self._failed += 1
        elif len(self._queue) < limit:
            self._queue.append(send)
        else:
            self._dropped += 1
            if self._dropped == 1:
                self._problems.append(
                    f"tracker {self._name} is slower than the run: records for it are dropped, "
                    "training continues"
                )

    def add_marker(self) -> threading.Event:
        """Returns an event that is set when all records sent so far are delivered."""
        done = threading.Event()
        if self._thread is None or not self._thread.is_alive():
            done.set()
        self._queue.append(done)
        self._wake.set()
        return done

    def end(self) -> None:
        self._ended = True
        self._wake.set()

    def join(self, seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(seconds)

    def take_problems(self) -> list[str]:
        return [self._problems.popleft() for _ in range(len(self._problems))]

    def losses(self) -> list[str]:
        """Returns sentences about records that were not delivered."""
        running = self._thread is not None and self._thread.is_alive()
        lost = self._failed + self._dropped + (len(self._queue) if running else 0)
        sentences = [f"tracker {self._name}: {lost} records were not delivered"] if lost else []
        if running:
            sentences.append(f"tracker {self._name} has not finished within {MAX_WAIT:g} s")
        return sentences

    # -- in the tracker's thread -----------------------------------------------------------------

    def _work(self, run: TrackedRun) -> None:
        self._broken = not self._call("start", run)
        while True:
            ended = self._ended
            for _ in range(len(self._queue)):
                self._deliver(self._queue.popleft())
            self._call("flush")
            if ended:
                break
            self._wake.wait(_INTERVAL)
            self._wake.clear()
        self._call("close")

    def _deliver(self, item: Callable[[Tracker], None] | threading.Event) -> None:
        if isinstance(item, threading.Event):
            item.set()
            return
        try:
            if self._broken:
                self._failed += 1
            else:
                item(self._tracker)
        except BaseException as error:  # some clients raise SystemExit
            self._failed += 1
            self._report(error)

    def _call(self, name: str, *args: Any) -> bool:
        """Calls an optional method of the tracker. Returns False if the method raises."""
        try:
            method = None if self._broken else getattr(self._tracker, name, None)
            if method is not None:
                method(*args)
        except BaseException as error:
            self._report(error)
            return False
        return True

    def _report(self, error: BaseException) -> None:
        if self._reported:
            return
        self._reported = True
        self._problems.append(_failure(self._name, error))


def _failure(name: str, error: BaseException) -> str:
    return f"tracker {name} fails, training continues: {type(error).__name__}: {error}"[:1000]
