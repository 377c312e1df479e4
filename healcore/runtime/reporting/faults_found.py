"""Lists the faults of a run, with the remedy of each and the steps that it cost."""

from __future__ import annotations

from typing import NamedTuple

from healcore.console import counted
from healcore.events.kinds import flags_text, sentence
from healcore.history import Incident, Mode, RunHistory


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

    Alarms outside of incidents are one fault for each cause. Alarms that a rollback has undone are
    not listed: the final weights do not depend on them.

    Args:
        history: what happened in the run. It has at most 1,000 alarms outside of incidents, and the
            newest 20 exceptions.

    Returns:
        The faults in the order of their first step.
    """
    faults: list[FaultFound] = []
    for incident in history.incidents:
        where = _steps_text(incident.onset_step, incident.end)
        remedies = _remedies(incident)
        text = f"{where}: {incident_cause_text(incident)}. {'. '.join(remedies)}."
        has_remedy = bool(incident.skipped or incident.responses)
        faults.append(FaultFound(incident.onset_step, has_remedy, text))
    alarms: dict[tuple[str, ...], list[float]] = {}
    for step, causes in sorted(history.alarms_outside(undone=False).items()):
        alarms.setdefault(causes, []).append(step)
    for causes, steps in alarms.items():
        text = f"{_steps_text(steps[0], steps[-1])}: {flags_text(causes)}"
        if len(steps) > 1:
            text += f" at {len(steps):,} steps"
        text += ". No remedy: an alarm alone changes nothing."
        faults.append(FaultFound(steps[0], False, text))
    for event in history.of("fault", "retried")[-20:]:
        if event.kind == "fault" and event.answer in (None, "save"):
            continue  # the exception ended the run, as the headline says
        step = float(event.step or 0)
        text = f"{_steps_text(step, step)}: {sentence(event).removeprefix('fault: ')}."
        faults.append(FaultFound(step, True, text))
    return sorted(faults, key=lambda fault: fault.first)


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
        phrases.append(f"skipped {counted(incident.skipped, 'step')}")
        if incident.capped:
            phrases[0] += " or more"
    for event in incident.responses:
        if event.kind != "stop":  # the headline has its reason
            phrases.append(sentence(event))
    if incident.undone_by is not None and not incident.rolled_back:
        phrases.append(f"undone by the rollback from step {incident.undone_by.step or 0}")
    if incident.mode is Mode.OBSERVE:
        phrases = [f"only observed: {phrase}" for phrase in phrases]
    return [phrase[:1].upper() + phrase[1:] for phrase in phrases or ["training continued"]]
