"""`RunOutcome`: how a run has ended, as data for the texts about its end."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from healcore.core.decision import Cause
from healcore.events.models import Ending
from healcore.history import Counts, RunHistory
from healcore.runtime.faults.failures import causes_of
from healcore.runtime.store.checkpoints import CheckpointInfo, StoreError

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


class RunOutcome(NamedTuple):
    """How a run has ended, and what is known about the run at its end.

    The diagnosis, the postmortem, the last line on the console and the `HealingReport` take their
    facts from here. A live run builds its outcome itself (`RunOutcome.of`). After a kill the
    next start builds the outcome from the files (`postmortem.write_for_killed`), so several fields
    may be unknown.
    """

    history: RunHistory
    """What happened in the run, from its events."""
    ending: str
    """Kind of the end, one of `Ending`."""
    step: int
    """Optimizer steps done."""
    counts: Counts
    """Counts of the whole run; lower limits if the run was killed."""
    why: str = ""
    """Reason of a stop, or name of the signal."""
    exception: str | None = None
    """The exception in one line, or None without an exception."""
    fault: Cause = Cause(0)
    """Cause of the exception, or 0 without an exception."""
    open: bool | None = None
    """Whether the last incident was open or the last step unhealthy, or None if unknown."""
    lasting: Cause = Cause(0)
    """Lasting causes of the last step, such as a plateau."""
    lr_scale: float = 1.0
    """Smallest multiplier of the learning rate of any engine, in (0, 1]."""
    last_good: int | None = None
    """Step of the newest known-good checkpoint on disk, or None without one. In memory if the store
    has no directory."""
    last_good_path: str | None = None
    """Directory of the checkpoint `last_good`."""
    probation: int | None = None
    """Healthy steps after which a checkpoint is known-good, or None if unknown."""
    nonfinite_saves: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """Step and array names of each checkpoint with disallowed NaN or Inf."""
    metrics: Mapping[str, float] = MappingProxyType({})
    """`Healer.metrics` at the end."""
    steps_skipped: int = 0
    """Steps that the data had more: rollbacks have skipped their batches."""
    compares: bool | None = None
    """Whether weights are compared, or None if unknown."""
    steps_lost: int = 0
    """Steps that rollbacks have undone and that were not repeated: the data was not rewound."""
    why_lost: str = ""
    """Why the data was not rewound, or empty if no step is lost."""
    unrepaired: tuple[int, ...] = ()
    """Onsets of the damage that the weights have: it came back after each rollback and was
    accepted, or no checkpoint could be restored."""

    @classmethod
    def of(cls, run: Run, ending: Ending, why: str = "", **fields: Any) -> RunOutcome:
        """Collects how a live run ends.

        Args:
            run: the parts of the run.
            ending: the kind of end.
            why: the reason of a stop, or the signal.
            **fields: more fields, such as the exception.
        """
        monitor = run.monitor
        good, path = _last_good(run)
        lost = [each for each in run.ledger.rollbacks if each.lost]
        probation = None
        if run.store.trainer_save is None:  # a trainer that saves has no known-good checkpoints
            probation = run.policy.rollback.probation
        return cls(
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
            compares=run.witness.is_enabled,
            unrepaired=tuple(run.ledger.damage_left),
            **fields,
        )

    @property
    def cause(self) -> Cause:
        """Cause of the last incident, or 0 without an incident."""
        last = self.history.last_incident
        if last is None:
            return Cause(0)
        return causes_of(last.cause)


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
