"""What a run says of itself: at its start, at a rollback, and at its end."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from healcore.console import counted, error_text, first_of, fitted
from healcore.core.decision import Cause, names_of
from healcore.events.kinds import flags_text, sentence
from healcore.events.models import Ending
from healcore.runtime.driver import STEPPED, WEIGHTS
from healcore.runtime.faults.classification import Fault
from healcore.runtime.reporting import postmortem
from healcore.runtime.reporting.diagnosis import RunOutcome, advice, last_line
from healcore.runtime.run import run_settings
from healcore.runtime.run.ending.exits import RunStopped
from healcore.runtime.run.rollback.holding import LASTING_STEPS
from healcore.runtime.run.rollback.remedy import MAX_ACCEPTED
from healcore.runtime.run.trouble import RollbackRecord, Trouble, TroubleCause

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

INTENDED = (
    f"the program has kept this for {LASTING_STEPS} steps, or until the end of the data, so it is "
    "intended"
)
"""Why a number that was held is used, as a clause."""


# -- the start ------------------------------------------------------------------------------------


def report_start(run: Run, settings: Mapping[str, Any], *, resumes: bool) -> None:
    """Writes the event `start`: the policy, the settings, and where checkpoints go."""
    engine = run.policy.engine
    run.log.event(
        "start",
        step=None,
        policy=run.policy.name,
        fingerprint=engine.fingerprint,
        policy_toml=run.policy.text,
        mode=engine.mode,
        framework=run.driver.framework,
        rank=run.ranks.rank,
        world=run.ranks.world,
        save_every=run.schedule.every,
        store=str(run.store.root or type(run.store).__name__),
        settings=run_settings.settings_for_events(settings, _first_rate(run)),
        resumes=resumes,
    )


def _first_rate(run: Run) -> float | None:
    """The learning rate of the first optimizer, or None if it is unknown."""
    return next(iter(run.driver.learning_rates().values()))


def report_failed_start(run: Run, error: BaseException) -> None:
    """Logs that the run did not start, and stops watching signals.

    With an end event, the next start does not take this process for killed.
    """
    step = run.progress.step
    run.log.event("problem", step=step, problem=f"the run did not start: {error_text(error)}")
    run.log.event("end", step=step, ending="exception")
    run.end_requests.stop_watching()


def warn_of_snapshot(run: Run, settings: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Warns a loop that counts steps itself, if a checkpoint replaces the program's snapshot."""
    if STEPPED in settings[WEIGHTS] and STEPPED not in saved.get(WEIGHTS, STEPPED):
        run.loop.warn(
            "the optimizer that the program has passed was trained already, and checkpoint "
            f"{run.progress.step} replaces its state and the weights. A loop that counts its own "
            "steps loses or repeats steps: write healer.steps or healer.epochs"
        )


def say_what_begins(
    run: Run, settings: Mapping[str, Any], changes: Mapping[str, str], *, resumed: bool
) -> None:
    """Logs what begins where, under which policy, and which settings have changed."""
    store, step = run.store, run.progress.step
    if store.trainer_save:
        where = "by the trainer only"
    else:
        where = "in host memory only"
    if store.durable:
        where = f"in {store.place or type(store).__name__}"
    if run.loop.state.is_complete:
        run.log.info(
            f"this run has completed at step {step}: its final state is loaded, and the loop "
            f"trains nothing (pass resume=True to train on); checkpoints {where}"
        )
        return
    if resumed:
        begins = f"resumes from the checkpoint of step {step}"
    else:
        begins = f"starts at step {step}"
    if run.progress.had_completed:
        begins = f"loads the final state of step {step} of a run that has completed"
    rate, facts = _first_rate(run), f"policy {run.policy.name}"
    if run.policy.observes:
        facts += " (observes, changes nothing)"
    if rate is not None:
        facts += f", learning rate {rate:.4g}"
    run.log.info(f"{begins}: {facts}; checkpoints {where}")
    text = run_settings.changes_text(changes)
    if text:
        run.loop.warn(
            f"other settings than at the start of this run (saved -> given): {text}; "
            "numbers in the state stay as saved (docs/data-and-resume.md)"
        )


# -- a rollback -----------------------------------------------------------------------------------


