"""Starts a run: resumes from a checkpoint, or takes the first snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healcore.events.models import Ending, RollbackOutcome
from healcore.runtime.driver import Driver
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.rollback import Rollback
from healcore.runtime.loop.loop import Loop
from healcore.runtime.loop.run_settings import batch_of, changes_text
from healcore.runtime.recovery.journal import (
    JournalState,
    lost_status,
    no_usable_checkpoint,
    refuse_if_lost,
)
from healcore.runtime.run_log import RunLog
from healcore.runtime.store import NoGoodCheckpoint, Saved
from healcore.runtime.store.ranks import Ranks, agreed


def log_start(log: RunLog, policy: HostPolicy, driver: Driver, ranks: Ranks, **fields: Any) -> None:
    """Writes the event of a start."""
    log.event(
        "start",
        step=None,
        policy=policy.name,
        fingerprint=policy.fingerprint,
        policy_toml=policy.text,
        mode=policy.engine.mode,
        framework=driver.framework,
        rank=ranks.rank,
        world=ranks.world,
        **fields,
    )


def start_line(
    policy: HostPolicy,
    step: int,
    where: str,
    *,
    resumed: bool,
    learning_rate: float | None,
    batch: str = "",
) -> str:
    """The first line of a run on the console; `where` is a clause about the checkpoints."""
    start = f"resumes from the checkpoint of step {step}" if resumed else f"starts at step {step}"
    parts = [f"policy {policy.name}{' (observes, changes nothing)' if policy.observes else ''}"]
    if learning_rate is not None:
        parts.append(f"learning rate {learning_rate:.4g}")
    if batch:
        parts.append(f"batch size {batch}")
    return f"{start}: {', '.join(parts)}; {where}"


def begin(
    loop: Loop,
    settings: Mapping[str, Any],
    changes: Mapping[str, str],
    *,
    resume: bool,
    after_kill: bool,
) -> None:
    """Resumes, or takes the first snapshot.

    `changes` are those of `settings` since the run's first start. `after_kill` says whether
    the previous process was killed and has a postmortem.
    """
    saver, data, recovery = loop.saver, loop.data, loop.recovery
    restorer, checkpoints = saver.restorer, saver.checkpoints
    restorer.find_damage()
    if not resume:
        _begin_lineage(loop)
    state = restorer.journal.state
    completed_at = state.newest_on_disk if state.ending == Ending.COMPLETED else None
    loop.memory.resume()
    checkpoints.allow_nonfinite(state.nonfinite_ok or [])
    _repeat_quarantine(loop)
    if after_kill:
        loop.log.warning("the previous run was killed; its postmortem was written")
    if state.plan is not None:
        finish_rollback(loop, state.plan)
    elif resume:
        _resume(loop)
    recovery.read_engines()
    recovery.dominance.silent_until = recovery.ledger.accepted_until
    data.start(resumed=resume, completed_at=completed_at)
    state.ending = None
    state.settings = state.settings or dict(settings)
    restorer.write_journal(data.step)
    saver.start(data.step)
    checkpoints.reload(data.step)
    if resume:  # otherwise the first save does it
        saver.keep_anchor()
    else:
        _allow_nonfinite(loop)
        saver.save("first")
    loop.ranks.termination.start()
    store = checkpoints.store
    where = "in host memory only" if store.accepts("regular") else "by the trainer only"
    if store.disk is not None:
        where = f"in {type(store).__name__ if store.root is None else store.root}"
    line = start_line(
        loop.policy,
        data.step,
        f"checkpoints {where}",
        resumed=resume,
        learning_rate=loop.driver.learning_rate(),
        batch=batch_of(settings),
    )
    loop.log.info(line)
    if changes_text(changes):
        loop.warn(
            "other settings than at the start of this run (saved -> given): "
            f"{changes_text(changes)}. Hyperparameters of optimizers and schedules in the state "
            "stay as saved. To train with new settings from the start, pass an empty directory"
        )


def _begin_lineage(loop: Loop) -> None:
    """Begins a new run; raises NoGoodCheckpoint if the directory has lost its checkpoints."""
    restorer = loop.saver.restorer
    journal = restorer.journal
    refuse_if_lost(journal, restorer.damage)
    if journal.state != JournalState():
        loop.warn(
            f"{journal.path} is of a process that ended before a checkpoint was on disk: a new run "
            "begins, and replaces the file"
        )
    lineage = agreed(loop.ranks, loop.log.events.run)
    journal.state = JournalState(lineage=lineage, first_step=loop.data.step)


def _repeat_quarantine(loop: Loop) -> None:
    """Restores the quarantine of checkpoints without a status file, by the journal's list."""
    restorer, done = loop.saver.restorer, set[int]()
    while True:  # each quarantine may uncover an older checkpoint of the same step
        lost = lost_status(restorer.saves(), restorer.journal)
        steps = [step for step in agreed(loop.ranks, lost.quarantined) if step not in done]
        if not steps:
            return
        done.update(steps)
        loop.warn(
            f"the status of checkpoint {', '.join(map(str, steps))} is damaged or missing; "
            f"{restorer.journal.path} lists the checkpoint as quarantined, and it stays quarantined"
        )
        loop.saver.checkpoints.quarantine(steps, now=loop.data.step)


