"""What has to survive the process: a rollback under way, and what a checkpoint cannot know.

A rollback is several steps on disk (set newer checkpoints aside, restore, go on with the live
budgets). It is written down before the first of them and struck off after the last, so that a
start after a crash at any point finishes it, with the same result. And until the first save of the
new branch, only this file knows what the rollback has cost: restarted from the checkpoint alone,
the run would have its attempts back and its old learning rate.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from healcore.core.errors import HealcoreError
from healcore.runtime.store import atomic, regular
from healcore.runtime.store.sealed import Unsealed, seal, unseal

NAME = "healcore.json"
"""Its name in the directory of a store."""

SCHEMA = 2
_READABLE = (1, 2)
"""1: of healcore before a journal knew which run it belongs to."""


class JournalError(HealcoreError, RuntimeError):
    """A journal that cannot be used; the message says what to do."""


@dataclass
class Plan:
    """A rollback that has begun."""

    number: int
    """From 1, over the whole run."""
    step: int
    """Steps done at the moment."""
    onset: int
    order: list[int]
    """Checkpoints to try, the wanted one first."""
    aside: list[int]
    """Checkpoints to be quarantined."""
    engines: dict[str, Any]
    """Engine states at the moment of the rollback."""
    left_out: dict[str, list[list[int]]]
    """Number of a loader -> ids that are not to be handed out (again)."""
    forward: dict[str, Any]
    """Number of a loader that cannot be put back -> its position at the moment."""
    trial: list[int] | None = None
    """Of a re-run with nothing changed: index of the onset, and of the step with the order."""


@dataclass
class Branch:
    """Where the last rollback went, and what a restart from there takes over."""

    target: int
    engines: dict[str, Any]
    plan: Plan
    """As it was carried out, without its engines."""


@dataclass
class Page:
    """All of the journal."""

    ended: str | None = None
    """How the last process ended, None while one is at it (or was killed)."""
    rollbacks: int = 0
    begun: Plan | None = None
    branch: Branch | None = None
    meant: list[str] | None = None
    """Arrays that were not finite in the first snapshot."""
    ledger: dict[str, Any] | None = None
    """The ledger at the last rollback; of one that has begun, from before it."""
    trials: list[int] = field(default_factory=list)
    """Onsets that a re-run was made for."""
    lineage: str | None = None
    """Id of the run that the checkpoints belong to: that of its first process. Every checkpoint
    holds it too."""
    first: int | None = None
    """Step of the snapshot that this run began with."""
    saved: int | None = None
    """Newest step on disk when this was written."""
    quarantined: list[str] = field(default_factory=list)
    """Directories of checkpoints that were set aside: their status files may be damaged."""


class Journal:
    """One file, replaced whole at every change. Rank 0 writes, every rank reads at the start.

    Args:
        path: the file; None keeps it in memory, for a run without a directory.
        writes: whether this process writes it.
    """

    def __init__(self, path: Path | None, *, writes: bool = True) -> None:
        self.path = path
        self._writes = writes
        self.page = Page()

    def read(self) -> Page:
        """Takes over what an earlier process has left.

        Raises:
            JournalError: the file is damaged, or a newer healcore's.
        """
        if self.path is None or not self.path.exists():
            return self.page
        try:
            found = unseal(regular.read(self.path))
        except (OSError, Unsealed) as error:
            raise JournalError(
                f"{self.path} {error}: it says what the last rollback has cost, and which "
                "checkpoints were set aside. To go on without knowing that, delete it"
            ) from error
        if found.pop("schema", None) not in _READABLE:
            raise JournalError(
                f"{self.path} was written by a newer healcore: use that one. To go on without "
                "what it says of the last rollback, delete it"
            )
        begun, branch = found.pop("begun"), found.pop("branch")
        self.page = Page(
            **found,
            begun=None if begun is None else Plan(**begun),
            branch=None if branch is None else _branch(**branch),
        )
        return self.page

    def write(self) -> None:
        """Puts the page on disk, durably.

        Raises:
            OSError: it could not be written; the old one is still there.
        """
        if self.path is not None and self._writes:
            atomic.write(self.path, seal({**asdict(self.page), "schema": SCHEMA}))


def _branch(plan: dict[str, Any], **rest: Any) -> Branch:
    return Branch(**rest, plan=Plan(**plan))
