"""Writes an alarm into the events and, if the run is ended, the postmortem.

A process of its own, which a guard starts: the training process cannot write any more.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from healcore.core.verdict import Cause, names
from healcore.runtime.events import Log
from healcore.runtime.events.models import Ending
from healcore.runtime.hang_guard.alarm import Evidence, listed
from healcore.runtime.hang_guard.process_signals import END
from healcore.runtime.postmortem import postmortem
from healcore.runtime.postmortem.postmortem import RankStacks


def write(given: Mapping[str, Any]) -> None:
    """Writes what a guard gives as JSON, see `Alarm._report`; and a line on standard error."""
    found = [Evidence(**each) for each in given["found"]]
    why = reason(found, given["world"])
    line = f"healcore: {why}"
    if given["ends"]:
        line += f"; every rank ends with exit status {END}"
    elif given["why_not"]:
        line += f"; the run is not ended: {given['why_not']}"
    line += f"; the stacks are in {given['events'] or given['folder']}"
    print(line, file=sys.stderr, flush=True)
    if given["events"] is None:
        return
    stacks = grouped(found)
    answer = "stop" if given["ends"] else "alert"
    text = why + (f"; not ended: {given['why_not']}" if given["why_not"] else "")
    step = max(each.step for each in found)
    end = postmortem.end_of_hung(given["events"], step=step, why=why)
    events = Log(given["events"], run=given["run"], follow_links=given["follow_links"])
    events.write(
        "fault",
        step=end.step,
        cause=names(Cause.HANG),
        sign="no step within the time-out",
        problem=text,
        answer=None if given["observes"] else answer,
        observed=True if given["observes"] else None,
        seconds=max(each.waits_s for each in found),
        stacks=stacks,
    )
    if not given["ends"]:
        return
    problem = postmortem.write_hung(end, events, stacks)
    if problem:
        print(f"healcore: {problem}", file=sys.stderr, flush=True)
    events.write("stop", step=end.step, why=why, diagnosis=postmortem.explain(end))
    events.write("end", step=end.step, ending=Ending.STOPPED, incidents=end.incidents)


def reason(found: Sequence[Evidence], world: int) -> str:
    """What has happened, as a sentence without its end."""
    longest = max(found, key=lambda each: each.waits_s)
    text = f"rank {longest.rank} has been within one step for {longest.waits_s:.0f} s"
    stopped = [each.rank for each in found if each.stopped]
    if stopped:
        text += f"; rank {listed(stopped)} is stopped by a signal (SIGSTOP)"
    missing = [rank for rank in range(world) if rank not in {each.rank for each in found}]
    if missing:
        text += f"; rank {listed(missing)} has not answered"
    return text


def grouped(found: Sequence[Evidence]) -> list[RankStacks]:
    """The stacks, those of ranks whose training threads stand at the same place only once."""
    groups: dict[str, list[Evidence]] = {}
    for each in found:
        # Without the first line, which has the number of the thread.
        place = each.stacks.partition("\n\n")[0].partition("\n")[2]
        groups.setdefault(place, []).append(each)
    return [
        RankStacks(
            tuple(each.rank for each in same),
            f"host {same[0].host}, pid {same[0].pid}\n{same[0].stacks}",
        )
        for same in groups.values()
    ]