def _allow_nonfinite(loop: Loop) -> None:
    """Allows NaN and Inf in the arrays that are not finite before the first step."""
    names = loop.saver.checkpoints.allow_nonfinite_in(loop.driver.items())
    if names:
        loop.saver.restorer.journal.state.nonfinite_ok = names
        loop.saver.restorer.write_journal(loop.data.step)
        shown = ", ".join(names[:5])
        loop.warn(f"not finite from the start, so NaN and Inf are allowed in: {shown}")


def _resume(loop: Loop) -> None:
    restorer, checkpoints = loop.saver.restorer, loop.saver.checkpoints
    saves, journal = restorer.saves(), restorer.journal
    usable = [s.step for s in saves if s.finite and s.status != "quarantined"]
    unknown = set(agreed(loop.ranks, lost_status(saves, journal).unknown))
    try:
        if not usable:
            raise no_usable_checkpoint(journal, saves, restorer.damage)
        newest_first = sorted(usable, reverse=True)
        # A checkpoint with a damaged status may have been quarantined: it is the last choice.
        order = sorted(newest_first, key=unknown.__contains__)
        if journal.state.first_step is None:  # the journal was deleted
            journal.state.first_step = min(usable)
        step, generators = restorer.resume(order)
    except NoGoodCheckpoint as error:
        raise no_usable_checkpoint(journal, saves, restorer.damage) from error
    loop.data.restore(step, generators)
    # Otherwise the run would use such a checkpoint as its own after it has passed the step.
    checkpoints.quarantine([at for at in unknown if at > step], now=step)
    loop.log.event("resume", step=step, checkpoint=step)
    damaged = {error.step: error for error in restorer.damage if error.step > step}
    skipped = [saved for saved in saves if saved.step > step and saved.step not in damaged]
    if skipped:
        which = ", ".join(_reason(saved) for saved in skipped)
        loop.log.info(f"checkpoints newer than {step} cannot be used: {which}")
    if damaged:
        which = "; ".join(f"{at} ({e.file} {e.difference})" for at, e in sorted(damaged.items()))
        loop.log.warning(f"checkpoints newer than {step} are damaged: {which}")
    newest = max([*damaged, *(saved.step for saved in saves)])
    if newest > step:
        lost = f"{newest - step} steps up to checkpoint {newest}"
        loop.warn(f"the run resumes at step {step}: {lost} are lost, and trained again")


def _reason(saved: Saved) -> str:
    return f"{saved.step} ({saved.status if saved.finite else 'not finite'})"


def finish_rollback(loop: Loop, plan: Rollback) -> None:
    """Finishes a rollback during which the previous process was killed."""
    restorer = loop.saver.restorer
    try:
        generators = restorer.finish(plan)
    except NoGoodCheckpoint as error:
        raise no_usable_checkpoint(restorer.journal, restorer.saves(), restorer.damage) from error
    loop.data.restore(plan.target, generators)
    loop.recovery.log_rollback(plan, RollbackOutcome.AFTER_CRASH)
    loop.log.warning(f"finished an interrupted rollback: back at step {plan.target}")
