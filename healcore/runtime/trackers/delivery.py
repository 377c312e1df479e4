"""Delivers metrics and events to trackers in threads, so that they cannot delay the training."""

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
MOST = 10_000
"""Most records that wait for a tracker; more are dropped."""
_EVENTS = 1_000
"""Further places in the queue for events, so that metrics cannot fill the queue."""
_SECONDS = 0.5
"""Time between two deliveries: a thread that wakes at every step takes the GIL at every step."""

_VALUES = ("loss", "grad_norm", "threshold", "z", "z_loss", "grad_scale", "lr_scale", "skip")


class Trackers:
    """All trackers of a run. No method raises. Only `drain` and `close` wait."""

    def __init__(self, selected: Iterable[Selection] = (), *, run: str = "") -> None:
        self._run = run
        self._deliveries: list[_Delivery] = []
        self._problems: list[str] = []
        self._config: dict[str, Any] = {}
        self._waits_until: float | None = None
        for each in selected:
            try:
                self._deliveries.append(_Delivery(each.name, each.open()))
            except (Exception, SystemExit) as error:  # also from the import of its library
                self._problems.append(_failure(each.name, error))
        fork_safety.watch(self)

    def __len__(self) -> int:
        return len(self._deliveries)

    def start(self, run: str) -> None:
        """Begins to deliver, also earlier records. `run` is an id for all its processes."""
        for each in self._deliveries:
            each.start(TrackedRun(run, self._config))

    def metrics(self, step: int, record: StepRecord, fields: Mapping[str, Any]) -> None:
        """Sends a step; `fields` is its line in the metrics file."""
        if not self._deliveries:
            return
        prefix = f"heal/{fields['engine']}/" if "engine" in fields else "heal/"
        values = {f"{prefix}{name}": float(fields[name]) for name in _VALUES if name in fields}
        values[f"{prefix}cause"] = float(int(record.cause))
        values[f"{prefix}action"] = float(int(record.action))
        for each in self._deliveries:
            each.put(lambda to, values=values: to.metrics(step, dict(values)), MOST)

    def event(self, kind: str, *, step: int | None, **fields: Any) -> None:
        """Sends an event."""
        if not self._deliveries:
            return
        known = {name: value for name, value in fields.items() if value is not None}
        event = {"kind": kind, "step": step, "run": self._run, "time": now(), **known}
        if kind == "start":
            self._config = known
        for each in self._deliveries:
            each.put(lambda to: to.event(dict(event)), MOST + _EVENTS)

    def problems(self) -> list[str]:
        """The failures since the last call. Each tracker reports its first failure only."""
        found, self._problems = self._problems, []
        for each in self._deliveries:
            found += each.take_problems()
        return found

    def drain(self) -> None:
        """Waits until everything sent so far is delivered, or `MAX_WAIT` is over."""
        done = [each.mark() for each in self._deliveries]
        for each in done:
            each.wait(self._seconds_left())

    def leave(self) -> None:
        """Asks the threads to deliver the rest and to end, without waiting for them."""
        for each in self._deliveries:
            each.end()

    def close(self) -> list[str]:
        """Delivers the rest, ends the trackers and returns a sentence about each loss.

        Together with `drain` it waits for at most `MAX_WAIT` seconds.
        """
        self.leave()
        found = self.problems()
        for each in self._deliveries:
            each.join(self._seconds_left())
            found += [*each.take_problems(), *each.losses()]
        self._deliveries = []
        return found

    def _seconds_left(self) -> float:
        """Remaining part of `MAX_WAIT`, which begins with the first call."""
        if self._waits_until is None:
            self._waits_until = time.monotonic() + MAX_WAIT
        return max(0.0, self._waits_until - time.monotonic())

    def forked(self) -> None:
        """Called in a forked child: the threads and the run are the parent's."""
        self._deliveries = []


class _Delivery:
    """One tracker, its queue and its thread.

    `store.background.Background` waits for its last job, which a hanging tracker would never end.
    """

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._queue: deque[Callable[[Tracker], None] | threading.Event] = deque()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._ended = False
        self._dead = False
        """The tracker could not start, and nothing is sent to it."""
        self._failed = self._dropped = 0
        """Records that the tracker refused, and records that did not fit into the queue."""
        self._reported = False
        self._problems: deque[str] = deque()

    def start(self, run: TrackedRun) -> None:
        # A daemon thread does not keep the program alive.
        self._thread = threading.Thread(
            target=self._work, args=(run,), name=f"healcore-{self._name}", daemon=True
        )
        self._thread.start()

    def put(self, send: Callable[[Tracker], None], most: int) -> None:
        if self._dead:
            self._failed += 1
        elif len(self._queue) < most:
            self._queue.append(send)
        else:
            self._dropped += 1
            if self._dropped == 1:
                self._problems.append(
                    f"tracker {self._name} is slower than the run: records for it are dropped, "
                    "training continues"
                )

    def mark(self) -> threading.Event:
        """An event that is set when everything sent so far is delivered."""
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
        """Sentences about records that were not delivered."""
        running = self._thread is not None and self._thread.is_alive()
        lost = self._failed + self._dropped + (len(self._queue) if running else 0)
        found = [f"tracker {self._name}: {lost} records were not delivered"] if lost else []
        if running:
            found.append(f"tracker {self._name} has not finished within {MAX_WAIT:g} s")
        return found

    # -- in its thread --------------------------------------------------------------------------

    def _work(self, run: TrackedRun) -> None:
        self._dead = not self._call("start", run)
        while True:
            ended = self._ended
            for _ in range(len(self._queue)):
                self._deliver(self._queue.popleft())
            self._call("flush")
            if ended:
                break
            self._wake.wait(_SECONDS)
            self._wake.clear()
        self._call("close")

    def _deliver(self, item: Callable[[Tracker], None] | threading.Event) -> None:
        if isinstance(item, threading.Event):
            item.set()
            return
        try:
            if self._dead:
                self._failed += 1
            else:
                item(self._tracker)
        except BaseException as error:  # clients have raised SystemExit
            self._failed += 1
            self._report(error)

    def _call(self, name: str, *args: Any) -> bool:
        """Calls an optional method of the tracker. Returns whether it did not raise."""
        try:
            method = None if self._dead else getattr(self._tracker, name, None)
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
