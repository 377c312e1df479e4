"""Options of a run in two groups: its checkpoints and its logs."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from healcore import console
from healcore.console import Console
from healcore.runtime.incidents.hooks import Hooks
from healcore.runtime.store import Keep


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """When a run saves checkpoints, how many stay, and what they may hold.

        Healer(..., checkpoints=Checkpoints(every=100))

    Args:
        every: steps between two checkpoints. With None this is the policy's `rollback.probation`,
            and restart points are saved too. A restart point is the newest state on disk, for the
            start after a kill; no rollback restores it. The distance between two restart points is
            at least 10 steps and a quarter of the steps done, and saving them may take at most
            2 % of the time.
        restart_every: most steps between two restart points, also with `every`, or None for the
            restart points above only.
        keep: how many checkpoints of each kind stay. None is `Keep(older=True)`: the newest few,
            and one older known-good checkpoint at each doubling of the distance.
        nonfinite_ok: patterns of array names (`model.*.mask`) in which NaN and Inf are allowed.
        trust: pickle objects that have no plain form (of the state and of loaders), and read what
            was pickled. Reading a pickle runs the code that its writer put there: only for a
            directory that nobody else can write to. A store that you make has its own `trust`.

    Raises:
        ValueError: an option is out of range.
    """

    every: int | None = None
    restart_every: int | None = None
    keep: Keep | None = None
    nonfinite_ok: Iterable[str] = ()
    trust: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "nonfinite_ok", tuple(self.nonfinite_ok))
        if self.keep is not None:
            self.keep.checked()
        for name in ("every", "restart_every"):
            steps = getattr(self, name)
            if steps is not None and (type(steps) is not int or steps < 1):
                raise ValueError(f"{name} is a whole number of steps >= 1, or None, not {steps!r}")
        if not isinstance(self.trust, bool):
            raise ValueError(f"trust is True or False, not {self.trust!r}")


@dataclass(frozen=True, kw_only=True)
class Logging:
    """Where events, metrics and lines for people go.

        Healer(..., logging=Logging(events="run.jsonl"))

    Args:
        events: the events file, or None for `healcore.events.jsonl` in the store's directory, if
            there is one.
        metrics: a file with one line per step (loss, norm, threshold, decision), about 300 bytes,
            for `healcore replay`, `report` and `watch`, or None for no file. "auto": next to the
            events, if those go to a file, and thinned in long runs.
        console: whether lines are printed to standard error. "auto": only if the program has set
            up no logging for the logger `healcore`; False: never; True: unless the program's
            logging prints them to the terminal already.

    Raises:
        ValueError: `console` is none of these.
    """

    events: str | os.PathLike[str] | None = None
    metrics: str | os.PathLike[str] | Literal["auto"] | None = "auto"
    console: Console = "auto"

    def __post_init__(self) -> None:
        console.checked(self.console)


def check_no_field(overrides: Mapping[str, object]) -> None:
    """Raises TypeError for a keyword that is an option of one of the groups."""
    groups: dict[str, type] = {"checkpoints": Checkpoints, "logging": Logging, "hooks": Hooks}
    for option, group in groups.items():
        for name in inspect.signature(group).parameters:
            if name in overrides:
                raise TypeError(
                    f"{name} is an option of {group.__name__}: write "
                    f"{option}=healcore.{group.__name__}({name}=...)"
                )


CHECKPOINTS, LOGGING, NO_HOOKS = Checkpoints(), Logging(), Hooks()
"""The defaults."""
