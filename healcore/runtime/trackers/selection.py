"""Selects the trackers of `Healer(trackers=...)`: names, runs of a library, or the user's objects.

The Healer's constructor checks names without importing the tracker's library. The client is created
later, in the thread of the training loop, because active runs of mlflow and trackio belong to a
thread.
"""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from healcore.events import json_lines
from healcore.extras import MissingExtraError
from healcore.runtime.trackers.tracker import Tracker


class _Client(NamedTuple):
    class_path: str
    """`module:class` in this package. Importing the module imports the library."""
    library: str | None
    where: str
    """Meaning of `where` in "name:where", or an empty string if only "name" is valid."""


_CLIENTS = {
    "wandb": _Client("wandb_run:Client", "wandb", "project"),
    "trackio": _Client("trackio_run:Client", "trackio", "project"),
    "mlflow": _Client("mlflow_run:Client", "mlflow", "experiment"),
    "tensorboard": _Client("tensorboard_files:Client", "tensorboard", "directory"),
    "stdout": _Client("selection:Stdout", None, ""),
}
_NAMES = ", ".join(
    f'"{name}" or "{name}:{client.where.upper()}"' if client.where else f'"{name}"'
    for name, client in _CLIENTS.items()
)


class Selection(NamedTuple):
    """One requested tracker."""

    name: str
    where: str | None
    """Project, experiment or directory after the colon of the name, or None."""
    user_object: Any
    """The user's run or tracker, which healcore does not close, or None for a tracker by name."""

    def open(self) -> Tracker:
        """Imports the tracker's library and creates the tracker."""
        if isinstance(self.user_object, Tracker):
            return self.user_object
        path = f"healcore.runtime.trackers.{_CLIENTS[self.name].class_path}"
        return pkgutil.resolve_name(path)(self.where, self.user_object)


def select(trackers: Any) -> tuple[Selection, ...]:
    """Checks the argument `trackers`. Raises ValueError, or MissingExtraError for a library."""
    if trackers is None:
        return ()
    # Not `Iterable`, because a run of mlflow is iterable.
    several = trackers if isinstance(trackers, list | tuple) else (trackers,)
    return tuple(_select_one(tracker) for tracker in several)


def _select_one(tracker: Any) -> Selection:
    if not isinstance(tracker, str):
        return _select_object(tracker)
    name, colon, where = tracker.partition(":")
    client = _CLIENTS.get(name)
    if client is None or (colon and not (client.where and where)):
        raise ValueError(
            f"trackers must be {_NAMES}, or objects with metrics and event, got {tracker!r}"
        )
    if client.library is not None and importlib.util.find_spec(client.library) is None:
        raise MissingExtraError(
            f'trackers="{name}" needs {client.library}, not installed in this environment. '
            f"Write: pip install {client.library}",
            name=client.library,
        )
    return Selection(name, where or None, None)


def _select_object(tracker: Any) -> Selection:
    libraries = {base.__module__.partition(".")[0] for base in type(tracker).__mro__}
    for name in ("wandb", "trackio"):
        if name in libraries and callable(getattr(tracker, "log", None)):
            return Selection(name, None, tracker)
    if "mlflow" in libraries and hasattr(getattr(tracker, "info", None), "run_id"):
        return Selection("mlflow", None, tracker)
    if all(callable(getattr(tracker, name, None)) for name in ("add_scalar", "add_text")):
        return Selection("tensorboard", None, tracker)
    if isinstance(tracker, Tracker) and not isinstance(tracker, type):
        return Selection(type(tracker).__name__, None, tracker)
    raise ValueError(
        "an object in trackers must be a wandb, trackio or mlflow run or a SummaryWriter, or have "
        f"the methods metrics(step, values) and event(event), got {type(tracker).__name__}"
    )


class Stdout:
    """Writes JSON Lines to the current `sys.stdout`, for collectors of container logs."""

    def __init__(self, where: None, user_run: None) -> None:
        pass

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Writes `{"kind":"metrics","step":7,"heal/loss":2.31,...}`."""
        self.event({"kind": "metrics", "step": step, **values})

    def event(self, event: Mapping[str, Any]) -> None:
        """Writes the event with all its fields."""
        sys.stdout.write(json_lines.encode(event).decode("ascii"))

    def flush(self) -> None:
        """Flushes the stream."""
        sys.stdout.flush()
