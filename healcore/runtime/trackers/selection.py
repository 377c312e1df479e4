"""Which trackers `Healer(trackers=...)` means: names, live objects of their libraries, or own ones.

A name is checked when the Healer is made, without an import of its library. The client itself is
made in the Healer's block, in the thread of the loop: active runs of mlflow and trackio belong to a
thread.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

from healcore.extras import MissingExtraError
from healcore.runtime.trackers.tracker import Tracker


class _Client(NamedTuple):
    open: Callable[[str | None, Any], Tracker]
    """Makes it; its library is imported only now."""
    library: str | None
    about: str
    """What `where` is in "name:where"."""


def _wandb(where: str | None, own: Any) -> Tracker:
    from healcore.runtime.trackers.wandb_run import Client

    return Client(where, own)


def _trackio(where: str | None, own: Any) -> Tracker:
    from healcore.runtime.trackers.trackio_run import Client

    return Client(where, own)


def _mlflow(where: str | None, own: Any) -> Tracker:
    from healcore.runtime.trackers.mlflow_run import Client

    return Client(where, own)


def _tensorboard(where: str | None, own: Any) -> Tracker:
    from healcore.runtime.trackers.tensorboard_files import Client

    return Client(where, own)


def _stdout(where: str | None, own: Any) -> Tracker:
    from healcore.runtime.trackers.stdout import Client

    return Client(where, own)


_CLIENTS = {
    "wandb": _Client(_wandb, "wandb", "project"),
    "trackio": _Client(_trackio, "trackio", "project"),
    "mlflow": _Client(_mlflow, "mlflow", "experiment"),
    "tensorboard": _Client(_tensorboard, "tensorboard", "directory"),
    "stdout": _Client(_stdout, None, ""),
}
_NAMES = ", ".join(
    f'"{name}" or "{name}:{each.about.upper()}"' if each.about else f'"{name}"'
    for name, each in _CLIENTS.items()
)


class Selection(NamedTuple):
    """One tracker that was asked for."""

    name: str
    where: str | None
    """What follows the colon of a name."""
    given: Any
    """The user's own object, which healcore does not end; None: found by its name."""

    def open(self) -> Tracker:
        """The tracker; its library is imported now."""
        if isinstance(self.given, Tracker):
            return self.given
        return _CLIENTS[self.name].open(self.where, self.given)


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
