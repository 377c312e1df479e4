"""`Journal`: the file with the state of a run that no checkpoint can hold.

A rollback quarantines newer checkpoints, restores one, and continues with the live budgets. The
journal holds the plan before the first of these changes, so that a start after a crash finishes the
rollback with the same result. Until the first save after a rollback only the journal has the
budgets and the learning-rate multiplier: a restart from the checkpoint alone would refund the
attempt and restore the old learning rate.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, TypeAdapter, ValidationError

from healcore.core.errors import HealcoreError
from healcore.runtime.incidents.ledger import Ledger
from healcore.runtime.incidents.rollback import Rollback, Status
from healcore.runtime.microbatches.sizes import MicrobatchSizes
from healcore.runtime.store import (
    CheckpointDamaged,
    NoGoodCheckpoint,
    Saved,
    checksummed_json,
    files,
)
from healcore.runtime.store.manifest import STATUS, stated

NAME = "healcore.json"
"""File name of the journal in the directory of a store."""

SCHEMA = 4
_SHOWN = 3


class JournalError(HealcoreError, RuntimeError):
    """The journal cannot be used; the message says what to do."""


def _read_by(reader: Callable[[dict[str, Any]], Any]) -> AfterValidator:
    """A validator that raises the ValueError of `reader`, and returns the value unchanged."""

    def check(value: dict[str, Any]) -> dict[str, Any]:
        reader(value)
        return value

    return AfterValidator(check)


def _check_begun(rollback: Rollback) -> Rollback:
    if rollback.status not in (Status.PLANNED, Status.APPLIED):
        raise ValueError("a rollback that has not begun")
    if rollback.status is Status.PLANNED and not rollback.candidates:
        raise ValueError("a plan without a checkpoint")
    return rollback


_Ledger = Annotated[dict[str, Any], _read_by(Ledger.from_dict)]
_Sizes = Annotated[dict[str, Any], _read_by(MicrobatchSizes(shrinks=0).load)]


@dataclass
class JournalState:
    """The content of the journal."""

    ending: str | None = None
    """`Ending` of the last process, or None if the process is running or was killed."""
    rollbacks: int = 0
    rollback: Annotated[Rollback, AfterValidator(_check_begun)] | None = None
    """The last rollback: a plan, or an applied rollback, which a restart needs until a save."""
    nonfinite_ok: list[str] | None = None
    """Names of arrays that were not finite in the first snapshot."""
    ledger: _Ledger | None = None
    """The ledger after the last rollback; with a plan, the ledger before the rollback."""
    lineage: str | None = None
    """Id of the run, from its first process. The checkpoints of the run hold the same id."""
    first_step: int | None = None
    """Step of the run's first snapshot."""
    newest_on_disk: int | None = None
    """Step of the newest checkpoint on disk when the journal was written. A quarantined checkpoint
    counts only if there is no other."""
    microbatches: _Sizes | None = None
    """`MicrobatchSizes.to_dict`, or None while all batches have fitted into memory."""
    quarantined: list[str] = field(default_factory=list)
    """Directory names of quarantined checkpoints, in case their status files get damaged."""
    settings: dict[str, Any] | None = None
    """Learning rate, batch size, policy and other settings of the start, see `run_settings`."""
    passes: int = 0
    """Most calls of `batches` in a process of the run."""

    @property
    def plan(self) -> Rollback | None:
        """The unfinished rollback, or None."""
        rollback = self.rollback
        return rollback if rollback is not None and rollback.status is Status.PLANNED else None


_STATE = TypeAdapter(JournalState)


class Journal:
    """One file, replaced as a whole at every change. Rank 0 writes; all ranks read at the start.

    Without a path, for a run without a directory, the journal is in memory only.
    """

    def __init__(self, path: Path | None, *, writes: bool = True) -> None:
        self.path = path
        self._writes = writes
        self.state = JournalState()

    def read(self) -> JournalState:
        """Reads the file of an earlier process, if any. Raises JournalError if it is unusable."""
        if self.path is None or not self.path.exists():
            return self.state
        try:
            content = checksummed_json.read(self.path)
            schema = content.pop("schema", None)
            if schema == SCHEMA:
                self.state = _STATE.validate_json(json.dumps(content), strict=True)
        except (OSError, ValueError) as error:
            malformed = isinstance(error, ValidationError)
            wrong = self.malformed() if malformed else self._unusable(str(error))
            raise wrong from error
        if schema != SCHEMA:
            raise JournalError(
                f"{self.path} has schema {schema!r}, this version of healcore reads {SCHEMA}: use "
                "the version that wrote it. It holds the budgets after the last rollback. To "
                f"resume without it: {_rename_command(self.path)}"
            )
        return self.state

    def malformed(self) -> JournalError:
        """The error for malformed values in the file."""
        return self._unusable("has fields that healcore does not write")

    def _unusable(self, why: str) -> JournalError:
        without = (
            "" if self.path is None else f", or resume without it: {_rename_command(self.path)}"
        )
        return JournalError(
            f"{self.path} {why}: it holds the budgets after the last rollback, which checkpoints "
            "are quarantined, and whether a rollback is unfinished. Restore an intact copy of this "
            f"file{without}"
        )

    def write(self) -> None:
        """Writes the journal durably to disk. After an OSError the old file is unchanged."""
        if self.path is not None and self._writes:
            content = checksummed_json.dumps({**asdict(self.state), "schema": SCHEMA})
            files.replace(self.path, content)


