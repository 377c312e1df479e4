"""Starts a run: resumes from a checkpoint, or takes the first snapshot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from healcore.runtime.driver import Driver
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.loop.loop import Loop
from healcore.runtime.loop.run_settings import batch_of, changes_text
from healcore.runtime.recovery.record import Record
from healcore.runtime.run_log import RunLog
from healcore.runtime.store import Course, NoGoodCheckpoint, Saved
from healcore.runtime.store.ranks import Ranks, agreed

_SHOWN = 3
"""Max checkpoints that an error names."""


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
    newest: Record | None,
    settings: Mapping[str, Any],
    changes: Mapping[str, str],
    *,
    resume: bool,
    after_kill: bool,
) -> None:
    """Resumes, or takes the first snapshot.

    Args:
        loop: the run.
        newest: the newest record in the store, or None.
        settings: settings of the program.
        changes: the changes of `settings` since the run's first start.
        resume: whether the store has checkpoints.
        after_kill: whether the previous process was killed and has a postmortem.
    """
    saver, data, recovery = loop.saver, loop.data, loop.recovery
    restorer, checkpoints = saver.restorer, saver.checkpoints
    restorer.find_damage()
    if after_kill:
        loop.log.warning("the previous run was killed; its postmortem was written")
    if resume:
        if newest is not None:
            checkpoints.allow_nonfinite(newest.nonfinite_ok)
        _resume(loop, newest)
    else:
        if restorer.damage:
            raise _no_usable_checkpoint(loop, [])
        restorer.record.run = agreed(loop.ranks, loop.log.events.run)
        restorer.record.first_step = data.step
        checkpoints.begin_attempt(data.step)
    record = restorer.record
    record.settings = record.settings or dict(settings)
    recovery.read_engines()
    recovery.dominance.silent_until = recovery.ledger.accepted_until
    completed_at = newest.step if newest is not None and newest.completed else None
    data.start(resumed=resume, completed_at=completed_at)
    saver.start(data.step)
    if resume:  # otherwise the first save does it
        saver.keep_anchor()
    else:
        _allow_nonfinite(loop)
        saver.save("first")
    loop.ranks.termination.start()
    store = checkpoints.store
    where = "in host memory only" if store.accepts("regular") else "by the trainer only"
    if store.durable:
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


def _allow_nonfinite(loop: Loop) -> None:
    """Allows NaN and Inf in the arrays that are not finite before the first step."""
    names = loop.saver.checkpoints.allow_nonfinite_in(loop.driver.items())
    if names:
        loop.saver.restorer.record.nonfinite_ok = names
        shown = ", ".join(names[:5])
        loop.warn(f"not finite from the start, so NaN and Inf are allowed in: {shown}")


def _resume(loop: Loop, newest: Record | None) -> None:
    restorer = loop.saver.restorer
    course = Course() if newest is None else newest.course
    saves = course.judged(restorer.saves())
    usable = [saved.step for saved in saves if saved.finite and saved.status != "abandoned"]
    try:
        step, generators = restorer.resume(newest, usable[::-1])
    except NoGoodCheckpoint as error:
        raise _no_usable_checkpoint(loop, saves) from error
    loop.data.restore(step, generators)
    loop.log.event("resume", step=step, checkpoint=step)
    lost = {saved.step: _reason(saved) for saved in saves if saved.status != "abandoned"}
    lost |= {error.step: f"damaged: {error.file} {error.difference}" for error in restorer.damage}
    lost = {at: why for at, why in sorted(lost.items()) if at > step}
    if lost:
        which = "; ".join(f"{at} ({why})" for at, why in lost.items())
        loop.warn(
            f"the run resumes at step {step}: {max(lost) - step} steps up to checkpoint "
            f"{max(lost)} are lost, and trained again, because checkpoints newer than {step} "
            f"cannot be used: {which}"
        )


def _reason(saved: Saved) -> str:
    return saved.status if saved.finite else "not finite"


def _no_usable_checkpoint(loop: Loop, saves: Sequence[Saved]) -> NoGoodCheckpoint:
    """The error that names the problem of each checkpoint, newest first, and what to do."""
    where = loop.saver.checkpoints.store.root or "the store"
    wrong = {saved.step: _reason(saved) for saved in saves}
    wrong |= {e.step: f"damaged: {e.file} {e.difference}" for e in loop.saver.restorer.damage}
    lines = [f"step {step} ({wrong[step]})" for step in sorted(wrong, reverse=True)]
    more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return NoGoodCheckpoint(
        f"{where} holds an earlier run, and none of its checkpoints can be used: "
        f"{', '.join(lines[:_SHOWN])}{more}. Restore an intact copy, or pass an empty directory to "
        "begin a new run"
    )
