"""Reading an events file: what is whole is read, what is not is named by its line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

SCHEMA = 1
"""Version of the format. Kinds and fields may come without a new number; none changes its meaning
or goes."""

Event = dict[str, Any]

_BLOCK = 1 << 16
LONGEST = 1 << 24
"""Bytes of a line. No event has as many; a longer one is damage, and is not held in memory."""


class Problem(NamedTuple):
    """Something in a file that is no event, or should not be so."""

    line: int
    """From 1."""
    problem: str


class History(NamedTuple):
    """What a file tells."""

    events: list[Event]
    """In the order of the file."""
    problems: list[Problem]

    def runs(self) -> dict[str, list[Event]]:
        """Run id -> its events by sequence number; runs in the order of their first events.

        By number and not by time: clocks jump.
        """
        found: dict[str, list[Event]] = {}
        for event in self.events:
            found.setdefault(event["run"], []).append(event)
        return {run: sorted(events, key=lambda each: each["seq"]) for run, events in found.items()}


def read(path: str | os.PathLike[str]) -> History:
    """Reads a file, also while it is being written.

    Lines that are damaged (torn by a kill, a full disk, a power cut) are left out and named. A last
    line without its end is one of them. Of another writer's lines in between nothing is lost.

    Takes memory for the events, some 30 bytes for each byte of the file, and for one line.

    Raises:
        OSError: the file cannot be read.
    """
    events: list[Event] = []
    problems: list[Problem] = []
    seen: dict[tuple[str, int], int] = {}
    over, warned = set[str](), set[str]()
    with Path(path).open("rb") as file:
        for number, line in enumerate(lines(file), start=1):
            if not line.strip():  # where a writer ended a torn line that another had ended already
                continue
            event = parse(line)
            if isinstance(event, str):
                torn = not line.endswith(b"\n")
                problems.append(Problem(number, f"torn: {event}" if torn else event))
                continue
            run, key = event["run"], (event["run"], event["seq"])
            if key in seen:
                problems.append(
                    Problem(number, f"a second event {key[1]} of run {run}, as in line {seen[key]}")
                )
            seen.setdefault(key, number)
            if event["schema"] > SCHEMA:
                problems.append(
                    Problem(number, f"schema {event['schema']} is of a newer healcore than this")
                )
            if events and events[-1]["run"] != run:
                over.add(events[-1]["run"])
                if run in over and run not in warned:
                    warned |= {run, events[-1]["run"]}
                    problems.append(
                        Problem(number, f"runs {events[-1]['run']} and {run} write at once")
                    )
            events.append(event)
    return History(events, problems)


def last(path: str | os.PathLike[str]) -> Event | None:
    """The last whole event of a file; None if there is none. Reads from the end, a block at a time.

    Lines longer than `LONGEST` are passed over, in the memory of one.

    Raises:
        OSError: the file cannot be read.
    """
    for line in _backwards(Path(path)):
        event = parse(line)
        if not isinstance(event, str):
            return event
    return None


def parse(line: bytes) -> Event | str:
    """The event in a line, or in words why there is none."""
    if len(line) > LONGEST:
        return f"longer than {LONGEST >> 20} MB, which no event is"
    try:
        event = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return f"not JSON ({type(error).__name__}), {len(line)} bytes"
    if not isinstance(event, dict):
        return f"not a JSON object but {type(event).__name__}"
    for name in ("schema", "seq"):
        if type(event.get(name)) is not int or not 0 <= event[name] < 1 << 53:
            return f"{name} is not a whole number from 0 to 2^53: {event.get(name)!r:.80}"
    for name in ("run", "kind"):
        if not isinstance(event.get(name), str):
            return f"{name} is not a string: {event.get(name)!r:.80}"
    return event


def first_line(path: Path) -> bytes | None:
    """The first line of a file that is not blank, as far as `LONGEST`; None if there is none.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return next((line for line in lines(file) if line.strip()), None)


def lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; one that is too long comes as its first `LONGEST` bytes and one more."""
    while line := file.readline(LONGEST + 1):
        if len(line) > LONGEST:
            end = line
            while end and not end.endswith(b"\n"):
                end = file.readline(_BLOCK)
            line = line[:-1] + b"\n" if end else line
        yield line


def _backwards(path: Path) -> Iterator[bytes]:
    """The lines of a file, last first."""
    with path.open("rb") as file:
        place, rest, size = file.seek(0, os.SEEK_END), b"", _BLOCK
        over = False  # in a line that is too long to be held
        while place > 0:
            size = min(size, place)
            place -= size
            file.seek(place)
            rest, *whole = (file.read(size) + (b"" if over else rest)).split(b"\n")
            yield from reversed(whole[:-1] if over and whole else whole)
            over = (over and not whole) or len(rest) > LONGEST
            size = (
                _BLOCK if whole or over else 2 * size
            )  # a line of many blocks is not split again and again
        if not over:
            yield rest
