"""Delivers metrics and events to trackers in threads, so that trackers cannot delay the run."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from healcore.core.step_record import StepRecord
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
    """All trackers of a run. No method raises. Only `close` waits for the trackers."""

    def __init__(self, selected: Iterable[Selection] = (), *, run: str = "") -> None:
        self._run = run
        self._config: dict[str, Any] = {}
        self._deliveries = [_Delivery(selection) for selection in selected]

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
            delivery.put(MAX_PENDING, "metrics", step, dict(values))

    def event(self, kind: str, *, step: int | None, **fields: Any) -> None:
        """Sends an event."""
        present = {name: value for name, value in fields.items() if value is not None}
        event = {"kind": kind, "step": step, "run": self._run, "time": now(), **present}
        if kind == "start":
            self._config = present
        for delivery in self._deliveries:
            delivery.put(MAX_PENDING + _MORE_EVENTS, "event", dict(event))

    def problems(self) -> list[str]:
        """Returns the failures since the last call. A tracker reports only its first failure."""
        return [each for delivery in self._deliveries for each in delivery.take_problems()]

    def leave(self) -> None:
        """Asks the threads to deliver the pending records and to end. Does not wait for them."""
        for delivery in self._deliveries:
            delivery.ended.set()

    def close(self) -> list[str]:
        """Delivers the pending records, for at most `MAX_WAIT` seconds.

        Returns:
            The failures since the last call of `problems`, and a sentence about each loss.
        """
        self.leave()
        deadline = time.monotonic() + MAX_WAIT
        losses = [
            sentence
            for delivery in self._deliveries
            for sentence in delivery.join(max(0.0, deadline - time.monotonic()))
        ]
        problems = [*self.problems(), *losses]
        self._deliveries = []
        return problems


class _Delivery:
    """One tracker, its queue and its thread.

    `store.background.Background` is unsuitable: it waits for its last job, and a tracker may hang.
    """

    def __init__(self, selection: Selection) -> None:
        self.ended = threading.Event()
        self._name = selection.name
        self._queue: deque[tuple[str, tuple[Any, ...]]] = deque()
        """Names of methods of the tracker, and their arguments."""
        self._thread: threading.Thread | None = None
        self._lost = 0
        self._reported = False
        self._problems: deque[str] = deque()
        self._tracker: Tracker | None = None
        """The tracker, or None if it cannot be opened or started: it then gets no records."""
        try:
            self._tracker = selection.open()
        except (Exception, SystemExit) as error:  # from the import or from the client
            self._fails(error)

    def start(self, run: TrackedRun) -> None:
        # A daemon, so that a hanging tracker does not keep the program alive.
        self._thread = threading.Thread(
            target=self._work, args=(run,), name=f"healcore-{self._name}", daemon=True
        )
        self._thread.start()

    def put(self, limit: int, method: str, *args: Any) -> None:
        if len(self._queue) < limit:
            self._queue.append((method, args))
        else:
            self._lost += 1
            self._report("is slower than the run: records are dropped, training continues")

    def take_problems(self) -> list[str]:
        return [self._problems.popleft() for _ in range(len(self._problems))]

    def join(self, seconds: float) -> list[str]:
        """Waits for the thread, and returns sentences about records that were not delivered."""
        if self._thread is None:
            return []
        self._thread.join(seconds)
        lost = self._lost + len(self._queue)
        sentences = [f"tracker {self._name}: {lost} records were not delivered"] if lost else []
        if self._thread.is_alive():
            sentences.append(f"tracker {self._name} has not finished within {MAX_WAIT:g} s")
        return sentences

    # -- in the tracker's thread -----------------------------------------------------------------

    def _work(self, run: TrackedRun) -> None:
        if not self._call("start", run):
            self._tracker = None
        ended = False
        while not ended:
            ended = self.ended.wait(_INTERVAL)
            for _ in range(len(self._queue)):
                method, args = self._queue[0]
                self._lost += not self._call(method, *args)
                self._queue.popleft()
            self._call("flush")
        self._call("close")

    def _call(self, method: str, *args: Any) -> bool:
        """Calls a method, if the tracker has it. Returns False without a tracker or on failure."""
        if self._tracker is None:
            return False
        try:
            if (call := getattr(self._tracker, method, None)) is not None:
                call(*args)
        except BaseException as error:  # some clients raise SystemExit
            self._fails(error)
            return False
        return True

    def _fails(self, error: BaseException) -> None:
        self._report(f"fails, training continues: {type(error).__name__}: {error}")

    def _report(self, problem: str) -> None:
        """Reports the tracker's first problem."""
        if not self._reported:
            self._reported = True
            self._problems.append(f"tracker {self._name} {problem}"[:1000])
