"""What the log and the console say about a rollback."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healcore.console import counted, first_of, fitted
from healcore.core.decision import Cause, names_of
from healcore.events.kinds import changes_of, flags_text
from healcore.events.models import EventRecord
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
NOT_RESTORED = "no checkpoint could be restored, so the run keeps its weights"
"""Why damage is not repaired although a rollback was decided."""


def report_rollback(run: Run, done: RollbackRecord, index: int) -> None:
    """Writes the events and the console line of a rollback.

    The event has all facts. Its `outcome` says whether the loaders were rewound: a reader would
    otherwise take the batches that follow for the batches of before.

    Args:
        run: the run, for its log and its policy.
        done: the rollback, after the checkpoint was restored.
        index: the newest step before it.
    """
    trouble = done.trouble
    rollback = _write_event(run, done)
    back = f"rolled back to checkpoint {done.checkpoint}"
    changes = ", ".join([back, *changes_of(rollback)])
    run.log.warning(fitted(f"step {index}: {reason_of(trouble)}; {changes}"))
    if done.rewind_obstacle:
        run.log.warning(fitted(f"step {index}: data {rollback.outcome}"))
    epoch = run.loaders.epoch_loop.returns_to
    if epoch is not None:
        # Before the program's code after the pass: it may print a row for the restored weights.
        run.log.info(
            f"step {done.checkpoint}: this pass over the data ends here, and then "
            f"healer.epochs yields epoch {epoch} again"
        )


def _write_event(run: Run, done: RollbackRecord) -> EventRecord:
    """Writes the event `rollback`, and returns it as a record."""
    trouble, obstacle = done.trouble, done.rewind_obstacle
    problem = None
    if trouble.arrays:
        problem = nonfinite_save(trouble)
    return run.log.event(
        "rollback",
        step=done.step,
        number=done.number,
        onset=done.onset,
        cause=Cause(trouble.flags),
        checkpoint=done.checkpoint,
        by=decided_by(trouble),
        problem=problem,
        outcome=f"continues forward: {obstacle}" if obstacle else "rewound",
        lr=done.lr,
        lr_limit=done.lr_limit,
        lr_at_fault=done.lr_at_fault,
        lr_scale_before=done.lr_scale_before,
        lr_scale=done.lr_scale,
        batches=[list(each) for each in done.batches],
        steps_repeated=done.repeated or None,
        steps_lost=done.lost or None,
        why=done.why_lost or None,
        held=done.after.sentences() or None,
        moments_reset=run.policy.rollback.reset_moments or None,
    )


def report_before_kill(run: Run, resumed: int) -> None:
    """Reports the last rollback if the process was killed after its commit, before its event.

    Then the run resumes from the target of this rollback. Without the events of earlier
    processes it is not known whether the rollback was reported.

    Args:
        run: the parts of the run.
        resumed: step of the checkpoint from which this process has resumed.
    """
    history, rollbacks = run.log.history, run.ledger.in_force
    if not rollbacks or len(history.processes) <= 1 or run.ranks.rank != 0:
        return
    reported = max((each.number or 0 for each in history.rollbacks), default=0)
    done = rollbacks[-1]
    if done.number > reported and done.checkpoint == resumed:
        report_rollback(run, done, done.step - 1)


def decided_by(trouble: Trouble) -> str | None:
    """The field `by` of an event, or None for a rule or a hook."""
    match trouble.cause:
        case TroubleCause.NO_FINITE_STEP:
            return "nonfinite_steps"
        case TroubleCause.INTENDED:
            return "intended_numbers"
        case TroubleCause.BETTER_WEIGHTS:
            return "earlier_weights"
    return "state" if trouble.arrays else None


def reason_of(trouble: Trouble) -> str:
    """Why a run goes back, for the line and the event of the rollback.

    Args:
        trouble: the trouble.

    Returns:
        A clause: "NaN in the loss", "ordered by a hook".
    """
    match trouble.cause:
        case TroubleCause.NO_FINITE_STEP:
            steps = counted(trouble.found_at - trouble.since + 1, "step")
            return f"{steps} in a row had no finite gradient although the weights are finite"
        case TroubleCause.INTENDED:
            return f"{trouble.intended}: {INTENDED}"
        case TroubleCause.BETTER_WEIGHTS:
            return f"the weights of step {trouble.better_step} are better"
    if trouble.exact:
        arrays = first_of(trouble.arrays) or "the weights"
        return f"the batch of step {trouble.found_at} makes {arrays} NaN or Inf"
    if trouble.arrays:
        return nonfinite_save(trouble)
    return flags_text(names_of(Cause(trouble.flags))) or "ordered by a hook"


def nonfinite_save(trouble: Trouble) -> str:
    """The reason of a rollback for a save with NaN or Inf, as a clause.

    Args:
        trouble: a trouble with `arrays`. Up to three of their names are in the clause.
    """
    return f"a save has found NaN or Inf in {first_of(trouble.arrays)}"


def why_accepted(trouble: Trouble, tries: int) -> str:
    """Why a change by the program is accepted after a number of tries, as a clause."""
    if trouble.cause is TroubleCause.INTENDED:
        return f"{trouble.intended}: {INTENDED}"
    if not tries:
        return (
            f"the last {MAX_ACCEPTED} changes came back after all tries: healcore cannot "
            "repair this one either, or the program intends it"
        )
    times = "the rollback" if tries == 1 else f"each of the {tries} rollbacks"
    return (
        f"the damage has come back after {times}: healcore cannot repair it, or the program "
        "intends the change"
    )


def accepted_line(
    trouble: Trouble, index: int, why: str, *, done: RollbackRecord | None, undone: bool
) -> str:
    """The console line of damage that is accepted.

    Args:
        trouble: the trouble.
        index: the newest step.
        why: the reason, as a clause.
        done: the rollback that has undone the tries, or None without one. Its line has said which
            weights are better.
        undone: whether the tries had held anything.
    """
    line = f"step {index}: "
    if done is None:
        line += f"{reason_of(trouble)}, since step {trouble.onset}; "
    line += why
    if undone:
        line += "; what was held is undone"
    return fitted(f"{line}; the run continues")
