"""Selects the trackers of `Healer(trackers=...)`: names, or objects with the methods of `Tracker`.

The Healer's constructor checks names without importing the tracker's library. The client is created
later, in the thread of the training loop, because active runs of mlflow and trackio belong to a
thread.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

from healcore.extras import MissingExtraError
from healcore.runtime.trackers.clients import CLIENTS
from healcore.runtime.trackers.tracker import Tracker

NAMES = ("wandb", "trackio", "mlflow", "tensorboard")
"""Names of the libraries. "name:place" names a project, an experiment or a directory too."""


class Selection(NamedTuple):
    """One requested tracker."""

    name: str
    open: Callable[[], Tracker]
    """Imports the tracker's library and creates the tracker."""


def select(trackers: Any) -> tuple[Selection, ...]:
    """Checks the argument `trackers`. Raises ValueError, or MissingExtraError for a library."""
    several = trackers if isinstance(trackers, list | tuple) else (trackers,)
    return () if trackers is None else tuple(map(_select_one, several))


def _select_one(tracker: Any) -> Selection:
    if isinstance(tracker, Tracker) and not isinstance(tracker, type):
        return Selection(type(tracker).__name__, lambda: tracker)
    name, colon, place = tracker.partition(":") if isinstance(tracker, str) else ("", "", "")
    if name not in NAMES or (colon and not place):
        raise ValueError(
            f'trackers must be {", ".join(NAMES)}, a name with a project ("wandb:PROJECT"), or '
            f"objects with the methods metrics(step, values) and event(event), got {tracker!r}"
        )
    if importlib.util.find_spec(name) is None:
        message = f'trackers="{name}" needs {name}, not installed in this environment. '
        raise MissingExtraError(f"{message}Write: pip install {name}", name=name)
    return Selection(name, lambda: _open(name, place or None))


def _open(name: str, place: str | None) -> Tracker:
    if name in CLIENTS:
        return CLIENTS[name](place)
    from healcore.runtime.trackers.tensorboard_run import Client

    return Client(place)
