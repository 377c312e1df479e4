"""The first moments of a run: on from a checkpoint, or from a first snapshot."""

from __future__ import annotations

from typing import Any

from healcore.runtime.events import reading
from healcore.runtime.events.models import RollbackOutcome
from healcore.runtime.recovery.journal import Page, Plan
from healcore.runtime.recovery.lineage import nothing_left, refuse_if_lost, unstated
from healcore.runtime.run.running import Run
from healcore.runtime.store import NoGoodCheckpoint, Saved
from healcore.runtime.store.ranks import agreed


def begin(run: Run, *, resume: bool, died: Any | None) -> None:
    """Goes on from the newest checkpoint, or takes the first snapshot.

    Args:
        run: put together, and nothing else.
        resume: there are checkpoints to go on from.
        died: the postmortem of the process before, if it was killed.

    Raises:
        NoGoodCheckpoint: there are checkpoints, and none can be used.
        StateMismatch: they are of another state.
    """
    run.narrator.begin()
    run.recovery.look_for_damage()
    if not resume:
        _begin_lineage(run)
    page = run.journal.page
    run.keeper.accept(page.meant or [])
    _set_aside_again(run)
    if died is not None:
        run.narrator.warn("the run before this one was killed; its postmortem was written")
    if page.begun is not None:
        _finish_rollback(run, page.begun)
    elif resume:
        _resume(run)
    trial = None if page.branch is None else page.branch.plan.trial
    if trial and run.step <= trial[1]:
        run.trials.begin(*trial)
    run.note_rates()
    page.ended = None
    run.recovery.write_journal(run.step)
    run.begins_at(run.step, resumed=resume)
    run.keeper.take_stock()
    if not resume:
        _accept(run)
        run.save("first")
    run.terminating.watch()
    mode = "observed" if run.terms.observes else "healed"
    store = _describe(run.keeper.store)
    run.narrator.say(f"{mode} by policy {run.terms.name}, from step {run.step}; {store}")


def _begin_lineage(run: Run) -> None:
    """There is no checkpoint: a new run, to which nothing of an earlier one belongs.

    Raises:
        NoGoodCheckpoint: there had been checkpoints.
    """
    journal = run.journal
    refuse_if_lost(journal, run.recovery.damage)
    if journal.page != Page():
        run.warn(
            f"{journal.path} is of a process that ended before a checkpoint was on disk: the run "
            "begins anew, and the file with it"
        )
    journal.page = Page(lineage=agreed(run.recovery.ranks, run.log.run), first=run.step)


def _set_aside_again(run: Run) -> None:
    """What the journal knows to be quarantined, where the status file does not say so any more."""
    journal, done = run.journal, set[int]()
    while True:  # behind a save that is set aside an older one of the same step may come to light
        found = agreed(run.recovery.ranks, unstated(run.recovery.saves(), journal).quarantined)
        steps = [step for step in found if step not in done]
        if not steps:
            return
        done.update(steps)
        run.warn(
            f"the status of checkpoint {', '.join(map(str, steps))} is damaged or gone; by "
            f"{journal.path} it was quarantined, and stays so"
        )
        run.keeper.set_aside(steps, now=run.step)


def _accept(run: Run) -> None:
    """What is not finite before the first step is meant to be so."""
    meant = run.keeper.accept_first(run.driver.items())
    if meant:
        run.journal.page.meant = meant
        run.recovery.write_journal(run.step)
        run.warn(f"not finite from the start, and taken to be meant so: {', '.join(meant[:5])}")


def _resume(run: Run) -> None:
    saves = run.recovery.saves()
    usable = [s.step for s in saves if s.finite and s.status != "quarantined"]
    unknown = set(agreed(run.recovery.ranks, unstated(saves, run.journal).unknown))
    try:
        if not usable:
            raise nothing_left(run.journal, saves, run.recovery.damage)
        newest_first = sorted(usable, reverse=True)
        # One with a damaged status may have been quarantined: only if there is no other.
        order = sorted(newest_first, key=unknown.__contains__)
        if run.journal.page.first is None:  # the journal was deleted, or is of an earlier healcore
            run.journal.page.first = min(usable)
        step, generators = run.recovery.resume(order)
    except NoGoodCheckpoint as error:
        raise nothing_left(run.journal, saves, run.recovery.damage) from error
    run.land(step, generators)
    # Or the run would take it for proven once it has come by its step.
    run.keeper.set_aside([at for at in unknown if at > step], now=step)
    branch = run.journal.page.branch
    if branch is not None and not _told(run, branch.plan.number):
        _tell_late(run, branch.plan, branch.target)
    run.tell("resume", step=step, checkpoint=step)
    damaged = {error.step: error for error in run.recovery.damage if error.step > step}
    over = [saved for saved in saves if saved.step > step and saved.step not in damaged]
    told = f"goes on from the checkpoint of step {step}"
    if over:
        told += f"; newer ones were passed over: {', '.join(_passed(saved) for saved in over)}"
    if not damaged:
        run.narrator.say(told)
        return
    which = "; ".join(f"{at} ({e.file} {e.difference})" for at, e in sorted(damaged.items()))
    run.narrator.warn(f"newer checkpoints are damaged: {which}. The run {told}")


def _passed(saved: Saved) -> str:
    return f"{saved.step} ({saved.status if saved.finite else 'not finite'})"


def _finish_rollback(run: Run, plan: Plan) -> None:
    """The process before was killed in the middle of one."""
    try:
        run.land(*run.recovery.finish(plan))
    except NoGoodCheckpoint as error:
        damage = run.recovery.damage
        raise nothing_left(run.journal, run.recovery.saves(), damage) from error
    _tell_late(run, plan, run.step)
    run.narrator.warn(f"finished a rollback that was cut short: back at step {run.step}")


def _told(run: Run, number: int) -> bool:
    """Whether the events have a rollback's end: the process may have died just before."""
    if run.journal.page.ended is not None or run.log.path is None:
        return True
    try:
        events = reading.read(run.log.path).events
    except OSError:
        return True
    return any(e["kind"] == "rollback" and e.get("number") == number for e in events)


def _tell_late(run: Run, plan: Plan, target: int) -> None:
    run.tell(
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
