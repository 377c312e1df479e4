"""A directory as the log of runs: which of its files are one, and in which order."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from healcore.tools.traces.batch import Reader
from healcore.tools.traces.findings import Findings
from healcore.tools.traces.kinds import DOCUMENT, PREFERRED, RECORDS, TABLE, kind_of
from healcore.tools.traces.names import listed
from healcore.tools.traces.text import head
from healcore.tools.traces.trace import TraceError, Unreadable

_CHECKPOINT = re.compile(r"checkpoint-(\d+)$")
STATE = "trainer_state.json"


class NoLog(TraceError):
    """A directory without a file of a known kind."""


_BESIDE = frozenset({TABLE, DOCUMENT, RECORDS})


def members(path: str, told: Findings, failed: list[Unreadable]) -> list[str]:
    """The files of a directory that are read, of one kind, in the order of their names.

    Numbers in names count as numbers: log-2 comes before log-10, and TensorBoard's files, which
    have the time in their names, in the order of time. What is left aside is told.

    A directory that the Trainer writes has its log in every checkpoint, complete up to there: the
    newest of them is read if there is none beside them.

    Raises:
        TraceError: no file is of a known kind.
    """
    by_kind: dict[str, list[str]] = {}
    unknown: list[str] = []
    for name in sorted(os.listdir(path), key=_natural):
        file = os.path.join(path, name)
        if name.startswith(".") or not os.path.isfile(file):
            continue
        try:
            by_kind.setdefault(kind_of(head(file)), []).append(file)
        except OSError as error:
            failed.append(Unreadable(file, f"it cannot be read: {error.strerror or error}"))
        except TraceError:
            unknown.append(name)  # weights, configurations: a run's directory is full of them
    kind = next((kind for kind in PREFERRED if kind in by_kind), None)
    if kind is not None:
        for other, files in by_kind.items():
            if other != kind:
                names = listed([os.path.basename(file) for file in files])
                told.note(path, None, f"{names} ({other}): left aside, the {kind} are read")
        if unknown:
            told.note(path, None, f"{listed(unknown)}: left aside, of no known kind")
        return by_kind[kind]
    states = [
        (int(found[1]), os.path.join(path, name, STATE))
        for name in os.listdir(path)
        if (found := _CHECKPOINT.match(name)) and os.path.isfile(os.path.join(path, name, STATE))
    ]
    if states:
        return [max(states)[1]]
    raise NoLog("it is a directory without a file of a known kind. Name the files")


def folders(path: str) -> list[str]:
    """The directories in a directory, in the order of their names, but for the Trainer's own."""
    names = sorted(os.listdir(path), key=_natural)
    mine = (name for name in names if not name.startswith(".") and not _CHECKPOINT.match(name))
    found = (os.path.join(path, name) for name in mine)
    return [folder for folder in found if os.path.isdir(folder)]


def apart(readers: Sequence[Reader]) -> list[list[Reader]]:
    """Files of one directory, as runs.

    TensorBoard's files, typed records and our own are one run to a directory, by their own
    convention: there a fresh start is a run that died before its first checkpoint. Tables and the
    like are seeds, or other recipes, beside each other, unless their names differ in a number only
    (log-1, log-2) and each begins after the first step of the one before, as a resumed run does.
    """
    runs: list[list[Reader]] = []
    before: tuple[str, float | None] = ("", None)
    for reader in readers:
        name = re.sub(r"\d+", "#", os.path.basename(reader.path))
        first = _first_step(reader)
        same, began = before
        goes_on = name == same and first is not None and began is not None and first > began
        if runs and (goes_on or kind_of(head(reader.path)) not in _BESIDE):
            runs[-1].append(reader)
        else:
            runs.append([reader])
        before = name, first
    return runs


def _first_step(reader: Reader) -> float | None:
    """None where the file has no steps."""
    batch = next((each for each in reader.batches(Findings()) if len(each.line)), None)
    return None if batch is None or batch.step is None else float(batch.step[0])


def _natural(name: str) -> list[tuple[int, str]]:
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]
