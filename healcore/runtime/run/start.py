"""Opens a run: constructs its parts, then resumes from a checkpoint or takes the first snapshot.

    open_run
        driver, ranks          attach to the optimizers; the ranks compare their arguments
        claims                 lock the directories, remove files of killed processes
        Run                    the parts
        _start                 what is in the store, and the first lines of the log
            _may_resume        may this start resume?
            _resume, _begin    resume, or the first snapshot

What fails before that leaves nothing behind: the claims are released and the driver is closed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from healcore.console import counted, first_of
from healcore.events import read
from healcore.events.models import Ending
from healcore.history import RunHistory, runs_of
from healcore.runtime.driver import WEIGHTS, driver_for
from healcore.runtime.reporting import postmortem
from healcore.runtime.reporting.diagnosis import RunOutcome
from healcore.runtime.run import reports
from healcore.runtime.run.checkpoints.saver import SaveReason
from healcore.runtime.run.ending.exits import EndRequested
from healcore.runtime.run.progress import LoopPhase
from healcore.runtime.run.run import Run
from healcore.runtime.run.run_record import RunRecord
from healcore.runtime.run.run_settings import changes_since, settings_of, why_other_run
from healcore.runtime.run_options import Options
from healcore.runtime.store.checkpoints import CheckpointInfo, NoGoodCheckpoint, StoreError
from healcore.runtime.store.claim import Claim
from healcore.runtime.store.manifest import scan, sweep
from healcore.runtime.store.ranks import Ranks, broadcast, run_on_first
from healcore.runtime.store.store import CheckpointStore


class StoreNotEmpty(StoreError):
    """The store holds a run that this start must not continue or overwrite.

    Either `resume` is False, or the run has completed and is another run than this program's.
    Nothing was trained. The message says which of the two it is, and what to pass instead.
    """

    __module__ = "healcore.errors"


def open_run(options: Options) -> Run:
    """Opens a run: attaches to the optimizers, opens the store, and resumes or takes a snapshot.

    Args:
        options: the arguments of `Healer`.

    Returns:
        The run, ready for its first step.

    Raises:
        Exception: the errors of `Healer.__enter__`. The directories are not claimed any more then,
            and the optimizers are as before.
    """
    driver = driver_for(options.state, options.policy.engine, options.attach)
    claims: list[Claim] = []
    try:
        ranks = driver.ranks()
        _check_same_arguments(options, ranks)
        store = options.store
        if not isinstance(store, CheckpointStore):
            store = driver.store(store)
        warnings = run_on_first(ranks, partial(_claim, store, claims))
        run = Run(options, driver, ranks, store, claims)
        _start(run, options, warnings)
        Run.opened += 1
    except BaseException:
        for each in claims:
            each.release()
        driver.close()
        raise
    return run


def _check_same_arguments(options: Options, ranks: Ranks) -> None:
    """Raises ValueError on all ranks if a rank has other arguments: they would wait for each other.

    The policy decides at which steps the ranks exchange values, and so do saves.
    """
    policy = options.policy
    shared = {
        "policy": policy.text or policy.engine.fingerprint or policy.name,
        "save_every": options.checkpoints.every,
        "store": options.store is not None,
    }
    for rank, theirs in enumerate(ranks.gather(shared)):
        differ = [name for name, value in shared.items() if theirs[name] != value]
        if differ:
            raise ValueError(
                f"rank {rank} has another {', '.join(differ)} than rank {ranks.rank}: pass the "
                "same arguments to Healer(...) on every rank"
            )


def _claim(store: CheckpointStore, claims: list[Claim]) -> list[str]:
    """Claims the directories of a store for this run, and removes files of killed processes.

    Adds each claim to `claims`. Returns warnings for the log. Raises StoreInUse if another run is
    using a directory, and StoreError if two directories have checkpoints of different runs: a
    restore would mix them, and a save would delete some.
    """
    store.join()  # `sweep` would delete the temporary files of a save in progress
    runs: dict[str, Path] = {}
    for root in store.roots:
        claims.append(Claim(root))
        sweep(root)
        with suppress(OSError):  # the first listing reports it
            for first, *_ in scan(root)[0].values():
                runs.setdefault(str((first.manifest.record or {}).get("run")), root)
    if len(runs) > 1:
        named = ", ".join(f"{root} has run {run}" for run, root in runs.items())
        raise StoreError(
            f"the directories of a list are of one run, and here {named}: nothing was read. "
            "Pass the directories of one run, or an empty directory in place of the other"
        )
    return [each.warning for each in claims if each.warning]


def _start(run: Run, options: Options, warnings: Sequence[str]) -> None:
    """Finds the run in the store, decides what to do with it, and does so.

    Args:
        run: the parts of the run.
        options: the arguments of `Healer`.
        warnings: problems of the claims of directories, for the log.

    Raises:
        EndRequested: the stop file exists.
        StoreNotEmpty: the store holds a run that this start must not continue.
        NoGoodCheckpoint: the store holds a run, and none of its checkpoints can be used.
    """
    requests, stored = run.end_requests, run.way_back
    history, kill_text = _read_previous_process(run)
    last_saved = _last_saved(run, history)
    if any(run.ranks.gather(requests.stop_file_found)):
        run.log.info(f"nothing was done: {requests.stop_reason} exists; remove the file to train")
        raise EndRequested(requests.stop_reason)
    saves, newest = stored.listed(), stored.newest_record()
    saved = newest or RunRecord()
    settings = settings_of(run.driver, run.policy, options.state, run.ranks.world)
    changes = broadcast(run.ranks, changes_since(saved.settings, settings))
    resumes = _may_resume(run, options.resume, saves, newest, changes)
    if not resumes:
        history = None
    if history is not None:
        run.log.history = history
    reports.report_start(run, settings, resumes=resumes)
    for warning in warnings:
        run.log.problem(None, warning)
    if kill_text:
        run.log.warning(kill_text)
    try:
        stored.find_damage()
        if resumes:
            _resume(run, saved, newest)
        else:
            _begin(run, settings)
    except BaseException as error:
        reports.report_failed_start(run, error)
        raise
    _warn_of_lost_steps(run, last_saved, saves)
    if run.progress.had_completed and options.resume is not True and not run.loop.has_trainer:
        run.progress.phase = LoopPhase.COMPLETED
    run.record.settings = run.record.settings or settings
    reports.say_what_begins(run, settings, changes, resumed=resumes)
    if resumes and not run.loop.has_trainer:
        reports.warn_of_snapshot(run, settings, saved.settings)
    if not requests.watch_signals():
        run.loop.warn(
            "the run was opened in a side thread, where Python delivers no signals: SIGTERM and "
            "Ctrl-C end the process without a save. Open the Healer in the main thread"
        )
    run.log.trackers.start(run.record.run or run.log.events.process_id, run.log.warning)
    run.driver.on_step = run.loop.on_step


def _read_previous_process(run: Run) -> tuple[RunHistory | None, str]:
    """Reads what the previous processes of this run have logged.

    Returns:
        The history of the run until then, or None without events; and a line about the kill of the
        previous process, or an empty string.
    """
    events = run.log.events.path
    if events is None or not events.is_file():
        return None, ""
    try:
        runs = runs_of(read(events).by_process())
    except Exception as error:  # the run starts also if the file of the last run is damaged
        run.log.warning(f"the last run in {events} cannot be read: {error!r}")
        return None, ""
    if not runs:
        return None, ""
    history, killed = runs[-1], ""
    if history.state in (Ending.GONE, Ending.UNKNOWN):
        killed = f"the previous run was killed after step {history.step or 0} or later"
        outcome = RunOutcome(
            history,
            history.state,
            history.step or 0,
            history.counts(),
            unrepaired=history.unrepaired,
        )
        problem = postmortem.write(events, outcome)
        if problem is not None:
            killed += f"; {problem}"
    return history, killed


def _last_saved(run: Run, history: RunHistory | None) -> int:
    """Step of the newest checkpoint that the last run has saved into this store, by its events.

    Returns:
        The step, or 0 if no such checkpoint is known. The last run in the events file may have had
        another store.
    """
    root, events = run.store.root, run.log.events.path
    if history is None or history.start is None or root is None or events is None:
        return 0
    of_this_store = root in (events.parent, Path(history.start.store or ""))
    if of_this_store:
        return max(history.saved, default=0)
    return 0


def _may_resume(
    run: Run,
    resume: object,
    saves: Sequence[CheckpointInfo],
    newest: RunRecord | None,
    changes: Mapping[str, str],
) -> bool:
    """Whether the start resumes the run in the store. Otherwise a new run begins.

    A store that holds only the first snapshot of a run begins again if the program has loaded other
    weights since. The snapshot is deleted then.

    Args:
        run: the parts of the run.
        resume: the argument of `Healer`.
        saves: the checkpoints in the store.
        newest: the newest record in the store, or None if no record can be read.
        changes: settings of the program that differ from the saved settings.

    Raises:
        StoreNotEmpty: the run in the store must not be resumed.
    """
    if not saves:
        return False
    place, root = run.store.place or "the store", run.store.root
    step = max((each.step for each in saves if not each.is_abandoned), default=0)
    if resume is False:
        raise StoreNotEmpty(
            f"{place} holds checkpoints of an earlier run, up to step {step}: pass an empty "
            'directory, or resume="auto" to resume from them'
        )
    if newest is None:
        return True
    which = ""
    if newest.completed and resume is not True:
        which = why_other_run(changes)
        if root is not None and root.resolve() in run.completed:
            which = "that this process has completed"
    if which:
        raise StoreNotEmpty(
            f"{place} holds a run {which}. Its last step is {step}. Nothing was trained. "
            'Pass an empty directory for each run, as in store=f"runs/{fold}", and set the seed '
            "before the model is made; resume=True resumes the saved run, with its weights and "
            "settings"
        )
    if WEIGHTS in changes and {each.step for each in saves} == {newest.first_step}:
        run.store.delete(newest.first_step)
        return False
    return True


def _begin(run: Run, settings: dict[str, Any]) -> None:
    """Begins a new run with its first snapshot."""
    if run.saver.damage:
        raise _no_usable_checkpoint(run, [])
    record, step = run.record, run.progress.step
    record.run = broadcast(run.ranks, run.log.events.process_id)
    record.first_step = step
    record.settings = settings
    # Rollbacks that the engines have made already: the program has ported their state.
    budgets = [engine["state"]["budget"]["recoveries"] for engine in run.driver.engines().values()]
    full = int(run.policy.engine.config.budget.recoveries)
    record.ledger.spent = max(full - int(min(budgets, default=full)), 0)
    run.saver.begin_attempt(step)
    run.metrics.read()
    record.nonfinite_ok = run.saver.nonfinite_in_state()
    run.store.nonfinite_ok += tuple(record.nonfinite_ok)
    if record.nonfinite_ok:
        shown = first_of(record.nonfinite_ok, 5)
        run.loop.warn(f"not finite from the start, so NaN and Inf are allowed in: {shown}")
    run.saver.save(SaveReason.FIRST)


def _resume(run: Run, record: RunRecord, newest: RunRecord | None) -> None:
    """Resumes from the newest usable checkpoint.

    Args:
        run: the parts of the run.
        record: the newest record in the store, or an empty one.
        newest: the newest record in the store, or None.
    """
    run.store.nonfinite_ok += tuple(record.nonfinite_ok)
    saves = record.attempt_history.with_status(run.way_back.listed())
    usable = [each.step for each in saves if each.is_usable]
    try:
        step, random_states = run.way_back.resume(newest, usable[::-1])
    except NoGoodCheckpoint as error:
        raise _no_usable_checkpoint(run, saves) from error
    completed = record.completed and record.step == step
    run.progress.resume(step, completed=completed)
    run.data_state.resume(random_states)
    if run.record.is_in_body and not (completed or run.loop.has_trainer):
        # Before a record is written, which has to say so too.
        run.progress.phase = LoopPhase.AFTER_STEP
    run.log.event("resume", step=step, checkpoint=step)
    _report_before_kill(run)
    if not run.witness.state.anchors:
        run.saver.add_anchor()
    run.store.protected = run.witness.steps_needed


def _report_before_kill(run: Run) -> None:
    """Reports the last rollback if its process was killed between its commit and its event."""
    history, rollbacks = run.log.history, run.ledger.in_force
    if not rollbacks or len(history.processes) < 2 or run.ranks.rank:
        return
    done = rollbacks[-1]
    numbers = [event.number for event in history.of("rollback")]
    if done.number not in numbers and done.checkpoint == run.progress.step:
        reports.report_rollback(run, done, done.step - 1)


def _unusable(run: Run, saves: Sequence[CheckpointInfo]) -> dict[int, str]:
    """Step of each checkpoint -> its status or its damage."""
    found = {each.step: each.status if each.finite else "not finite" for each in saves}
    for each in run.saver.damage.values():
        found[each.step] = f"damaged: {each.file} {each.difference}"
    return found


def _warn_of_lost_steps(run: Run, last_saved: int, saves: Sequence[CheckpointInfo]) -> None:
    """Warns if checkpoints after the present step are missing or cannot be used.

    Args:
        run: the parts of the run.
        last_saved: step of the newest checkpoint by the events.
        saves: the checkpoints in the store before the start.
    """
    step = run.progress.step
    known = run.record.attempt_history.with_status(saves)
    wrong = _unusable(run, [each for each in known if not each.is_abandoned])
    if last_saved not in {each.step for each in saves}:
        wrong.setdefault(last_saved, "missing: deleted, or killed before it was complete")
    lost = {at: wrong[at] for at in sorted(wrong) if at > step}
    if lost:
        which = "; ".join(f"{at} ({why})" for at, why in lost.items())
        steps = counted(max(lost) - step, "step is", "steps are")
        run.loop.warn(
            f"this start begins at step {step}: {steps} lost and trained again; checkpoint {which}"
        )


def _no_usable_checkpoint(run: Run, saves: Sequence[CheckpointInfo]) -> NoGoodCheckpoint:
    """The error that names the problem of each checkpoint, newest first, and what to do."""
    where, wrong = run.store.place or "the store", _unusable(run, saves)
    lines = [f"step {step} ({wrong[step]})" for step in sorted(wrong, reverse=True)]
    return NoGoodCheckpoint(
        f"{where} holds an earlier run, and none of its checkpoints can be used: "
        f"{first_of(lines)}. No checkpoint was changed or deleted. Restore an intact copy; or "
        "begin a new run: move the directory away, or pass an empty one"
    )
