"""Lists the faults of a run, with the remedy of each and the steps that it cost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from healcore.console import counted
from healcore.events.models import EventRecord
from healcore.events.schema import sentence
from healcore.events.sentences import flags_text
from healcore.history import Incident, Mode, RunHistory

_QUIET_STEPS = 10  # alarms of one cause with fewer steps between them are one fault


class FaultFound(NamedTuple):
    """A fault of a run: an incident, alarms that changed nothing, or an exception with an answer.

    Attributes:
        first: its first step.
        has_remedy: whether the policy did something about it.
        text: what it was, the remedy, and the steps that it cost.
    """

    first: float
    has_remedy: bool
    text: str


def faults_found(history: RunHistory) -> list[FaultFound]:
    """Lists the faults of a run with the remedy of each and the steps that it cost.

    Args:
        history: what happened in the run. It has at most 1,000 alarms outside of incidents, and the
            newest 20 exceptions.

    Returns:
        The faults in the order of their first step.
    """
    faults: list[FaultFound] = []
    for incident in history.incidents:
        if incident.lost:  # the restart has repeated its steps, with an incident of its own
            continue
        where = _steps_text(incident.onset_step, incident.end)
        remedies = _remedies(incident)
        if incident.undone_by is not None and not incident.rolled_back:
            remedies.append(_undone_text(incident.undone_by))
        remedy = ". ".join(remedies) or "Training continued"
        text = f"{where}: {incident_cause_text(incident)}. {remedy}."
        faults.append(FaultFound(incident.onset_step, bool(remedies), text))
    for alarms in _alarms_outside(history):
        remedy = "No remedy: an alarm alone changes nothing"
        if alarms.undone_by is not None:
            remedy = _undone_text(alarms.undone_by)
        text = f"{_steps_text(alarms.first, alarms.last)}: {flags_text(alarms.causes)}. {remedy}."
        faults.append(FaultFound(alarms.first, False, text))
    for event in (*history.newest["fault"], *history.newest["retried"]):
        if event.kind == "fault" and event.answer in (None, "save"):
            continue  # the exception ended the run, as the headline says
        step = float(event.step or 0)
        text = f"{_steps_text(step, step)}: {sentence(event).removeprefix('fault: ')}."
        faults.append(FaultFound(step, True, text))
    return sorted(faults, key=lambda fault: fault.first)


def joined(faults: Sequence[FaultFound]) -> list[FaultFound]:
    """Joins faults whose texts differ in their numbers only.

    A fault that comes back in each repeat of its steps would otherwise fill the list.

    Args:
        faults: the faults, in the order of their first step.

    Returns:
        The first fault of each kind, in the same order, with the number of faults like it.
    """
    alike: dict[str, list[FaultFound]] = {}
    for fault in faults:
        alike.setdefault(re.sub(r"[0-9][0-9.,e+-]*", "#", fault.text), []).append(fault)
    found: list[FaultFound] = []
    for first, *others in alike.values():
        text = first.text
        if others:
            step = max(fault.first for fault in others)
            where = f"from step {step:.0f}"
            if len(others) > 1:
                where = f"the last {where}"
            text += f" And {len(others):,} more like it, {where}."
        found.append(first._replace(text=text))
    return found


def _undone_text(rollback: EventRecord) -> str:
    """Which rollback has undone a fault, as a sentence without its full stop."""
    return f"Undone by the rollback from step {rollback.step or 0}"


class _Alarms(NamedTuple):
    """Close alarms outside of incidents with the same causes."""

    first: float
    last: float
    causes: tuple[str, ...]
    undone_by: EventRecord | None
    """The rollback that has undone them, or None."""


def _alarms_outside(history: RunHistory) -> list[_Alarms]:
    """The alarms outside of incidents, close alarms as one."""
    found: list[_Alarms] = []
    undone: list[_Alarms] = []
    alarms: list[_Alarms] = []
    for step, causes in sorted(history.alarms_outside.items()):
        alarms.append(_Alarms(step, step, causes, history.alarms_undone_by.get(step)))
    for alarm in alarms:
        if alarm.undone_by is None:
            _add_alarm(found, alarm)
    for alarm in alarms:
        # In the midst of alarms that have come again, an undone alarm says nothing new.
        if alarm.undone_by is not None and not any(_covers(group, alarm) for group in found):
            _add_alarm(undone, alarm)
    return found + undone


def _add_alarm(groups: list[_Alarms], alarm: _Alarms) -> None:
    """Adds an alarm to the last group if it is close to the group, or begins another group."""
    if groups:
        last = groups[-1]
        is_same = last.causes == alarm.causes and last.undone_by is alarm.undone_by
        if is_same and alarm.first - last.last <= _QUIET_STEPS:
            groups[-1] = last._replace(last=alarm.last)
            return
    groups.append(alarm)


def _covers(group: _Alarms, alarm: _Alarms) -> bool:
    """Whether an alarm has the causes of a group, and is between its first and last alarm."""
    return group.causes == alarm.causes and group.first <= alarm.first <= group.last


def _steps_text(first: float, last: float) -> str:
    """A range of steps as text: "step 7" or "steps 7 to 12"."""
    if first == last:
        return f"step {first:.0f}"
    return f"steps {first:.0f} to {last:.0f}"


_FOUND_BY = {
    "earlier_weights": "earlier weights were better on the same batches",
    "nonfinite_steps": "no finite step any more",
    "intended_numbers": "a change that the program makes on purpose",
}
"""`EventRecord.by` of a rollback without an alarm -> what was wrong."""


def incident_cause_text(incident: Incident) -> str:
    """Describes what was wrong in an incident.

    Args:
        incident: the incident, or a rollback without an alarm.

    Returns:
        Its causes, such as "nonfinite loss". Without an alarm, why the run was rolled back.
    """
    if incident.cause:
        return flags_text(incident.cause)
    if incident.number:
        return "unknown cause"
    by = ""
    for event in incident.responses:
        if event.by == "state" and event.problem:
            return event.problem
        by = by or event.by or ""
    return _FOUND_BY.get(by, "a rollback without an alarm")


def _remedies(incident: Incident) -> list[str]:
    """What was done about an incident, as sentences without their full stop."""
    phrases: list[str] = []
    if incident.skipped:
        steps = counted(incident.skipped, "step")
        if incident.capped:
            steps += " or more"
        phrases.append(f"skipped {steps}")
    for event in incident.responses:
        if event.kind != "stop":  # the headline has its reason
            phrases.append(sentence(event))
    if incident.mode is Mode.OBSERVE:
        phrases = [f"only observed: {phrase}" for phrase in phrases]
    return [phrase[:1].upper() + phrase[1:] for phrase in phrases]
