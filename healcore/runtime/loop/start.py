"""The first moments of a run: on from a checkpoint, or from a first snapshot."""

from __future__ import annotations

from typing import Any

from healcore.runtime.events import reading
from healcore.runtime.events.models import RollbackOutcome
from healcore.runtime.loop.loop import Loop
from healcore.runtime.rollback.journal import Page, Plan
from healcore.runtime.rollback.lineage import nothing_left, refuse_if_lost, unstated
from healcore.runtime.store import NoGoodCheckpoint, Saved
from healcore.runtime.store.ranks import agreed


def begin(loop: Loop, *, resume: bool, died: Any | None) -> None:
    """Goes on from the newest checkpoint, or takes the first snapshot.

    Args:
        loop: put together, and nothing else.
        resume: there are checkpoints to go on from.
        died: the postmortem of the process before, if it was killed.

    Raises:
        NoGoodCheckpoint: there are checkpoints, and none can be used.
        StateMismatch: they are of another state.
    """
    loop.console.begin()
    loop.rollbacks.look_for_damage()
    if not resume:
        _begin_lineage(loop)
    page = loop.journal.page
    loop.checkpoints.accept(page.meant or [])
    _set_aside_again(loop)
    if died is not None:
        loop.console.warning("the run before this one was killed; its postmortem was written")
    if page.begun is not None:
        _finish_rollback(loop, page.begun)
    elif resume:
        _resume(loop)
    trial = None if page.branch is None else page.branch.plan.trial
    if trial and loop.step <= trial[1]:
        loop.reruns.begin(*trial)
    loop.note_rates()
    page.ended = None
    loop.rollbacks.write_journal(loop.step)
    loop.begins_at(loop.step, resumed=resume)
    loop.checkpoints.take_stock()
    if not resume:
        _accept(loop)
        loop.save("first")
    loop.termination.watch()
    mode = "observed" if loop.policy.observes else "healed"
    store = _describe(loop.checkpoints.store)
    loop.console.info(f"{mode} by policy {loop.policy.name}, from step {loop.step}; {store}")


def _begin_lineage(loop: Loop) -> None:
    """There is no checkpoint: a new run, to which nothing of an earlier one belongs.

    Raises:
        NoGoodCheckpoint: there had been checkpoints.
    """
    journal = loop.journal
    refuse_if_lost(journal, loop.rollbacks.damage)
    if journal.page != Page():
        loop.warn(
            f"{journal.path} is of a process that ended before a checkpoint was on disk: the run "
            "begins anew, and the file with it"
        )
    journal.page = Page(lineage=agreed(loop.ranks, loop.log.run), first=loop.step)


def _set_aside_again(loop: Loop) -> None:
    """What the journal knows to be quarantined, where the status file does not say so any more."""
    journal, done = loop.journal, set[int]()
    while True:  # behind a save that is set aside an older one of the same step may come to light
        found = agreed(loop.ranks, unstated(loop.rollbacks.saves(), journal).quarantined)
        steps = [step for step in found if step not in done]
        if not steps:
            return
        done.update(steps)
        loop.warn(
            f"the status of checkpoint {', '.join(map(str, steps))} is damaged or gone; by "
            f"{journal.path} it was quarantined, and stays so"
        )
        loop.checkpoints.set_aside(steps, now=loop.step)


def _accept(loop: Loop) -> None:
    """What is not finite before the first step is meant to be so."""
    meant = loop.checkpoints.accept_first(loop.driver.items())
    if meant:
        loop.journal.page.meant = meant
        loop.rollbacks.write_journal(loop.step)
        loop.warn(f"not finite from the start, and taken to be meant so: {', '.join(meant[:5])}")


def _resume(loop: Loop) -> None:
    saves = loop.rollbacks.saves()
    usable = [s.step for s in saves if s.finite and s.status != "quarantined"]
    unknown = set(agreed(loop.ranks, unstated(saves, loop.journal).unknown))
    try:
        if not usable:
            raise nothing_left(loop.journal, saves, loop.rollbacks.damage)
        newest_first = sorted(usable, reverse=True)
        # One with a damaged status may have been quarantined: only if there is no other.
        order = sorted(newest_first, key=unknown.__contains__)
        if loop.journal.page.first is None:  # the journal was deleted, or is of an earlier healcore
            loop.journal.page.first = min(usable)
        step, generators = loop.rollbacks.resume(order)
    except NoGoodCheckpoint as error:
        raise nothing_left(loop.journal, saves, loop.rollbacks.damage) from error
    loop.land(step, generators)
    # Or the run would take it for proven once it has come by its step.
    loop.checkpoints.set_aside([at for at in unknown if at > step], now=step)
    branch = loop.journal.page.branch
    if branch is not None and not _told(loop, branch.plan.number):
        _tell_late(loop, branch.plan, branch.target)
    loop.log_event("resume", step=step, checkpoint=step)
    damaged = {error.step: error for error in loop.rollbacks.damage if error.step > step}
    over = [saved for saved in saves if saved.step > step and saved.step not in damaged]
    told = f"goes on from the checkpoint of step {step}"
    if over:
        told += f"; newer ones were passed over: {', '.join(_passed(saved) for saved in over)}"
    if not damaged:
        loop.console.info(told)
        return
    which = "; ".join(f"{at} ({e.file} {e.difference})" for at, e in sorted(damaged.items()))
    loop.console.warning(f"newer checkpoints are damaged: {which}. The run {told}")


def _passed(saved: Saved) -> str:
    return f"{saved.step} ({saved.status if saved.finite else 'not finite'})"


def _finish_rollback(loop: Loop, plan: Plan) -> None:
    """The process before was killed in the middle of one."""
    try:
        loop.land(*loop.rollbacks.finish(plan))
    except NoGoodCheckpoint as error:
        damage = loop.rollbacks.damage
        raise nothing_left(loop.journal, loop.rollbacks.saves(), damage) from error
    _tell_late(loop, plan, loop.step)
    loop.console.warning(f"finished a rollback that was cut short: back at step {loop.step}")


def _told(loop: Loop, number: int) -> bool:
    """Whether the events have a rollback's end: the process may have died just before."""
    if loop.journal.page.ended is not None or loop.log.path is None:
        return True
    try:
        if not loop.log.path.is_file():
            return True
        events = reading.read(loop.log.path).events
    except OSError:
        return True
    return any(e["kind"] == "rollback" and e.get("number") == number for e in events)


def _tell_late(loop: Loop, plan: Plan, target: int) -> None:
    loop.log_event(
        "rollback",
        step=plan.step,
        number=plan.number,
        onset=plan.onset,
        checkpoint=target,
        outcome=RollbackOutcome.AFTER_CRASH if plan.trial is None else RollbackOutcome.TRIAL,
    )


def _describe(store: Any) -> str:
    describe = getattr(store, "describe", None)
    return describe() if describe is not None else f"checkpoints in {type(store).__name__}"
