"""How often what happened to a run, or would have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from healcore.history.incident import Incident


class Counts(NamedTuple):
    """Of one run, or of one replay."""

    incidents: int = 0
    rollbacks: int = 0
    """Incidents in which one was ordered."""
    repeats: int = 0
    """Rollbacks beyond one for each incident."""
    denied: int = 0
    """Rollbacks that the budget did not grant."""
    stops: int = 0
    skips: int = 0
    """Steps that were skipped."""
    clips: int | None = None
    """Steps whose gradients were clipped; None: not known."""
    alarms: int | None = None
    """Steps with a cause; None: not known."""


def counts_of(incidents: Sequence[Incident], **more: int | None) -> Counts:
    """Counts incidents.

    Args:
        incidents: all of them.
        **more: fields of `Counts` that incidents do not have, or that are known better.
    """
    return Counts(
        incidents=len(incidents),
        rollbacks=sum("ROLLBACK" in each.action for each in incidents),
        repeats=sum(each.repeats for each in incidents),
        stops=sum("STOP" in each.action for each in incidents),
        skips=sum(each.skipped for each in incidents),
    )._replace(**more)
