"""Which processes of an events file are one training run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from healcore.runtime.events.reading import Event


class Lineage(NamedTuple):
    """A training run: a process that began afresh, and those that went on from its checkpoints."""

    runs: tuple[str, ...]
    """Ids of the processes, in order."""
    events: tuple[Event, ...]
    """Of all of them; within one by sequence number."""


def lineages(runs: dict[str, list[Event]]) -> list[Lineage]:
    """Groups them.

    Args:
        runs: run id -> its events, as `History.runs` gives them.
    """
    found: list[Lineage] = []
    for run, events in runs.items():
        if found and _goes_on(events):
            before = found[-1]
            found[-1] = Lineage((*before.runs, run), (*before.events, *events))
        else:
            found.append(Lineage((run,), tuple(events)))
    return found


def _goes_on(events: Sequence[Event]) -> bool:
    """Whether a process went on from a checkpoint of the one before.

    A rollback that was cut short by a kill is finished by the next start, which then tells no
    `resume`.
    """
    for event in events:
        if event["kind"] == "resume" or event.get("outcome") == "finished after a crash":
            return True
        if event["kind"] in ("save", "alarm", "incident"):
            return False
    return False
