"""The data of a report: one run, or one replay of a run; and how its incidents are marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from healcore.console import counted
from healcore.history import Counts, Curves, Incident, IncidentOutcome, Mode
from healcore.history.process import RunState
from healcore.history.run import AttemptOrigin, Mark, RunAttempt
from healcore.runtime.postmortem.sentences import STATES, repeats

_ORIGINS = {
    AttemptOrigin.START: "the start",
    AttemptOrigin.PROCESS: "another process",
    AttemptOrigin.RESUME: "resumed",
    AttemptOrigin.ROLLBACK: "rollback",
    AttemptOrigin.TRIAL: "trial",
    AttemptOrigin.METRICS: "in no event",
}
_GAPS = 5
_LANE = 4
"""Rows of the lane above the curves, in which the incidents are marked."""
LABELLED = 60
"""Incidents up to which each has its number next to its marker."""


class Marker(NamedTuple):
    """The mark of an outcome. `symbol` is its shape in the page, `matplotlib` in the picture."""

    outcome: IncidentOutcome
    done: str
    would: str
    """Text instead of `done` in an observed or replayed run."""
    symbol: str
    matplotlib: str
    colour: str
    """Colour in the picture, distinct for the colour-blind. The page has its colours in CSS."""

    def label(self, would: bool) -> str:
        """The outcome as text; `would` for a run that was only observed or replayed."""
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
"""The most severe first."""


class RunReport(NamedTuple):
    """One run: curves, incidents, counts and facts."""

    title: str
    mode: Mode
    policy_name: str
    policy_toml: str
    """An empty string if unknown."""
    fingerprint: str
    curves: Curves
    incidents: tuple[Incident, ...]
    counts: Counts
    facts: dict[str, str]
    state: RunState | None = None
    """How the run ended, or None for a replay."""
    notes: tuple[str, ...] = ()
    """Damaged lines and missing parts of the sources."""
    attempts: tuple[RunAttempt, ...] = ()
    marks: tuple[Mark, ...] = ()
    diagnosis: str = ""
    """The diagnosis of the postmortem, or an empty string."""
    unreadable: str = ""
    """Why the metrics could not be read at all, or an empty string."""

    @property
    def would(self) -> bool:
        """Whether the run was observed or replayed: the report has what the policy would do."""
        return self.mode is not Mode.HEAL

    @property
    def row_count(self) -> str:
        """Number of rows of the run."""
        rows = self.curves.rows
        return f"{len(self.curves.step) if rows is None else rows:,}"

    def attempt_text(self, attempt: RunAttempt) -> str:
        """The start of an attempt, and its number of incidents."""
        number = sum(incident.attempt == attempt.number for incident in self.incidents)
        incidents = counted(number, "incident") if number else "no incident"
        origin = _ORIGINS.get(attempt.origin) or attempt.source or attempt.number
        return f"from step {attempt.first_step:.0f} ({origin}): {incidents}"

    def ending(self) -> str:
        """How a run ended, or the step at which a replayed run would stop, or an empty string."""
        if self.state is not None:
            return STATES[self.state]
        stops = [mark.step for mark in self.marks if mark.kind == "stop"]
        return f"step {stops[0]:.0f}" if stops else ""

    def gaps(self) -> list[str]:
        """Sentences about missing steps in the curves."""
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
        lines = list(dict.fromkeys(lines))  # repeated steps may be missing twice
        more = len(lines) - _GAPS
        return lines[:_GAPS] + ([f"{what} at {more} more places"] if more > 0 else [])

    def outcomes(self) -> list[str]:
        """Number of incidents per outcome. A rollback with a later stop counts as both."""
        counts = self.counts
        found = {
            one: sum(incident.outcome is one for incident in self.incidents) for one in MARKERS
        }
        found |= {IncidentOutcome.STOP: counts.stops, IncidentOutcome.ROLLBACK: counts.rollbacks}
        again = repeats(counts, would=self.would)
        return [
            f"{found[one]} × {marker.label(self.would)}"
            + (f" ({again})" if one is IncidentOutcome.ROLLBACK and again else "")
            for one, marker in MARKERS.items()
            if found[one]
        ]

    def stop_after_rollback(self, place: int) -> tuple[float, int] | None:
        """Step and row index (-1 if unknown) of the stop after the rollback of an incident."""
        incident = self.incidents[place]
        if incident.outcome is not IncidentOutcome.ROLLBACK or "STOP" not in incident.action:
            return None
        if incident.stop_step is not None:
            return incident.stop_step, incident.stop
        after = self.incidents[place + 1 : place + 2]
        end = after[0].onset_step if after and after[0].attempt == incident.attempt else np.inf
        stops = (mark.step for mark in self.marks if mark.kind == "stop")
        at = next((step for step in stops if incident.onset_step <= step < end), None)
        return None if at is None else (at, -1)


def by_severity(reports: Sequence[RunReport]) -> list[RunReport]:
    """Sorts by rollbacks, incidents and skipped steps, the most first."""
    return sorted(
        reports,
        key=lambda each: (-each.counts.rollbacks, -each.counts.incidents, -each.counts.skips),
    )


def short_names(reports: Sequence[RunReport]) -> list[str]:
    """The last two parts of each title's path, or the whole title if two would be equal."""
    ends = ["/".join(each.title.split("/")[-2:]) for each in reports]
    whole = {end: {r.title for r, e in zip(reports, ends, strict=True) if e == end} for end in ends}
    return [
        end if len(whole[end]) == 1 else each.title for each, end in zip(reports, ends, strict=True)
    ]


# -- marks of incidents in the page and the picture ------------------------------------------------


def is_wide(values: np.ndarray | None) -> bool:
    """Whether the axis is logarithmic: positive values with a ratio of more than 30."""
    if values is None:
        return False
    finite = values[np.isfinite(values)]
    return bool(len(finite)) and bool(finite.min() > 0) and bool(finite.max() / 30 > finite.min())


def marker_rows(places: Sequence[float], span: float, rows: int) -> list[int]:
    """Row of each marker, which is `span` wide with its number.

    Markers that would overlap get different rows. Without a free row, a marker gets the last row.
    """
    ends = [-np.inf] * rows
    found = [0] * len(places)
    for i in np.argsort(np.asarray(places, float), kind="stable"):
        row = next((row for row in range(rows) if places[i] >= ends[row]), rows - 1)
        ends[row], found[i] = places[i] + span, row
    return found


def has_room(places: Sequence[float], rows: Sequence[int], span: float) -> list[bool]:
    """Whether each marker has room for its number (`span`) before the next marker in its row."""
    found = [True] * len(places)
    following: dict[int, float] = {}
    for i in np.argsort(np.asarray(places, float), kind="stable")[::-1].tolist():
        found[i] = following.get(rows[i], np.inf) - places[i] >= span
        following[rows[i]] = places[i]
    return found


def lane(places: Sequence[float], step: np.ndarray, share: float) -> tuple[list[int], list[bool]]:
    """The row of each marker above the curves, and whether its number has room.

    A marker with its number takes the fraction `share` of the steps.
    """
    room = share * max(float(np.ptp(step)) if len(step) else 1.0, 1.0)
    rows = marker_rows(places, room, _LANE)
    return rows, has_room(places, rows, room)
