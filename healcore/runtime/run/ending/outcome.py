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
    good, path = _last_good(run)
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
        unrepaired=tuple(run.ledger.damage_left),
        **fields,
    )


def _last_good(run: Run) -> tuple[int | None, str | None]:
    """Step and directory of the newest known-good checkpoint that outlives the process.

    A full disk may lack the newest ones, which are in host memory only. A store without a directory
    has all of its checkpoints there.
    """
    good = run.known_checkpoints.last_good_step
    listed = listed_checkpoints(run)
    if good is None or not listed:
        return good, None
    found: CheckpointInfo | None = None
    for saved in listed:  # ascending
        outlives = saved.path is not None or not run.store.durable
        if saved.is_usable and saved.step <= good and outlives:
            found = saved
    if found is None:
        return None, None
    return found.step, found.path


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
