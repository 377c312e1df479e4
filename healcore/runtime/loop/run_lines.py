"""The first and the last line of a run on the console; a healthy run has no others."""

from __future__ import annotations

from healcore.console import counted
from healcore.events.models import Ending
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.postmortem.diagnosis import RunEnd, answers_text, with_undone

_ENDINGS = {
    Ending.COMPLETED: "completed",
    Ending.STOPPED: "stopped",
    Ending.EXCEPTION: "ended by an exception",
    Ending.INTERRUPTED: "interrupted",
    Ending.SIGNAL: "ended by a signal",
    Ending.REQUESTED: "ended by",
}


def start_line(
    policy: HostPolicy,
    step: int,
    where: str,
    *,
    resumed: bool,
    learning_rate: float | None,
    batch: str = "",
) -> str:
    """Where a run starts, under which policy and rate, and where its checkpoints are.

    `batch` is the size of a batch as a trainer knows it. The event `start` has all details.
    """
    start = f"resumes from the checkpoint of step {step}" if resumed else f"starts at step {step}"
    parts = [f"policy {policy.name}{' (observes, changes nothing)' if policy.observes else ''}"]
    if learning_rate is not None:
        parts.append(f"learning rate {learning_rate:.4g}")
    if batch:
        parts.append(f"batch size {batch}")
    return f"{start}: {', '.join(parts)}; {where}"


def end_line(
    end: RunEnd, *, rollbacks: int = 0, not_carried_out: int = 0, newest: int | None = None
) -> str:
    """How a run ended, what was done in it, and what it can be resumed from.

    `not_carried_out` counts ordered rollbacks, where none can be; `newest` is the step of the
    newest checkpoint on disk.
    """
    would = "would have " if end.observes else ""
    skipped = with_undone(counted(end.skips, "step"), end.undone_skips)
    done = [f"{would}skipped {skipped}"] if end.skips else []
    done += [
        f"{would}{what} {counted(number, noun)}"
        for number, what, noun in (
            (end.clips, "clipped", "step"),
            (end.lr_cuts, "cut the learning rate", "time"),
            (rollbacks, "rolled back", "time"),
            (not_carried_out, "could not roll back", "time"),
        )
        if number
    ]
    done += answers_text(end.answered)
    if end.declined:
        done.append(f"declined {counted(end.declined, 'order')}")
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
