"""The first and the last line of a run on the console; a healthy run has no others."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import or_

from healcore.core.verdict import Action
from healcore.runtime.events.models import Ending
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.postmortem.diagnosis import RunEnd, with_undone

_ENDINGS = {
    Ending.COMPLETED: "completed",
    Ending.STOPPED: "stopped",
    Ending.EXCEPTION: "ended by an exception",
    Ending.INTERRUPTED: "interrupted",
    Ending.SIGNAL: "ended by a signal",
    Ending.REQUESTED: "ended by",
}


def start_line(
    policy: HostPolicy, step: int, checkpoints: str, *, resumed: bool, goes_back: bool = True
) -> str:
    """Where a run starts, what the policy may do, and where checkpoints go.

    `goes_back` is False where no rollback can be carried out.
    """
    start = f"resumes from the checkpoint of step {step}" if resumed else f"starts at step {step}"
    does = "observes and changes nothing"
    if not policy.observes:
        does = ", ".join(_actions(policy, goes_back)) or "only logs"
    return f"{start} with policy {policy.name}: {does}; {checkpoints}"


def _actions(policy: HostPolicy, goes_back: bool) -> Iterator[str]:
    config = policy.engine.config
    ordered = reduce(or_, (rule.action for rule in config.rules), 0)
    if config.clip is not None or config.update_clip is not None:
        yield "clips"
    if any(rule.skip for rule in config.rules):
        yield "skips"
    if ordered & (Action.CUT_LR | Action.SOFT_STEP):
        yield "cuts the learning rate"
    if ordered & Action.ROLLBACK:
        yield "rolls back" if goes_back else "cannot roll back"
    if ordered & Action.STOP:
        yield "stops"


def end_line(
    end: RunEnd, *, rollbacks: int = 0, not_carried_out: int = 0, newest: int | None = None
) -> str:
    """How a run ended, what was done in it, and what it can be resumed from.

    `not_carried_out` counts ordered rollbacks, where none can be; `newest` is the step of the
    newest checkpoint on disk.
    """
    would = "would have " if end.observes else ""
    skipped = with_undone(_count(end.skips, "step"), end.undone_skips)
    done = [f"{would}skipped {skipped}"] if end.skips else []
    done += [
        f"{would}{what} {_count(number, noun)}"
        for number, what, noun in (
            (end.clips, "clipped", "step"),
            (end.lr_cuts, "cut the learning rate", "time"),
            (rollbacks, "rolled back", "time"),
            (not_carried_out, "could not roll back", "time"),
        )
        if number
    ]
    if end.lr_scale < 1 and not end.observes:
        done.append(f"learning rate × {end.lr_scale:.3g} at the end")
    good = "none" if end.last_good is None else f"step {end.last_good}"
    disk = "" if newest is None else f"checkpoint {newest} is on disk, "
    ended = _ENDINGS[Ending(end.ending)]
    if end.ending == Ending.REQUESTED:
        ended += f" {end.why}"
    return (
        f"{ended} after step {end.step}: "
        f"{', '.join(done) or 'no intervention'}; {disk}newest known-good checkpoint: {good}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
