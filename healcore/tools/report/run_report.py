"""Defines the data of a report on a run or a replay, and places the markers of incidents."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from healcore.console import counted
from healcore.history import Counts, Curves, Incident, IncidentOutcome, Mode
from healcore.history.incident import count_incidents
from healcore.history.process import RunState
from healcore.history.run import AttemptOrigin, Mark, RunAttempt
from healcore.runtime.postmortem.sentences import STATES, repeats

_ORIGINS = {
    AttemptOrigin.START: "the start",
    AttemptOrigin.PROCESS: "another process",
    AttemptOrigin.RESUME: "resumed",
    AttemptOrigin.ROLLBACK: "rollback",
    AttemptOrigin.METRICS: "without an event",
}
_MAX_GAPS = 5
_MARKER_ROWS = 4
"""Number of rows of markers above the curves."""
MAX_LABELLED = 60
"""Number of incidents above which markers have no number."""


class Marker(NamedTuple):
    """Text, shape and colour of an outcome."""

    outcome: IncidentOutcome
    done: str
    would: str
    symbol: str
    """Shape in the page."""
    matplotlib: str
    """Shape in the picture."""
    colour: str
    """Colour in the picture, safe for colour-blind readers. page.css has the page's colours."""

    def label(self, would: bool) -> str:
        """Returns the text for a run, with `would` for an observed run or a replay."""
        return self.would if would else self.done


_O = IncidentOutcome
MARKERS = {
    marker.outcome: marker
    for marker in (
        Marker(_O.STOP, "stopped the run", "would have stopped", "square", "s", "#000000"),
        Marker(_O.ROLLBACK, "rollback", "would have rolled back", "triangle-left", "<", "#C04A00"),
        Marker(_O.SKIP, "skipped", "would have skipped", "triangle-down", "v", "#9A6700"),
        Marker(_O.ALERT, "alert only", "alert only", "circle", "o", "#A8517F"),
    )
}
"""Outcome -> marker, the most severe outcome first."""


class RunReport(NamedTuple):
    """The report on a run or a replay."""

    title: str
    mode: Mode
    policy_name: str
    policy_toml: str
    """The policy as TOML, or an empty string if unknown."""
    fingerprint: str
    curves: Curves
    incidents: tuple[Incident, ...]
    counts: Counts
    facts: dict[str, str]
    state: RunState | None = None
    """How the run ended, or None for a replay."""
    notes: tuple[str, ...] = ()
    """Sentences about damaged or missing data."""
    attempts: tuple[RunAttempt, ...] = ()
    marks: tuple[Mark, ...] = ()
    diagnosis: str = ""
    """The diagnosis of the postmortem, or an empty string."""
    unreadable: str = ""
    """Why the metrics could not be read, or an empty string."""

    @property
    def would(self) -> bool:
        """Whether the report shows what the policy would have done, in mode OBSERVE or REPLAY."""
        return self.mode is not Mode.HEAL

    @property
    def row_count(self) -> str:
        """Number of rows of the run, as text."""
        rows = self.curves.rows
        return f"{len(self.curves.step) if rows is None else rows:,}"

    def attempt_text(self, attempt: RunAttempt) -> str:
        """Describes the start of an attempt, and counts its incidents."""
        own = [each for each in self.incidents if each.attempt == attempt.number]
        number = count_incidents(own).incidents
        incidents = counted(number, "incident") if number else "no incident"
        origin = _ORIGINS.get(attempt.origin) or attempt.source or attempt.number
        return f"from step {attempt.first_step:.0f} ({origin}): {incidents}"

    def ending(self) -> str:
        """Returns how the run ended, the step of a replay's stop, or an empty string."""
        if self.state is not None:
            return STATES[self.state]
        stops = [mark.step for mark in self.marks if mark.kind == "stop"]
        return f"step {stops[0]:.0f}" if stops else ""

    def gaps(self) -> list[str]:
        """Returns sentences about missing steps in the curves."""
        what = "no row" if self.mode is Mode.REPLAY else "no metrics"
        lines = []
        for gap in self.curves.gaps():
            low, high = gap.low + gap.stride, gap.high - gap.stride
            lines.append(
                f"{what} for steps {low:.0f}–{high:.0f}: the curves are broken there"
                if gap.exact
                else f"{what} for some {gap.missing:.0f} steps between {gap.low:.0f} and "
                f"{gap.high:.0f}"
            )
        lines = list(dict.fromkeys(lines))  # two attempts may miss the same steps
        more = len(lines) - _MAX_GAPS
        return lines[:_MAX_GAPS] + ([f"{what} at {more} more places"] if more > 0 else [])

    def outcomes(self) -> list[str]:
        """Counts incidents per outcome, as texts. A rollback with a later stop counts as both."""
        numbers = Counter(incident.outcome for incident in self.incidents)
        numbers[IncidentOutcome.STOP] = self.counts.stops
        numbers[IncidentOutcome.ROLLBACK] = self.counts.rollbacks
        again = repeats(self.counts, would=self.would)
        return [
            f"{numbers[outcome]} × {marker.label(self.would)}"
            + (f" ({again})" if outcome is IncidentOutcome.ROLLBACK and again else "")
            for outcome, marker in MARKERS.items()
            if numbers[outcome]
        ]

    def stop_after_rollback(self, index: int) -> tuple[float, int] | None:
        """Returns step and row index (-1: unknown) of the stop after incident `index`, or None."""
        incident = self.incidents[index]
        if incident.outcome is not IncidentOutcome.ROLLBACK or not incident.stopped:
            return None
        if incident.stop_step is not None:
            return incident.stop_step, incident.stop
        after = self.incidents[index + 1 : index + 2]
        end = after[0].onset_step if after and after[0].attempt == incident.attempt else np.inf
        stops = (mark.step for mark in self.marks if mark.kind == "stop")
        stop = next((step for step in stops if incident.onset_step <= step < end), None)
        return None if stop is None else (stop, -1)


