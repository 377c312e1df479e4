"""What is counted of a story, the same in the overview, on the cards and in the picture."""

from __future__ import annotations

from typing import NamedTuple

from healcore.tools.report.marking import SIGNS, kind_of
from healcore.tools.report.story import Story


class Counts(NamedTuple):
    """How often what happened, or would have."""

    incidents: int
    rollbacks: int
    """Incidents in which one was ordered."""
    again: str
    """Of those beyond one for each incident, in words; empty: there are none."""
    stops: int
    skips: int
    clips: int | None
    ends: str
    """How a run ended, or where a replayed one would have."""


def counts(story: Story) -> Counts:
    """Counts a story.

    A replay keeps only so many incidents; where it had more, its facts have the numbers.
    """
    cases = story.incidents
    incidents, _ = _fact(story, "incidents", len(cases))
    ordered = sum("ROLLBACK" in case.action for case in cases)
    rollbacks, rest = _fact(story, "rollbacks", ordered)
    again = _again(story.repeats, would=story.would) if story.repeats else rest
    if incidents <= len(cases):  # all are here
        if rollbacks > ordered and not again.startswith("and"):
            more = _again(rollbacks - ordered, would=story.would)
            again = ", ".join(each for each in (more, again) if each)
        incidents, rollbacks = len(cases), ordered
    skipped = story.skips
    if skipped is None:
        skipped = _fact(story, "steps skipped", sum(case.skipped for case in cases))[0]
    clipped = story.clips
    if clipped is None and "steps clipped" in story.facts:
        clipped = _fact(story, "steps clipped", 0)[0]
    return Counts(
        incidents=incidents,
        rollbacks=rollbacks,
        again=again,
        stops=sum("STOP" in case.action for case in cases),
        skips=skipped,
        clips=clipped,
        ends=_ends(story),
    )


def by_kind(story: Story) -> list[str]:
    """How many incidents have come to what; one with a rollback and a stop is among both."""
    counted = counts(story)
    found = {name: sum(kind_of(case) == name for case in story.incidents) for name in SIGNS}
    found |= {"stop": counted.stops, "rollback": counted.rollbacks}
    return [
        f"{found[name]} × {sign.told(story.would)}"
        + (f" ({counted.again})" if name == "rollback" and counted.again else "")
        for name, sign in SIGNS.items()
        if found[name]
    ]


def weight(story: Story) -> tuple[int, int, int]:
    """To sort by: the story in which most happened has the least."""
    counted = counts(story)
    return -counted.rollbacks, -counted.incidents, -counted.skips


def _again(count: int, *, would: bool) -> str:
    """Rollbacks after the first one of their incident."""
    why = "more had going back not helped" if would else "again in the same incident"
    return f"and {count} {why}"


def _ends(story: Story) -> str:
    if story.kind == "run":
        return story.facts.get("Ending", "")
    stops = [mark.step for mark in story.marks if mark.kind == "stop"]
    return f"would stop at step {stops[0]:.0f}" if stops else ""


def _fact(story: Story, name: str, otherwise: int) -> tuple[int, str]:
    """The number that a replay's fact begins with, and the words after it."""
    head, _, rest = story.facts.get(name, "").partition(", ")
    head = head.replace(",", "")
    return (int(head), rest) if head.isascii() and head.isdigit() else (otherwise, "")