def _rename_command(path: Path) -> str:
    """A shell command that renames the journal."""
    return f"mv {shlex.quote(str(path))} {shlex.quote(f'{path}.old')}"


# A directory whose checkpoints are all damaged lists no checkpoint, like an empty directory: only
# the journal and the damaged directories show that it holds a run.


def refuse_if_lost(journal: Journal, damaged: Sequence[CheckpointDamaged]) -> None:
    """Raises NoGoodCheckpoint if a directory without checkpoints has held some before."""
    if damaged:
        raise no_usable_checkpoint(journal, [], damaged)
    if journal.state.newest_on_disk is not None:
        raise NoGoodCheckpoint(
            f"{journal.path} belongs to a run that saved step {journal.state.newest_on_disk} or "
            "later steps, but its checkpoints are missing. Restore the checkpoints, or delete the "
            "file to begin a new run in this directory"
        )


def no_usable_checkpoint(
    journal: Journal, saves: Sequence[Saved], damaged: Sequence[CheckpointDamaged]
) -> NoGoodCheckpoint:
    """The error that names the problem of each checkpoint, newest first, and what to do."""
    where = "the store" if journal.path is None else journal.path.parent
    wrong = {s.step: s.status if s.finite else "not finite" for s in saves}
    wrong |= {e.step: f"damaged: {e.file} {e.difference}" for e in damaged}
    lines = [f"step {step} ({wrong[step]})" for step in sorted(wrong, reverse=True)]
    more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    plan = journal.state.plan
    pending = (
        ""
        if plan is None
        else f" {journal.path} holds an unfinished rollback to one of the steps "
        f"{plan.candidates}: to abandon it, and the budgets that the file holds, delete that file."
    )
    return NoGoodCheckpoint(
        f"{where} holds an earlier run, and none of its checkpoints can be used: "
        f"{', '.join(lines[:_SHOWN])}{more}.{pending} Restore an intact copy, or pass an empty "
        "directory to begin a new run"
    )


# -- what is quarantined ------------------------------------------------------------------------


def directories(saves: Sequence[Saved], steps: Collection[int]) -> list[str]:
    """Directory names of the checkpoints on disk with one of these steps."""
    return [Path(s.path).name for s in saves if s.path is not None and s.step in steps]


def update_from_disk(journal: Journal, saves: Sequence[Saved]) -> None:
    """Updates the journal's facts about checkpoints on disk; the caller writes the journal."""
    if journal.path is None:
        return
    state, folder = journal.state, journal.path.parent
    abandoned = [s.step for s in saves if s.status == "quarantined"]
    on_disk = [s.step for s in saves if s.path is not None]
    usable = [step for step in on_disk if step not in abandoned]
    state.newest_on_disk = max(usable or on_disk, default=state.newest_on_disk)
    quarantined = directories(saves, abandoned)
    names = sorted({*state.quarantined, *quarantined})
    state.quarantined = [
        name
        for name in names
        if (folder / name).is_dir() and stated(folder / name) in ("quarantined", None)
    ]


class LostStatus(NamedTuple):
    """Steps of checkpoints whose status file is damaged or missing."""

    quarantined: list[int]
    """Quarantined according to the journal."""
    unknown: list[int]
    """Not in the journal: known-good, or quarantined by another program."""


def lost_status(saves: Sequence[Saved], journal: Journal) -> LostStatus:
    """Finds checkpoints without an intact status file, which would override the journal."""
    without = {s.step: Path(s.path) for s in saves if s.path and stated(Path(s.path)) is None}
    known = set(journal.state.quarantined)
    damaged = [step for step, folder in without.items() if (folder / STATUS).exists()]
    quarantined = [step for step, folder in without.items() if folder.name in known]
    return LostStatus(quarantined, [step for step in damaged if step not in quarantined])
