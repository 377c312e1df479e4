"""Defines the protocol `Tracker`, and selects the trackers of `Healer(trackers=...)`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from healcore.extras import MissingExtraError
from healcore.runtime.trackers.clients import CLIENTS


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


class Selection(NamedTuple):
    """One requested tracker."""

    name: str
    open: Callable[[], Tracker]
    """Imports the tracker's library and creates the tracker, in the thread of the training loop:
    active runs of mlflow and trackio belong to a thread."""


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
        return Selection(type(tracker).__name__, lambda: tracker)
    name, colon, place = tracker.partition(":") if isinstance(tracker, str) else ("", "", "")
    if name not in CLIENTS or (colon and not place):
        raise ValueError(
            f'trackers must be {", ".join(CLIENTS)}, a name with a project ("wandb:PROJECT"), or '
            f"objects with the methods metrics(step, values) and event(event), got {tracker!r}"
        )
    if importlib.util.find_spec(name) is None:
        message = f'trackers="{name}" needs {name}, not installed in this environment. '
        raise MissingExtraError(f"{message}Write: pip install {name}", name=name)
    return Selection(name, lambda: CLIENTS[name](place or None))
