"""`Checkpoints` and `Logging`: two groups of the options of a run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from healcore import console
from healcore.console import Console
from healcore.runtime.incidents.hooks import Hooks
from healcore.runtime.store import Keep


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """When a run saves checkpoints, how many it keeps, and what they may hold.

        Healer(..., checkpoints=Checkpoints(every=100))

    Args:
        every: steps between two checkpoints, or None for the policy's `rollback.probation`.
        keep: how many checkpoints of each kind to keep. With None the run keeps the candidates of
            one probation, at most 8, the newest few of the other kinds, and one older known-good
            checkpoint at each doubling of the distance.
        nonfinite_ok: patterns of array names (`model.*.mask`) in which NaN and Inf are allowed.

    Raises:
        ValueError: an option is out of range.
    """

    every: int | None = None
    keep: Keep | None = None
    nonfinite_ok: Iterable[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "nonfinite_ok", tuple(self.nonfinite_ok))
        if self.keep is not None:
            self.keep.checked()
        if self.every is not None and (type(self.every) is not int or self.every < 1):
            raise ValueError(f"every is a whole number of steps >= 1, or None, not {self.every!r}")


@dataclass(frozen=True, kw_only=True)
class Logging:
    """Files for events and metrics, and lines on the console.

        Healer(..., logging=Logging(events="run.jsonl"))

    Args:
        events: path of the events file, or None for `healcore.events.jsonl` in the store's
            directory. No file without such a directory.
        metrics: path of a file with one line per step (loss, norm, threshold, decision), about 300
            bytes, for `healcore replay`, `report` and `events`. "auto" is a file next to the events
            file, thinned in long runs. None is no file.
        console: whether to print lines to standard error. "auto" prints them if the program has
            set up no logging for the logger `healcore`. True prints them unless the program's
            logging already prints them to the terminal. False never prints.

    Raises:
        ValueError: `console` is none of these, or a path has a NUL character.
    """

    events: str | os.PathLike[str] | None = None
    metrics: str | os.PathLike[str] | Literal["auto"] | None = "auto"
    console: Console = "auto"

    def __post_init__(self) -> None:
        console.checked(self.console)
        for name, path in (("events", self.events), ("metrics", self.metrics)):
            if "\0" in str(path):
                raise ValueError(f"{name} is a path without the NUL character, not {str(path)!r}")


CHECKPOINTS, LOGGING, NO_HOOKS = Checkpoints(), Logging(), Hooks()
"""Defaults of the groups."""
