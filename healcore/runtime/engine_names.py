"""Checks the names of the engines that a driver is to load."""

from __future__ import annotations

from collections.abc import Iterable

from healcore.core.engine import StateError


def check_engines(engines: Iterable[str], present: Iterable[str]) -> None:
    """Checks the names of engines before `Driver.load` changes anything.

    Args:
        engines: names of engine states to load.
        present: names of the engines of the run.

    Raises:
        StateError: the run has no engine of one of the names.
    """
    known = list(present)
    for name in engines:
        if name not in known:
            raise StateError(
                f"this run has no engine named {name!r}, its engines are {', '.join(known)}: "
                "pass the healing state of a run with the same optimizers"
            )
