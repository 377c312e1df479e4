"""The start of a run: resumes from a checkpoint, or takes a first snapshot."""

from __future__ import annotations

from typing import Any

from healcore.runtime.events import reading
from healcore.runtime.events.models import RollbackOutcome
from healcore.runtime.loop.loop import Loop
from healcore.runtime.rollback.journal import JournalState, RollbackPlan
from healcore.runtime.rollback.lineage import lost_status, no_usable_checkpoint, refuse_if_lost
from healcore.runtime.store import NoGoodCheckpoint, Saved
from healcore.runtime.store.ranks import agreed


def begin(loop: Loop, *, resume: bool, died: Any | None) -> None:
    """Resumes from the newest checkpoint, or takes the first snapshot.

    Args:
        loop: just constructed.
        resume: there are checkpoints to resume from.
        died: the postmortem of the process before, if it was killed.

    Raises:
        NoGoodCheckpoint: there are checkpoints, and none can be used.
        StateMismatch: they are of another state.
    """
    loop.console.begin()
    loop.rollbacks.find_damage()
    if not resume:
        _begin_lineage(loop)
    state = loop.journal.state
    loop.checkpoints.allow_nonfinite(state.nonfinite_ok or [])
    _repeat_quarantine(loop)
    if died is not None:
        loop.console.warning("the previous run was killed; its postmortem was written")
    if state.pending is not None:
        _finish_rollback(loop, state.pending)
    elif resume:
        _resume(loop)
    rerun = None if state.last_rollback is None else state.last_rollback.plan.rerun
    if rerun and loop.step <= rerun[1]:
        loop.reruns.start(*rerun)
    loop.sync_lr_scale()
    state.ending = None
    loop.rollbacks.write_journal(loop.step)
    loop.set_start(loop.step, resumed=resume)
    loop.checkpoints.reload()
    if not resume:
        _allow_nonfinite(loop)
        loop.save("first")
    loop.termination.start()
    mode = "observed" if loop.policy.observes else "healed"
    store = _describe(loop.checkpoints.store)
    loop.console.info(f"{mode} by policy {loop.policy.name}, from step {loop.step}; {store}")


def _begin_lineage(loop: Loop) -> None:
    """Without a checkpoint a new run begins; nothing of an earlier one applies to it.

    Raises:
        NoGoodCheckpoint: there had been checkpoints.
    """
    journal = loop.journal
    refuse_if_lost(journal, loop.rollbacks.damage)
    if journal.state != JournalState():
        loop.warn(
            f"{journal.path} is of a process that ended before a checkpoint was on disk: a new run "
            "begins, and replaces the file"
        )
    journal.state = JournalState(lineage=agreed(loop.ranks, loop.log.run), first_step=loop.step)


def _repeat_quarantine(loop: Loop) -> None:
    """Quarantines again what the journal knows to be quarantined and has lost its status file."""
    journal, done = loop.journal, set[int]()
    while True:  # each quarantine may uncover an older checkpoint of the same step
        found = agreed(loop.ranks, lost_status(loop.rollbacks.saves(), journal).quarantined)
        steps = [step for step in found if step not in done]
        if not steps:
            return
        done.update(steps)
        loop.warn(
            f"the status of checkpoint {', '.join(map(str, steps))} is damaged or missing; by "
            f"{journal.path} it was quarantined, and it stays quarantined"
        )
        loop.checkpoints.quarantine(steps, now=loop.step)


def _allow_nonfinite(loop: Loop) -> None:
    """Allows NaN and Inf in the arrays that have some before the first step."""
    names = loop.checkpoints.allow_nonfinite_in(loop.driver.items())
    if names:
        loop.journal.state.nonfinite_ok = names
        loop.rollbacks.write_journal(loop.step)
        shown = ", ".join(names[:5])
        loop.warn(f"not finite from the start, so NaN and Inf are allowed in: {shown}")


def _resume(loop: Loop) -> None:
    saves, journal = loop.rollbacks.saves(), loop.journal
    usable = [s.step for s in saves if s.finite and s.status != "quarantined"]
    unknown = set(agreed(loop.ranks, lost_status(saves, journal).unknown))
    try:
        if not usable:
            raise no_usable_checkpoint(journal, saves, loop.rollbacks.damage)
        newest_first = sorted(usable, reverse=True)
        # One with a damaged status may have been quarantined: it is the last choice.
        order = sorted(newest_first, key=unknown.__contains__)
        if journal.state.first_step is None:  # the journal was deleted
            journal.state.first_step = min(usable)
        step, generators = loop.rollbacks.resume(order)
    except NoGoodCheckpoint as error:
        raise no_usable_checkpoint(journal, saves, loop.rollbacks.damage) from error
    loop.set_restored(step, generators)
    # Otherwise the run would treat it as one of its own once it has passed its step.
    loop.checkpoints.quarantine([at for at in unknown if at > step], now=step)
    last = journal.state.last_rollback
    if last is not None and not _is_logged(loop, last.plan.number):
        _log_rollback(loop, last.plan, last.target)
    loop.log_event("resume", step=step, checkpoint=step)
    damaged = {error.step: error for error in loop.rollbacks.damage if error.step > step}
    skipped = [saved for saved in saves if saved.step > step and saved.step not in damaged]
    line = f"resumes from the checkpoint of step {step}"
    if skipped:
        line += f"; newer ones cannot be used: {', '.join(_reason(saved) for saved in skipped)}"
    if not damaged:
        loop.console.info(line)
        return
    which = "; ".join(f"{at} ({e.file} {e.difference})" for at, e in sorted(damaged.items()))
    loop.console.warning(f"newer checkpoints are damaged: {which}. The run {line}")


def _reason(saved: Saved) -> str:
    return f"{saved.step} ({saved.status if saved.finite else 'not finite'})"


def _finish_rollback(loop: Loop, plan: RollbackPlan) -> None:
    """Finishes a rollback during which the previous process was killed."""
    try:
        loop.set_restored(*loop.rollbacks.finish_interrupted(plan))
    except NoGoodCheckpoint as error:
        damage = loop.rollbacks.damage
        raise no_usable_checkpoint(loop.journal, loop.rollbacks.saves(), damage) from error
    _log_rollback(loop, plan, loop.step)
    loop.console.warning(f"finished an interrupted rollback: back at step {loop.step}")


def _is_logged(loop: Loop, number: int) -> bool:
    """Whether a rollback has its event: the process may have been killed just before."""
    if loop.journal.state.ending is not None or loop.log.path is None:
        return True
    try:
        if not loop.log.path.is_file():
            return True
        events = reading.read(loop.log.path).events
    except OSError:
        return True
    return any(e["kind"] == "rollback" and e.get("number") == number for e in events)


def _log_rollback(loop: Loop, plan: RollbackPlan, target: int) -> None:
    """Writes the event that a killed process has not written."""
    loop.log_event(
        "rollback",
        step=plan.step,
        number=plan.number,
        onset=plan.onset,
        checkpoint=target,
        outcome=RollbackOutcome.AFTER_CRASH if plan.rerun is None else RollbackOutcome.TRIAL,
    )


def _describe(store: Any) -> str:
    describe = getattr(store, "describe", None)
    return describe() if describe is not None else f"checkpoints in {type(store).__name__}"
