"""`PageReport`: what a report page shows of a run or a replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from healcore.console import counted
from healcore.events.models import Ending, EventRecord
from healcore.history import Counts, Curves, Incident, Mode
from healcore.history.run_history import RunAttempt
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

    def heading(self, name: str) -> str:
        """Describes the run in a line: its name, its policy and its result.

        Args:
            name: the name of the run on the page.
        """
        result = self.ending().partition(":")[0]
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


def short_names(reports: Sequence[PageReport]) -> list[str]:
    """Shortens the titles of reports, which may be long paths.

    Args:
        reports: the reports of one page.

    Returns:
        For each report the last two parts of the path in its title, or the whole title if other
        titles have the same last parts.
    """
    short: dict[str, str] = {}
    for report in reports:
        parts = [part for part in report.title.split("/") if part not in (".", "..")]
        short[report.title] = "/".join(parts[-2:])
    counts = Counter(short.values())
    names: list[str] = []
    for report in reports:
        name = short[report.title]
        if counts[name] > 1:
            name = report.title
        names.append(name)
    return names
