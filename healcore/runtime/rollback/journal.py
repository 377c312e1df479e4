"""The journal: what has to survive the process and no checkpoint can hold.

A rollback takes several steps on disk: quarantine newer checkpoints, restore, continue with the
live budgets. The plan is written to the journal before the first of them and removed after the
last. So a start after a crash at any point finishes the rollback, with the same result. Until the
first save after a rollback only the journal knows the budgets and the learning-rate multiplier: a
restart from the checkpoint alone would refund the attempt and restore the old learning rate.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from healcore.core.errors import HealcoreError
from healcore.runtime.store import checksummed_json, files
from healcore.runtime.store.checksummed_json import ChecksumError

NAME = "healcore.json"
"""Its file name in the directory of a store."""

SCHEMA = 3


class JournalError(HealcoreError, RuntimeError):
    """A journal that cannot be used; the message says what to do."""


@dataclass
class RollbackPlan:
    """A rollback that has begun."""

    number: int
    """From 1, over the whole run."""
    step: int
    """Steps done when it began."""
    onset: int
    order: list[int]
    """Steps of the checkpoints to try, in this order."""
    quarantine: list[int]
    """Steps of the checkpoints to quarantine."""
    engines: dict[str, Any]
    """Engine states when it began."""
    left_out: dict[str, list[list[int]]]
    """Number of a loader -> ids of the batches that it must not yield (again)."""
    forward: dict[str, Any]
    """Number of a loader that cannot be rewound -> its position when the rollback began."""
    rerun: list[int] | None = None
    """Of a re-run with nothing changed: the onset, and the step that brought the order."""


@dataclass
class CompletedRollback:
    """The last rollback: what a restart needs until the next save."""

    target: int
    engines: dict[str, Any]
    plan: RollbackPlan
    """Without its engines."""


@dataclass
class JournalState:
    """The content of the journal."""

    ending: str | None = None
    """How the last process ended; None: it is running, or was killed."""
    rollbacks: int = 0
    pending: RollbackPlan | None = None
    """A rollback that has begun and is not completed."""
    last_rollback: CompletedRollback | None = None
    nonfinite_ok: list[str] | None = None
    """Arrays that were not finite in the first snapshot."""
    ledger: dict[str, Any] | None = None
    """The ledger after the last rollback; while one is pending, from before it."""
    rerun_onsets: list[int] = field(default_factory=list)
    """Onsets for which a re-run was made."""
    lineage: str | None = None
    """Id of the run that the checkpoints belong to: that of its first process. Every checkpoint
    holds it too."""
    first_step: int | None = None
    """Step of the snapshot that this run began with."""
    newest_on_disk: int | None = None
    """Step of the newest checkpoint on disk when the journal was written."""
    quarantined: list[str] = field(default_factory=list)
    """Directories of quarantined checkpoints, in case their status files get damaged."""


class Journal:
    """One file, replaced as a whole at every change. Rank 0 writes; every rank reads at the start.

    Args:
        path: the file; None keeps it in memory, for a run without a directory.
        writes: whether this process writes it.
    """

    def __init__(self, path: Path | None, *, writes: bool = True) -> None:
        self.path = path
        self._writes = writes
        self.state = JournalState()

    def read(self) -> JournalState:
        """Reads what an earlier process has written, if there is a file.

        Raises:
            JournalError: the file is damaged, or of another version of healcore.
        """
        if self.path is None or not self.path.exists():
            return self.state
        try:
            content = checksummed_json.read(self.path)
        except (OSError, ChecksumError) as error:
            raise JournalError(
                f"{self.path} {error}: it holds the budgets after the last rollback, and which "
                "checkpoints are quarantined. To resume without them, delete it"
            ) from error
        schema = content.pop("schema", None)
        if schema != SCHEMA:
            raise JournalError(
                f"{self.path} has schema {schema!r}, this version of healcore reads {SCHEMA}: use "
                "the version that wrote it. To resume without the budgets after the last rollback, "
                "delete it"
            )
        pending, last = content.pop("pending"), content.pop("last_rollback")
        self.state = JournalState(
            **content,
            pending=None if pending is None else RollbackPlan(**pending),
            last_rollback=None if last is None else _completed(**last),
        )
        return self.state

    def write(self) -> None:
        """Writes the journal to disk, durably.

        Raises:
            OSError: it could not be written; the old file is still there.
        """
        if self.path is not None and self._writes:
            content = {**asdict(self.state), "schema": SCHEMA}
            files.replace(self.path, checksummed_json.dumps(content))


def _completed(plan: dict[str, Any], **rest: Any) -> CompletedRollback:
    return CompletedRollback(**rest, plan=RollbackPlan(**plan))
