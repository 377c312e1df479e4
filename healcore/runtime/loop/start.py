"""Starts a run: resumes from a checkpoint, or takes the first snapshot."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from healcore.runtime.loop.loop import Loop
from healcore.runtime.loop.run_settings import (
    batch_of,
    changes_since,
    changes_text,
    has_trainer,
    other_run,
    settings_of,
)
from healcore.runtime.loop.termination import AlreadyCompleted, EndRequested
from healcore.runtime.postmortem import postmortem
from healcore.runtime.recovery.record import Record
from healcore.runtime.store import Course, NoGoodCheckpoint, Saved, StoreError
from healcore.runtime.store.ranks import agreed

_SHOWN = 3
"""Max checkpoints that an error names."""
_records: dict[Path, Record] = {}
"""The record of the last run of this process in each directory."""


class StoreNotEmpty(StoreError):
    """The store holds a run, and `resume` is False or the run completed and is another run."""


def start(loop: Loop, state: Any, resume: Any, warning: str | None) -> None:
    """Checks `resume`, logs the start, and resumes or takes the first snapshot.

    Args:
        loop: the run.
        state: `state` of the Healer.
        resume: `resume` of the Healer.
        warning: problem of the directory's claim, or None.
    """
    log, policy, ranks, store = loop.log, loop.policy, loop.ranks, loop.saver.checkpoints.store
    restorer = loop.saver.restorer
    events = None if ranks.rank else log.events.path
    previous = None if events is None else postmortem.last_run(events)
    after_kill = bool(events and previous and postmortem.of_killed(events, previous))
    if any(ranks.gather(ranks.stop_file.found)):
        log.info(f"nothing was done: {ranks.stop_file.why} exists; remove the file to train")
        raise EndRequested(ranks.stop_file.why)
    saves, newest = restorer.saves(), restorer.newest_record()
    settings = settings_of(loop.driver, policy, state, ranks.world)
    changes = agreed(ranks, {} if newest is None else changes_since(newest.settings, settings))
    if saves and resume is not True:
        _check_resume(loop, resume, newest, saves, changes, by_trainer=has_trainer(state))
    if saves and previous is not None:
        log.run = previous
    log.event(
        "start",
        step=None,
        policy=policy.name,
        fingerprint=policy.fingerprint,
        policy_toml=policy.text,
        mode=policy.engine.mode,
        framework=loop.driver.framework,
        rank=ranks.rank,
        world=ranks.world,
        save_every=loop.saver.checkpoints.every,
        store=str(store.root or type(store).__name__),
        resumes=bool(saves),
    )
    if warning is not None:
        log.problem(None, warning)
    if after_kill:
        log.warning("the previous run was killed; its postmortem was written")
    try:
        _begin(loop, newest, settings, resume=bool(saves))
    except BaseException as error:
        # With an end event, the next start does not take this process for killed.
        raised = "".join(traceback.format_exception_only(error)).strip()
        step = loop.data.step
        log.event("problem", step=step, problem=f"the run did not start: {raised}")
        log.event("end", step=step, ending="exception")
        ranks.termination.stop()
        raise
    _log_first_lines(loop, settings, changes, resumed=bool(saves))
    log.trackers.start(restorer.record.run or log.events.run)
    if not ranks.rank:
        loop.notes.remove()  # notes of earlier starts
    loop.guard.start()
    loop.driver.on_step = loop.guard.on_step
    if store.root is not None:
        _records[store.root.resolve()] = restorer.record


def _check_resume(
    loop: Loop,
    resume: Any,
    newest: Record | None,
    saves: list[Saved],
    changes: Mapping[str, str],
    *,
    by_trainer: bool,
) -> None:
    """Raises if a run with checkpoints must not be resumed. `by_trainer`: see `has_trainer`."""
    root = loop.saver.checkpoints.store.root
    where = root or "the store"
    last = max([each.step for each in saves if each.status != "abandoned"], default=0)
    if resume is False:
        raise StoreNotEmpty(
            f"{where} holds checkpoints of an earlier run, up to step {last}: pass an empty "
            'directory, or resume="auto" to resume from them'
        )
    if newest is None or not newest.completed:
        return
    own = root and _records.get(root.resolve())
    which = "that this process has completed" if own and own.completed else other_run(changes)
    if which:
        raise StoreNotEmpty(
            f"{where} holds a run {which}. Its last step is {last}. Nothing was trained. Pass an "
            'empty directory for each run, as in store=f"runs/{fold}", and set the seed before the '
            "model is made; resume=True resumes the saved run, with its weights and settings"
        )
    if not by_trainer:
        completed = AlreadyCompleted(
            f"nothing to do: {where} holds a run that completed at step {last}; resume=True "
            "trains it further if the program has more epochs (batches(loader, epochs=...)) or "
            "steps than that run had, an empty directory begins a new run"
        )
        loop.log.info(str(completed))
        raise completed


def _begin(loop: Loop, newest: Record | None, settings: Mapping[str, Any], *, resume: bool) -> None:
    """Resumes, or takes the first snapshot; `newest` is the newest record in the store."""
    saver, data, recovery = loop.saver, loop.data, loop.recovery
    restorer, checkpoints = saver.restorer, saver.checkpoints
    record = restorer.record
    restorer.find_damage()
    if resume:
        if newest is not None:
            checkpoints.allow_nonfinite(newest.nonfinite_ok)
        _resume(loop, newest)
    else:
        if restorer.damage:
            raise _no_usable_checkpoint(loop, [])
        record.run = agreed(loop.ranks, loop.log.events.run)
        record.first_step = data.step
        checkpoints.begin_attempt(data.step)
    record.settings = record.settings or dict(settings)
    recovery.read_engines()
    recovery.dominance.silent_until = recovery.ledger.accepted_until
    completed_at = newest.step if newest is not None and newest.completed else None
    data.start(resumed=resume, completed_at=completed_at)
    saver.start(data.step)
    if resume:  # otherwise the first save does it
        saver.keep_anchor()
    else:
        record.nonfinite_ok = checkpoints.allow_nonfinite_in(loop.driver.state())
        if record.nonfinite_ok:
            shown = ", ".join(record.nonfinite_ok[:5])
            loop.warn(f"not finite from the start, so NaN and Inf are allowed in: {shown}")
        saver.save("first")
    loop.ranks.termination.start()


def _log_first_lines(
    loop: Loop, settings: Mapping[str, Any], changes: Mapping[str, str], *, resumed: bool
) -> None:
    policy, store, step = loop.policy, loop.saver.checkpoints.store, loop.data.step
    where = "in host memory only" if store.accepts("regular") else "by the trainer only"
    if store.durable:
        where = f"in {type(store).__name__ if store.root is None else store.root}"
    begins = f"resumes from the checkpoint of step {step}" if resumed else f"starts at step {step}"
    rate, batch = loop.driver.learning_rate(), batch_of(settings)
    parts = [
        f"policy {policy.name}{' (observes, changes nothing)' if policy.observes else ''}",
        "" if rate is None else f"learning rate {rate:.4g}",
        batch and f"batch size {batch}",
    ]
    loop.log.info(f"{begins}: {', '.join(filter(None, parts))}; checkpoints {where}")
    if changes_text(changes):
        loop.warn(
            "other settings than at the start of this run (saved -> given): "
            f"{changes_text(changes)}. Hyperparameters of optimizers and schedules in the state "
            "stay as saved. To train with new settings from the start, pass an empty directory"
        )


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
