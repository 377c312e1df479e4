"""Collects how a run ends, for the texts about its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from healcore.events.models import Ending
from healcore.runtime.reporting.run_outcome import RunOutcome
from healcore.runtime.store.checkpoints import CheckpointInfo, StoreError

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


def outcome_of(run: Run, ending: Ending, why: str = "", **fields: Any) -> RunOutcome:
    """Collects how the run ends, for its diagnosis, its postmortem and its report.

    Args:
        run: the parts of the run.
        ending: the kind of end.
        why: the reason of a stop, or the signal.
        **fields: more fields of `RunOutcome`, such as the exception.
    """
    monitor = run.monitor
    good = run.known_checkpoints.last_good_step
    path = None
    for saved in listed_checkpoints(run):
        if saved.step == good:
            path = saved.path
            break
    lost = [each for each in run.ledger.rollbacks if each.lost]
    probation = None
    if run.store.trainer_save is None:  # a trainer that saves itself has no known-good checkpoints
        probation = run.policy.rollback.probation
    return RunOutcome(
        run.log.history,
        ending,
        run.progress.step,
        monitor.counts(),
        why,
        open=monitor.is_unhealthy,
        lasting=monitor.lasting_causes,
        lr_scale=run.rate_log.lr_scale,
        last_good=good,
        last_good_path=path,
        probation=probation,
        nonfinite_saves=tuple(run.known_checkpoints.nonfinite),
        metrics=monitor.metrics.values(),
        steps_lost=sum(each.lost for each in lost),
        why_lost=lost[-1].why_lost if lost else "",
        steps_skipped=0 if run.recovery.counts_steps else run.step_batches.skipped_steps,
        compares=run.comparisons.is_enabled,
        unrepaired=run.ledger.damage_left,
        **fields,
    )


def listed_checkpoints(run: Run) -> list[CheckpointInfo]:
    """The checkpoints with their statuses, or an empty list if the store cannot be read.

    For texts about the run's end, which must not fail because of the store.

    Args:
        run: the parts of the run.
    """
    try:
        return run.known_checkpoints.listed()
    except StoreError:
        return []
