"""`PageReport`: what a report page shows of a run or a replay, and the texts about incidents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from healcore.console import counted
from healcore.events.kinds import flags_text, sentence
from healcore.events.models import Ending, EventRecord
from healcore.history import Counts, Curves, Incident, Mode
from healcore.history.run_history import MAX_ALARMS, RunAttempt
from healcore.runtime.reporting.diagnosis import STATES

MAX_LINES = 20
"""Limit of the lines of one kind that a report lists."""


class PageReport(NamedTuple):
    """What a report page shows of one run or replay.

    `read_reports` builds the report on a run that healcore watched, from the files of the run. A
    replay builds its own report (`Replay.report`). `healcore.tools.report.page.render` shows both.
    Values that are unknown, for example because an event is lost, are None or empty. A program
    reads the `HealingReport` of its own run instead.
    """

    title: str
    """Name of the run: its folder and, if it says more, its events file; or of the trace."""
    mode: Mode
    """Whether the run healed or observed, or is a replay."""
    policy_name: str
    """Name of the policy."""
    policy_toml: str
    """The policy as TOML, or an empty string if unknown."""
    fingerprint: str
    """16 hex digits, or empty if unknown."""
    curves: Curves
    """Curves for the plot, thinned."""
    incidents: tuple[Incident, ...]
    """All incidents, oldest first."""
    counts: Counts
    """Counts of the whole run."""
    facts: dict[str, str]
    """Name of a fact -> its text, for the table."""
    state: Ending | None = None
    """How the run ended, or None for a replay."""
    notes: tuple[str, ...] = ()
    """Sentences about damaged or missing data."""
    attempts: tuple[RunAttempt, ...] = ()
    """All attempts, oldest first."""
    alarms_outside: dict[float, tuple[str, ...]] = {}  # noqa: RUF012 -- never changed
    """Step -> causes, of the first alarms outside of incidents."""
    assessments: tuple[EventRecord, ...] = ()
    """The newest verdicts on the weights."""
    stopped_step: float | None = None
    """Step at which a replay would stop, or None."""
    missing: tuple[str, ...] = ()
    """Clauses about signals that the last rows of a replay lack."""
    diagnosis: str = ""
    """The diagnosis of the postmortem, or an empty string."""
    unrepaired: tuple[int, ...] = ()
    """Steps at which damage began that was not repaired, or empty."""

    @property
    def is_hypothetical(self) -> bool:
        """Whether the report shows what the policy would have done, in mode OBSERVE or REPLAY.

        The page then says "would have been skipped": a reader must not take an observed skip for a
        step that was skipped.
        """
        return self.mode is not Mode.HEAL

    def heading(self) -> str:
        """Describes the run in a line: its name, its policy and its result."""
        name = self.title
        result = self.ending()
        if self.mode is Mode.REPLAY:
            name = f"Replay of {name}"
            result = result or counted(self.counts.alarms or 0, "alarm")
        return f"{name}: policy {self.policy_name}, {result}"

    def ending(self) -> str:
        """Describes the end of the run.

        Returns:
            How the run ended, such as "completed", or "completed, with damage" if damage was not
            repaired. For a replay, the step at which a live run would stop, and the signals that
            the last rows lack, or an empty string.
        """
        if self.state is not None:
            return ending_text(self.state, self.unrepaired)
        clauses = [*self.missing]
        if self.stopped_step is not None:
            clauses.insert(0, f"would stop at step {self.stopped_step:.0f}")
        return "; ".join(clauses)


def ending_text(state: Ending, unrepaired: Sequence[int]) -> str:
    """How a run ended, and whether damage is left.

    Args:
        state: how the run ended.
        unrepaired: steps at which damage began that was not repaired.
    """
    if unrepaired and state is Ending.COMPLETED:
        return f"{STATES[state]}, with damage"
    return STATES[state]


# -- texts about incidents ------------------------------------------------------------------------


def cause_text(incident: Incident) -> str:
    """The causes of an incident, such as "nonfinite loss", or why the run was rolled back."""
    if incident.cause:
        return flags_text(incident.cause)
    for event in incident.responses:
        if event.why:
            return event.why
    return "a rollback without an alarm"


def batches_text(incident: Incident) -> str:
    """Describes the batches of an incident: their epoch, the first and the last.

    Args:
        incident: an incident. If batches were skipped, only these are described.

    Returns:
        A text such as "epoch 0: 7–12 (6 skipped)", or an empty string without batches.
    """
    batches = sorted(incident.skipped_batches or incident.first.batches or ())
    if not batches:
        return ""
    (epoch, first), (last_epoch, last) = batches[0], batches[-1]
    text = f"epoch {epoch}: {step_range(first, last)}"
    if epoch != last_epoch:
        text = f"epoch {epoch}: {first} to epoch {last_epoch}: {last}"
    if incident.skipped_batches:
        text += f" ({len(batches)} skipped)"
    return text


def step_range(first: float, last: float) -> str:
    """Formats the first and the last step of a range as a text such as "7" or "7–12"."""
    if first == last:
        return f"{first:.0f}"
    return f"{first:.0f}–{last:.0f}"


def response_text(incident: Incident) -> str:
    """Describes what was done about an incident.

    Args:
        incident: an incident of a healed run, of a run that was only observed, or of a replay.

    Returns:
        The responses of the run, such as "skipped 3 steps, then training continued". For an
        observed run or a replay, what the policy would have done.
    """
    responses = [sentence(event) for event in incident.responses]
    if incident.mode is not Mode.HEAL:
        return "; ".join([_would_text(incident), *responses])
    if incident.skipped and not incident.rolled_back:
        responses.insert(0, f"skipped {skipped_text(incident)}")
    if not incident.rolled_back and incident.last_kind != "stop":
        responses.append("training continued")
    return "; ".join(responses)


def skipped_text(incident: Incident) -> str:
    """Describes the number of skipped steps, such as "3 steps", or "100 steps or more"."""
    text = counted(incident.skipped, "step")
    if incident.alarms >= MAX_ALARMS:
        text += " or more"
    return text


def _would_text(incident: Incident) -> str:
    """What the policy would have done, if its orders had been carried out."""
    parts: list[str] = []
    if incident.skipped:
        parts.append(f"skipped {skipped_text(incident)}")
    if incident.clipped:
        parts.append(f"clipped {counted(incident.clipped, 'step')}")
    if "ROLLBACK" in incident.action:
        parts.append("rolled back")
    if "STOP" in incident.action:
        parts.append("stopped the run")
    if not parts:
        return "alert only"
    return f"would have {', '.join(parts)}"
