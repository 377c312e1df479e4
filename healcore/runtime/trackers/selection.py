"""Finds the trackers of `Healer(trackers=...)`: names, runs of a library, or own objects.

A name is checked when the Healer is made, without an import of its library. The client itself is
made in the Healer's block, in the thread of the loop: active runs of mlflow and trackio belong to a
thread.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from typing import Any, NamedTuple

from healcore.extras import MissingExtraError
from healcore.runtime.trackers.tracker import Tracker


class _Client(NamedTuple):
    module: str
    """The module here with its class `Client`; importing it imports the library."""
    library: str | None
    about: str
    """What `where` is in "name:where"."""


_CLIENTS = {
    "wandb": _Client("wandb_run", "wandb", "project"),
    "trackio": _Client("trackio_run", "trackio", "project"),
    "mlflow": _Client("mlflow_run", "mlflow", "experiment"),
    "tensorboard": _Client("tensorboard_files", "tensorboard", "directory"),
    "stdout": _Client("stdout", None, ""),
}
_NAMES = ", ".join(
    f'"{name}" or "{name}:{each.about.upper()}"' if each.about else f'"{name}"'
    for name, each in _CLIENTS.items()
)


class Selection(NamedTuple):
    """One tracker that was asked for."""

    name: str
    where: str | None
    """The part of a name after its colon: a project, an experiment or a directory."""
    given: Any
    """The user's own object, which healcore does not end; None: found by its name."""

    def open(self) -> Tracker:
        """The tracker; its library is imported now."""
        if isinstance(self.given, Tracker):
            return self.given
        module = f"healcore.runtime.trackers.{_CLIENTS[self.name].module}"
        return pkgutil.resolve_name(f"{module}:Client")(self.where, self.given)


def select(trackers: Any) -> tuple[Selection, ...]:
    """Checks the argument `trackers`; raises ValueError, or MissingExtraError for a library."""
    if trackers is None:
        return ()
    # Not any iterable: a run of mlflow is one, over its fields.
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
