"""Notes of ranks that end alone or hang: files next to the events file.

Such a rank cannot use collectives, and only rank 0 writes events and the postmortem. Rank 0 reads
the notes when its own run ends. The next start reads them if rank 0 was killed.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from healcore import regular_file
from healcore.events.metrics import stem
from healcore.events.models import Ending
from healcore.runtime.store import files

_KINDS = {False: "end.rank", True: "hang.rank"}
"""Whether a rank hangs -> part of the file name after the stem of the events file."""
_MAX_BYTES = 1 << 20
_MAX_TEXT = 200_000
"""Largest number of characters of a traceback or of stacks."""
_MAX_SHOWN = 4
"""Largest number of tracebacks in the postmortem."""


class RankNote(BaseModel):
    """How one rank ended, or where it hangs."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    rank: int
    ending: Ending | None = None
    """None for a rank that hangs."""
    step: int
    """Optimizer steps done."""
    why: str
    """The exception, the reason of a stop, or the signal, in one line."""
    trace: str = ""
    """The exception with its traceback, or the stacks of all threads."""
    cause: list[str] = []
    """Names of the causes of the exception."""
    sign: str = ""
    """Evidence for the causes: `Fault.sign`."""
    follows: bool = False
    """Whether another rank is the cause: a connection broke, or a rank was late."""
    time: float
    """Unix time."""


class RankNotes(NamedTuple):
    """The notes of one run.

    Attributes:
        events: events file of rank 0, or None for no notes.
        run: id of rank 0's run.
    """

    events: Path | None
    run: str

    def leave(self, note: RankNote) -> None:
        """Writes the note of this rank. Never raises, because the run is ending."""
        if self.events is None:
            return
        short = note.model_copy(update={"why": note.why[:2000], "trace": note.trace[-_MAX_TEXT:]})
        part = f"{_KINDS[note.ending is None]}{note.rank}"
        with suppress(OSError, UnicodeError):
            files.replace(path_of(self.events, part, self.run), short.model_dump_json().encode())

    def found(self, *, hangs: bool = False) -> list[RankNote]:
        """Reads the notes of the other ranks. Ranks that failed by themselves come first."""
        paths = _paths(self.events, _KINDS[hangs], _safe(self.run))
        notes = [note for path in paths if (note := _read(path)) is not None]
        return sorted(notes, key=lambda note: (note.follows, note.time))

    def remove(self) -> None:
        """Removes the notes of this run and of earlier runs."""
        for kind in _KINDS.values():
            for path in _paths(self.events, kind, "*"):
                with suppress(OSError):
                    path.unlink()


def path_of(events: Path, part: str, run: str) -> Path:
    """The file `run.<part>.<run id>.json` of a run, next to `run.events.jsonl`."""
    return events.with_name(f"{stem(events)}.{part}.{_safe(run)}.json")


def _safe(run: str) -> str:
    return re.sub(r"[^\w.-]", "_", run)


def _paths(events: Path | None, kind: str, run: str) -> list[Path]:
    if events is None:
        return []
    return sorted(events.parent.glob(f"{glob.escape(f'{stem(events)}.{kind}')}*.{run}.json"))


def traces(notes: Iterable[RankNote]) -> str:
    """The first few tracebacks, each with its rank, as text."""
    shown = [f"rank {note.rank}:\n{note.trace}" for note in notes if note.trace]
    return "\n".join(shown[:_MAX_SHOWN])


def of_ranks(notes: Iterable[RankNote]) -> list[dict[str, Any]]:
    """How each rank ended, for the field `of_ranks` of the event `end`."""
    return [
        {
            "rank": note.rank,
            "outcome": str(note.ending),
            "why": f"step {note.step}: {note.why:.300}",
        }
        for note in sorted(notes, key=lambda note: note.rank)
    ]


def _read(path: Path) -> RankNote | None:
    try:
        return RankNote.model_validate_json(regular_file.read(path, _MAX_BYTES))
    except (OSError, ValueError):
        return None
