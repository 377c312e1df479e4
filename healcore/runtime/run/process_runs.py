"""The runs of this process, by the directory of their store.

A program that trains several runs may pass the same directory twice by mistake. The second run then
raises an error, instead of a load of the final state of the first run.
"""

from __future__ import annotations

from pathlib import Path

from healcore.runtime.run.run_record import RunRecord

_records: dict[Path, RunRecord] = {}
"""The record of the last run of this process in each directory."""
_opened = 0
"""Number of runs that this process has opened."""


def count_run() -> None:
    """Counts a run that is opened."""
    global _opened
    _opened += 1


def opened_runs() -> int:
    """Number of runs that this process has opened, with and without a directory."""
    return _opened


def remember_run(root: Path, record: RunRecord) -> None:
    """Remembers the run that begins or resumes in a directory.

    Args:
        root: the directory of the store.
        record: the live record of the run, which is marked as completed later.
    """
    _records[root.resolve()] = record


def has_completed_run(root: Path) -> bool:
    """Whether this process has completed the run in a directory.

    Args:
        root: the directory of the store.
    """
    record = _records.get(root.resolve())
    return record is not None and record.completed


def forget_runs() -> None:
    """For tests: forgets all runs, so that a test can continue as a new process."""
    _records.clear()
