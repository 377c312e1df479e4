"""The rollbacks of a healed run, as its events file tells them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from healcore.runtime.events import read


class Rollback(NamedTuple):
    """One rollback that was carried out."""

    onset: int
    """Step with the first alarm."""
    cause: tuple[str, ...]
    """Names of `Cause` flags."""
    step: int
    """Steps done when the run went back."""
    checkpoint: int
    """Step that it went back to."""
    known_good: bool
    """False: it went to the snapshot that it had started from, for want of anything better."""
    lr_scale_before: float
    lr_scale: float
    """The multiplier of the learning rate from then on."""
    batches: tuple[int, ...]
    """Indices of the batches that are left out from then on."""


class Told(NamedTuple):
    """What an events file says of its last run."""

    rollbacks: tuple[Rollback, ...]
    ending: str | None
    """`completed`, `stopped`, ...; None: the file does not say."""


def told(events: Path) -> Told:
    """Reads an events file.

    Args:
        events: what `Healer` was given.

    Raises:
        OSError: it cannot be read.
    """
    found, ending = [], None
    for event in read(events).events:
        if event["kind"] == "rollback":
            found.append(
                Rollback(
                    onset=event["onset"],
                    cause=tuple(event["cause"]),
                    step=event["step"],
                    checkpoint=event["checkpoint"],
                    known_good=not event["initial"],
                    lr_scale_before=float(event["lr_scale_before"]),
                    lr_scale=float(event["lr_scale"]),
                    batches=tuple(index for _, index in event["batches"]),
                )
            )
        elif event["kind"] == "end":
            ending = event["ending"]
    return Told(tuple(found), ending)
