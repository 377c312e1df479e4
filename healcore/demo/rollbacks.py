"""The rollbacks of a healed run, as its events file tells them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from healcore.history import runs_of
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
    runs = runs_of(read(events).runs())
    found = tuple(
        Rollback(
            onset=each.onset or 0,
            cause=tuple(each.cause or ()),
            step=each.step or 0,
            checkpoint=each.checkpoint or 0,
            known_good=not each.initial,
            lr_scale_before=1.0 if each.lr_scale_before is None else each.lr_scale_before,
            lr_scale=1.0 if each.lr_scale is None else each.lr_scale,
            batches=tuple(index for _, index in each.batches or ()),
        )
        for run in runs
        for each in run.rollbacks
    )
    end = runs[-1].end if runs else None
    return Told(found, end.ending if end is not None else None)
