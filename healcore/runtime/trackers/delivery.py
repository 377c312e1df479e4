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
"""Limit of pending records of a slow tracker, which then loses the oldest."""
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
            delivery.queue.append(("metrics", (step, dict(values))))

    def event(self, kind: str, *, step: int | None, **fields: Any) -> None:
        """Sends an event."""
        present = {name: value for name, value in fields.items() if value is not None}
        event = {"kind": kind, "step": step, "run": self._run, "time": now(), **present}
        if kind == "start":
            self._config = present
        for delivery in self._deliveries:
            delivery.queue.append(("event", (dict(event),)))

    def problems(self) -> list[str]:
        """Returns the failures since the last call. A tracker reports only its first failure."""
        found = [delivery.take_problem() for delivery in self._deliveries]
        return [problem for problem in found if problem]

    def leave(self) -> None:
        """Asks the threads to deliver the pending records and to end. Does not wait for them."""
        for delivery in self._deliveries:
            delivery.ended.set()

    def close(self) -> list[str]:
        """Delivers the pending records, for at most `MAX_WAIT` seconds. Returns the failures."""
        self.leave()
        deadline = time.monotonic() + MAX_WAIT
        late = [delivery.join(deadline) for delivery in self._deliveries]
        problems = [*self.problems(), *filter(None, late)]
        self._deliveries = []
        return problems


class _Delivery:
    """One tracker, its queue and its thread.

    `store.background.Background` is unsuitable: it waits for its last job, and a tracker may hang.
    """

    def __init__(self, selection: Selection) -> None:
        self.ended = threading.Event()
        self.queue: deque[tuple[str, tuple[Any, ...]]] = deque(maxlen=MAX_PENDING)
        """Names of methods of the tracker, and their arguments."""
        self._name = selection.name
        self._thread: threading.Thread | None = None
        self._problem: str | None = None
        """The first failure, or an empty string after it was reported."""
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

    def take_problem(self) -> str | None:
        """Returns the first failure once."""
        problem = self._problem
        if problem:
            self._problem = ""
        return problem

    def join(self, deadline: float) -> str | None:
        """Waits for the thread. Returns a sentence if it has not finished."""
        if self._thread is None:
            return None
        self._thread.join(max(0.0, deadline - time.monotonic()))
        late = f"tracker {self._name} has not finished within {MAX_WAIT:g} s: it loses records"
        return late if self._thread.is_alive() else None

    # -- in the tracker's thread -----------------------------------------------------------------

    def _work(self, run: TrackedRun) -> None:
        if not self._call("start", run):
            self._tracker = None
        ended = False
        while not ended:
            ended = self.ended.wait(_INTERVAL)
            for _ in range(len(self.queue)):
                method, args = self.queue.popleft()
                self._call(method, *args)
            self._call("flush")
        self._call("close")

    def _call(self, method: str, *args: Any) -> bool:
        """Calls a method, if the tracker has it. Returns whether the call did not fail."""
        try:
            if (call := getattr(self._tracker, method, None)) is not None:
                call(*args)
        except BaseException as error:  # some clients raise SystemExit
            self._fails(error)
            return False
        return True

    def _fails(self, error: BaseException) -> None:
        """Keeps the tracker's first failure."""
        if self._problem is None:
            why = f"{type(error).__name__}: {error}"
            self._problem = f"tracker {self._name} fails, training continues: {why}"[:1000]
