"""`Counts`: the numbers of incidents and changes of a run or a replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from healcore.history.incidents import Incident

_Count = TypeVar("_Count", int, int | None)


class Counts(NamedTuple):
    """Counts of a run or a replay, for reports and the postmortem.

    None means unknown, which is not 0: clips, for example, are not events, so only the postmortem
    and the metrics of a run have their number.
    """

    incidents: int = 0
    """Incidents, including incidents whose steps a rollback has undone."""
    rollbacks: int = 0
    """Rollbacks that were carried out; without healing, incidents that would be rolled back."""
    skips: int = 0
    """Skipped steps, including steps that a rollback has undone."""
    clips: int | None = None
    """Steps with clipped gradients, or None if unknown."""
    alarms: int | None = None
    """Steps with a cause, or None if unknown."""
    lr_cuts: int = 0
    """Cuts of the learning rate, which only a live run counts."""
    dropped: int = 0
    """Steps that a loss scale has left out, which only a live run counts."""


def name_changes(*, observes: bool, **counts: _Count) -> dict[str, _Count | int]:
    """Renames counts of changes, if a policy that only observes has not made these changes.

    Args:
        observes: whether the policy only observes, so that nothing was changed.
        **counts: name of a change, such as `skips` -> its number, or None if unknown.

    Returns:
        Name -> number. With `observes`, "skips" is 0, and "observed_skips" is the number of skips
        that the policy would have made.
    """
    if not observes:
        return {**counts}
    named: dict[str, _Count | int] = dict.fromkeys(counts, 0)
    for name, number in counts.items():
        named[f"observed_{name}"] = number
    return named


def count_incidents(incidents: Sequence[Incident], /, **counts: int | None) -> Counts:
    """Counts incidents and their responses.

    Args:
        incidents: the incidents of one run or replay.
        **counts: fields of `Counts` that are known from elsewhere. They replace the counted ones.

    Returns:
        The counts. An incident with number 0, which is only a rollback, counts as a rollback only.
        An incident whose steps were lost with its process does not count: the restart repeats it.
    """
    kept = [incident for incident in incidents if not incident.lost]
    return Counts(
        incidents=sum(incident.number > 0 for incident in kept),
        rollbacks=sum(incident.rolled_back for incident in kept),
        skips=sum(incident.skipped for incident in kept),
    )._replace(**counts)
