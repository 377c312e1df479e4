"""Finds the trackers of `Healer(trackers=...)`: names, runs of a library, or own objects.

A name is checked when the Healer is created, without an import of its library. The client is
created in the Healer's block, in the thread of the loop: active runs of mlflow and trackio belong
to a thread.
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
    place: str
    """Module and class in this folder. Importing the module imports the library."""
    library: str | None
    about: str
    """Meaning of `where` in "name:where", or an empty string if the name has no such part."""


_CLIENTS = {
    "wandb": _Client("wandb_run:Client", "wandb", "project"),
    "trackio": _Client("trackio_run:Client", "trackio", "project"),
    "mlflow": _Client("mlflow_run:Client", "mlflow", "experiment"),
    "tensorboard": _Client("tensorboard_files:Client", "tensorboard", "directory"),
    "stdout": _Client("selection:Stdout", None, ""),
}
_NAMES = ", ".join(
    f'"{name}" or "{name}:{each.about.upper()}"' if each.about else f'"{name}"'
    for name, each in _CLIENTS.items()
)


class Selection(NamedTuple):
    """One requested tracker."""

    name: str
    where: str | None
    """The part of a name after its colon: a project, an experiment or a directory."""
    given: Any
    """The user's own object, which healcore does not close, or None for a tracker by name."""

    def open(self) -> Tracker:
        """Creates the tracker, which imports its library."""
        if isinstance(self.given, Tracker):
            return self.given
        client = pkgutil.resolve_name(f"healcore.runtime.trackers.{_CLIENTS[self.name].place}")
        return client(self.where, self.given)


def select(trackers: Any) -> tuple[Selection, ...]:
    """Checks the argument `trackers`. Raises ValueError, or MissingExtraError for a library."""
    if trackers is None:
        return ()
    # Not any iterable: a run of mlflow iterates over its fields.
    several = trackers if isinstance(trackers, list | tuple) else (trackers,)
    return tuple(_selection(each) for each in several)


def _selection(given: Any) -> Selection:
    if not isinstance(given, str):
        return _selected_object(given)
    name, colon, where = given.partition(":")
    client = _CLIENTS.get(name)
    if client is None or (colon and not (client.about and where)):
        raise ValueError(f"trackers are {_NAMES}, or objects with metrics and event, not {given!r}")
    if client.library is not None and importlib.util.find_spec(client.library) is None:
        raise MissingExtraError(
            f'trackers="{name}" needs {client.library}, not installed in this environment. '
            f"Write: pip install {client.library}",
            name=client.library,
        )
    return Selection(name, where or None, None)


def _selected_object(given: Any) -> Selection:
    libraries = {base.__module__.partition(".")[0] for base in type(given).__mro__}
    for name in ("wandb", "trackio"):
        if name in libraries and callable(getattr(given, "log", None)):
            return Selection(name, None, given)
    if "mlflow" in libraries and hasattr(getattr(given, "info", None), "run_id"):
        return Selection("mlflow", None, given)
    if callable(getattr(given, "add_scalar", None)) and callable(getattr(given, "add_text", None)):
        return Selection("tensorboard", None, given)
    if isinstance(given, Tracker) and not isinstance(given, type):
        return Selection(type(given).__name__, None, given)
    raise ValueError(
        f"an object in trackers is a wandb, trackio or mlflow run, a SummaryWriter, or has the "
        f"methods metrics(step, values) and event(event), not {type(given).__name__}"
    )


class Stdout:
    """Writes JSON Lines to the current `sys.stdout`, for collectors of container logs."""

    def __init__(self, where: str | None, own: None) -> None:
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
