"""Orders to the host, and the records of the rollbacks that were done. Steps are counted from 0.

An order is a value that never changes. Whatever decides makes one (a rule of the policy, a hook, a
save with NaN, a comparison of weights); `rollback.recovery` has it carried out in one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ConfigDict, NonNegativeInt

from healcore.core.decision import Action
from healcore.runtime.data import BatchId
from healcore.runtime.run.healthy_ranges import Held


@dataclass(frozen=True, kw_only=True)
class Order:
    """An order to the host: to save, to stop or to roll back (`action`).

        restored from here        onset                 index
    --------------------------------|---- trouble --------|--> the order is carried out
    """

    __pydantic_config__ = ConfigDict(extra="ignore")

    index: int
    """Step whose records led to the order."""
    onset: int
    """Step of the first alarm of the trouble. A checkpoint of a later step may hold the damage."""
    since: int = -1
    """Step of the first alarm with one of the causes, not before `onset`."""
    action: int = int(Action.ROLLBACK)
    """`Action` flags."""
    cause: int = 0
    """`Cause` flags."""
    depth: int = 1
    """Known-good checkpoint to restore: 1 is the newest before the onset, 2 the second newest."""
    batches: tuple[BatchId, ...] = ()
    """Batches to skip when the run repeats the steps."""
    sound_until_onset: bool = False
    """Whether the state is known to be sound up to `onset`, so that a checkpoint need not be
    known-good."""
    by_host: bool = False
    """Whether a hook, the check of the state or better weights gave the order, not the engine."""
    arrays: tuple[str, ...] = ()
    """Names of the arrays with NaN or Inf, if a save led to the order."""
    untrained: bool = False
    """Whether healthy steps have followed NaN or Inf in `arrays`, so that the run does not train on
    them. Such an order limits no rate, and it never stops the run."""
    by_repeat: bool = False
    """Whether the repeat after a rollback for `arrays` has shown the batch that makes them NaN or
    Inf. Such an order skips this batch alone. It limits no rate, and it never stops the run."""
    better_step: int | None = None
    """Step of the better earlier weights to restore, or None."""
    lr_at_fault: Mapping[str, float] | None = None
    """Engine name -> learning rate in force that caused the trouble; None if the rollback sets no
    limit. Without an entry it is the current rate, or the multiplier alone if that is unknown."""
    is_last: bool = False
    """Whether the next order for the same trouble stops the run. The rate is then limited to the
    rate of the restored step: a factor may not be enough, and there is no other attempt."""
    attempt: int = 0
    """`dead_run.Attempt` to bring back a dead run, or 0."""
    trial: str = ""
    """`next_trial.Trial` for better earlier weights, or an empty string."""
    held: Held | None = None
    """What is held in its healthy range from now on, or None to change nothing that is held."""
    held_before: Held | None = None
    """What was held before a trial; restored by `Trial.ACCEPT`."""
    intended: str = ""
    """The held numbers that have turned out to be intended, and their values; or empty."""
    read_again: tuple[BatchId, ...] = ()
    """Batches that earlier trials have skipped, to be read again."""
    lr_states: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Engine name -> its learning-rate state before a trial; restored by `Trial.ACCEPT`."""
    lr_scale_before: float = 1.0
    """The lowest learning-rate multiplier when the order was carried out."""


@dataclass(frozen=True, kw_only=True)
class RollbackRecord(Order):
    """A rollback that was carried out. The run's ledger keeps it, and the record of a checkpoint.

    Later orders depend on it: the same trouble is answered differently the second time. The report
    and the events of a rollback are made from it too.
    """

    number: int = 0
    """Number of the rollback, from 1 over the whole run."""
    step: int = 0
    """Steps done when the rollback began."""
    target: NonNegativeInt = 0
    """Step at which the run continues: of the restored checkpoint, unless `weights_of` is set."""
    skipped: int = 0
    """Number of skipped batches."""
    repeated: int = 0
    """Number of undone steps that the run repeats."""
    lost: int = 0
    """Number of undone steps that the run does not repeat, because the data was not rewound."""
    why_lost: str = ""
    """Why the data was not rewound, in short, or an empty string if no step is lost."""
    why_forward: str = ""
    """Why the data continues forward, or an empty string if it was rewound."""
    weights_of: NonNegativeInt | None = None
    """Step of the checkpoint whose weights were restored without its place in the run, or None."""
    engine: str = ""
    """Optimizer of the next three fields: the optimizer with the lowest multiplier, preferably with
    a limit."""
    lr: float | None = None
    """The schedule's learning rate when the rollback began, or None if unknown."""
    lr_limit: float | None = None
    """Upper limit of the rate, or None without a limit or if unknown."""
    lr_scale: float = 1.0
    """The multiplier at `target`: 1 where the schedule is below the limit."""
    undone: bool = False
    """Whether the trouble has stopped the run all the same. The next start undoes the rollback, and
    later decisions do not count the rollback."""

    @property
    def checkpoint(self) -> int:
        """Step of the restored checkpoint, whose weights the run continues with.

        It differs from `target` if only the weights were restored, and not the checkpoint's place
        in the run (`weights_of`).
        """
        if self.weights_of is not None:
            return self.weights_of
        return self.target

    def outline(self) -> RollbackRecord:
        """A copy without what only the newest rollback needs.

        The batches of a trial are needed to undo the trial. The batches of the newest rollback are
        needed if the process was killed before it wrote the event of the rollback. All others would
        only make the records of checkpoints grow.
        """
        if self.trial:
            return self
        return replace(self, batches=())
