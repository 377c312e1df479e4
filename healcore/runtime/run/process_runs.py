"""The runs of this process, so that no run is taken for another one.

A program that trains several runs may pass the same directory twice by mistake. The second run then
raises an error, instead of a load of the final state of the first run.
"""

from __future__ import annotations

from pathlib import Path

_completed: set[Path] = set()
"""The directories of the runs that this process has completed."""
_opened = 0
"""Number of runs that this process has opened."""


def count_run() -> None:
    """Counts a run that is opened."""
    global _opened
    _opened += 1


def opened_runs() -> int:
    """Number of runs that this process has opened, with and without a directory."""
    return _opened


def remember_completed(root: Path) -> None:
    """Remembers the directory of a run that this process has completed."""
    _completed.add(root.resolve())


def has_completed_run(root: Path) -> bool:
    """Whether this process has completed a run in a directory."""
    return root.resolve() in _completed


def forget_runs() -> None:
    """For tests: forgets all runs, so that a test can continue as a new process."""
    _completed.clear()