def by_severity(reports: Sequence[RunReport]) -> list[RunReport]:
    """Sorts by rollbacks, incidents and skipped steps, in decreasing order."""
    counts = operator.attrgetter("counts.rollbacks", "counts.incidents", "counts.skips")
    return sorted(reports, key=counts, reverse=True)


def short_names(reports: Sequence[RunReport]) -> list[str]:
    """Returns the last two parts of each title's path, or the title if two titles share them."""
    titles = [report.title for report in reports]
    short = {title: "/".join(title.split("/")[-2:]) for title in titles}
    counts = Counter(short.values())
    return [short[title] if counts[short[title]] == 1 else title for title in titles]


# -- marks of incidents in the page and the picture ------------------------------------------------


def is_wide(values: np.ndarray | None) -> bool:
    """Whether values need a logarithmic axis: all are positive, and their ratio exceeds 30."""
    if values is None:
        return False
    finite = values[np.isfinite(values)]
    return bool(len(finite)) and bool(finite.min() > 0) and bool(finite.max() / 30 > finite.min())


def marker_rows(steps: Sequence[float], width: float, rows: int) -> list[int]:
    """Returns the row of each marker, which with its number is `width` steps wide.

    Overlapping markers get different rows. If no row is free, a marker gets the last row.
    """
    ends = [-np.inf] * rows
    assigned = [0] * len(steps)
    for i in np.argsort(np.asarray(steps, float), kind="stable"):
        row = next((row for row in range(rows) if steps[i] >= ends[row]), rows - 1)
        ends[row], assigned[i] = steps[i] + width, row
    return assigned


def has_room(steps: Sequence[float], rows: Sequence[int], width: float) -> list[bool]:
    """Returns whether each marker is at least `width` steps before the next marker in its row."""
    room = [True] * len(steps)
    following: dict[int, float] = {}
    for i in np.argsort(np.asarray(steps, float), kind="stable")[::-1].tolist():
        room[i] = following.get(rows[i], np.inf) - steps[i] >= width
        following[rows[i]] = steps[i]
    return room


def place_markers(
    steps: Sequence[float], axis: np.ndarray, share: float
) -> tuple[list[int], list[bool]]:
    """Returns the row of each marker above the curves, and whether its number has room.

    A marker with its number takes the fraction `share` of the step axis, which spans `axis`.
    """
    width = share * max(float(np.ptp(axis)) if len(axis) else 1.0, 1.0)
    rows = marker_rows(steps, width, _MARKER_ROWS)
    return rows, has_room(steps, rows, width)
