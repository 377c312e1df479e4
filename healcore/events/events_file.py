"""`EventsFile`: the events of a file, as `read` reads it."""

from __future__ import annotations

import os
from typing import NamedTuple

from healcore.events.json_lines import (
    Event,
    parse_line,
    read_lines,
)
from healcore.events.schema import SCHEMA


class LineProblem(NamedTuple):
    """A damaged or unexpected line. `line` counts from 1."""

    line: int
    problem: str


class EventsFile(NamedTuple):
    """What was read from an events file.

    Attributes:
        events: the events in file order. Several processes may have written them.
        problems: the damaged or unexpected lines, in file order.
    """

    events: list[Event]
    problems: list[LineProblem]

    def by_process(self) -> dict[str, list[Event]]:
        """Groups the events by the process that wrote them.

        Returns:
            Process id, the field `run` of an event -> events of the process. They are sorted by
            `seq`, because clocks may jump and a collector may have reordered the lines. A training
            run with restarts has several processes; `healcore.history.runs_of` joins them.
        """
        processes: dict[str, list[Event]] = {}
        for event in self.events:
            processes.setdefault(event["run"], []).append(event)
        for events in processes.values():
            events.sort(key=lambda event: event["seq"])
        return processes


def read(path: str | os.PathLike[str]) -> EventsFile:
    """Reads an events file, to which a process may still write.

        file = read("run.events.jsonl")
        for event in file.events:
            print(event["step"], event["kind"])

    Skips and lists damaged lines, such as an incomplete last line. Uses about 30 bytes of memory
    per byte of the file.

    Args:
        path: the file that `Log` wrote.

    Returns:
        The events, and the damaged or unexpected lines. An event of a newer schema is in both.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    file = EventsFile([], [])
    for number, event in read_lines(path, parse):
        if isinstance(event, str):
            file.problems.append(LineProblem(number, event))
            continue
        if event["schema"] > SCHEMA:
            text = f"schema {event['schema']} needs a newer healcore"
            file.problems.append(LineProblem(number, text))
        file.events.append(event)
    return file


def parse(line: bytes) -> Event | str:
    """Parses a line as an event.

    Args:
        line: the bytes of the line, with or without its newline.

    Returns:
        The event, in which `schema`, `seq`, `run` and `kind` have the right types, or the reason
        why the line is not an event. Other fields are not checked; see `models.validate`.
    """
    event = parse_line(line)
    if isinstance(event, str):
        return event
    for name in ("schema", "seq"):
        number = event.get(name)
        if type(number) is not int or not 0 <= number < 1 << 53:
            return f"{name} is not a whole number from 0 to 2^53: {number!r:.80}"
    for name in ("run", "kind"):
        text = event.get(name)
        if not isinstance(text, str):
            return f"{name} is not a string: {text!r:.80}"
    return event