def report_rollback(run: Run, done: RollbackRecord, index: int) -> None:
    """Writes the event and the console line of a rollback.

    The `outcome` of the event says whether the loaders were rewound: a reader would otherwise take
    the batches that follow for the batches of before.

    Args:
        run: the run, for its log and its policy.
        done: the rollback, after the checkpoint was restored.
        index: the newest step before it.
    """
    trouble, obstacle = done.trouble, done.rewind_obstacle
    event = run.log.event(
        "rollback",
        step=done.step,
        number=done.number,
        onset=done.onset,
        cause=Cause(trouble.flags),
        checkpoint=done.checkpoint,
        by=trouble.cause,
        why=reason_of(trouble),
        outcome=f"continues forward: {obstacle}" if obstacle else "rewound",
        lr=done.lr,
        lr_limit=done.lr_limit,
        lr_at_fault=done.lr_at_fault,
        lr_scale_before=done.lr_scale_before,
        lr_scale=done.lr_scale,
        batches=[list(each) for each in done.batches],
        steps_repeated=done.repeated or None,
        steps_lost=done.lost or None,
        problem=done.why_lost or None,
        held=done.after.sentences() or None,
    )
    run.log.warning(fitted(f"step {index}: {sentence(event)}"))
    if obstacle:
        run.log.warning(fitted(f"step {index}: data {event.outcome}"))
    epoch = run.loaders.epoch_loop.returns_to
    if epoch is not None:
        # Before the program's code after the pass: it may print a row for the restored weights.
        run.log.info(
            f"step {done.checkpoint}: this pass over the data ends here, and then "
            f"healer.epochs yields epoch {epoch} again"
        )


def reason_of(trouble: Trouble) -> str:
    """Why a run goes back, for the line and the event of the rollback.

    Args:
        trouble: the trouble.

    Returns:
        A clause: "NaN in the loss", "ordered by a hook".
    """
    arrays = first_of(trouble.arrays)
    match trouble.cause:
        case TroubleCause.NO_FINITE_STEP:
            steps = counted(trouble.found_at - trouble.since + 1, "step")
            return f"{steps} in a row had no finite gradient although the weights are finite"
        case TroubleCause.INTENDED:
            return f"{trouble.intended}: {INTENDED}"
        case TroubleCause.BETTER_WEIGHTS:
            return f"the weights of step {trouble.better_step} are better"
    if trouble.exact:
        return f"the batch of step {trouble.found_at} makes {arrays or 'the weights'} NaN or Inf"
    if trouble.arrays:
        return f"a save has found NaN or Inf in {arrays}"
    return flags_text(names_of(Cause(trouble.flags))) or "ordered by a hook"


def why_accepted(trouble: Trouble, tries: int) -> str:
    """Why a change by the program is accepted after a number of tries, as a clause."""
    if trouble.cause is TroubleCause.INTENDED:
        return reason_of(trouble)
    if not tries:
        return f"the last {MAX_ACCEPTED} changes came back after all tries"
    return f"it has come back after {counted(tries, 'rollback')}"


# -- the end --------------------------------------------------------------------------------------


def report_end(
    run: Run, ending: Ending, error: BaseException | None, fault: Fault, memory: str
) -> None:
    """Writes the postmortem, the last event and the last line.

    If an earlier process has completed the run, it has written the postmortem, and the first line
    has said so.

    Args:
        run: the parts of the run.
        ending: how the run ends.
        error: the exception that ends the run, or None.
        fault: the classified exception of the program.
        memory: sentence about what holds the memory after an out-of-memory error, or empty.
    """
    with suppress(Exception):  # a step in JAX that failed may have donated the state
        run.loop.count_last_step()
        run.stopping.count_last_steps()
        run.metrics.read()
    why = getattr(error, "why", "")
    if error is None and ending == Ending.REQUESTED:
        why = run.loop.state.break_place
    exception = trace = None
    if ending == Ending.EXCEPTION and error is not None:
        if isinstance(error, RunStopped):
            why = ""  # the reason of another run
        trace = "".join(traceback.format_exception(error))
        exception = error_text(error) + memory
    outcome = RunOutcome.of(run, ending, why, exception=exception, fault=fault.cause)
    events, counts = run.log.events.path, outcome.counts
    was_complete = run.loop.state.is_complete and ending == Ending.COMPLETED
    if events is not None and not was_complete:
        problem = postmortem.write(events, outcome, trace=trace)
        if problem:
            run.log.warning(problem)
    run.log.event(
        "end",
        step=outcome.step,
        ending=outcome.ending,
        incidents=counts.incidents,
        rollbacks=counts.rollbacks,
        last_good=outcome.last_good,
        steps_lost=outcome.steps_lost or None,
    )
    if was_complete:
        return
    write, line = run.log.info, last_line(outcome)
    if ending == Ending.COMPLETED and run.progress.had_completed and run.progress.resumed_here:
        write, line = (
            run.log.warning,
            (
                f"completed earlier, at step {outcome.step}: nothing was trained, and the state is "
                "the saved state; an empty directory begins a new run"
            ),
        )
    elif ending in (Ending.EXCEPTION, Ending.STOPPED):
        write = run.log.error
    elif outcome.unrepaired:
        write = run.log.warning
    write(line)
    if outcome.lasting:  # a plateau, for example
        what = flags_text(names_of(outcome.lasting))
        hints = " ".join(advice(outcome.lasting))
        run.log.warning(f"the run is not healthy: {what} at the end. {hints}")
