"""Orders to the host, and the records of the rollbacks that were done. Steps are counted from 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from healcore.core.decision import Action
from healcore.runtime.data import BatchId
from healcore.runtime.run.healthy_ranges import Held

Step = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True)
class Order:
    """An order to the host: to save, to stop or to roll back (`action`)."""

    __pydantic_config__ = ConfigDict(extra="ignore")

    index: int  # step whose records led to the order
    onset: int  # step of the first alarm of the trouble
    since: int = -1  # step of the first alarm with one of the causes, not before `onset`
    action: int = int(Action.ROLLBACK)  # `Action` flags
    cause: int = 0  # `Cause` flags
    depth: int = 1  # known-good checkpoint to restore: 1 is the newest before the onset
    batches: tuple[BatchId, ...] = ()  # to skip when the run repeats the steps
    sound_until_onset: bool = False  # whether the state is known to be sound up to `onset`
    by_host: bool = False  # given by a hook, the state check or better weights, not by the engine
    arrays: tuple[str, ...] = ()  # names of arrays with NaN or Inf, if a save led to the order
    better_step: int | None = None  # step of the better earlier weights to restore, or None
    lr_at_fault: Mapping[str, float] | None = None
    """Engine name -> learning rate in force that caused the trouble; None if the rollback sets no
    limit. Without an entry it is the current rate, or the multiplier alone if that is unknown."""
    is_last: bool = False
    """Whether the next order for the same trouble stops the run. The rate is then limited to the
    rate of the restored step: a factor may not be enough, and there is no other attempt."""
    attempt: int = 0  # to bring back a dead run, see `dead_run.Attempt`, or 0
    trial: str = ""  # what the run tries for better earlier weights, see `Trial`, or empty
    held: Held | None = None
    """What is held in its healthy range from now on, or None to change nothing that is held."""
    held_before: Held | None = None
    """What was held before a trial; restored by `Trial.ACCEPT`."""
    intended: str = ""
    """The held numbers that have turned out to be intended, and their values; or empty."""
    read_again: tuple[BatchId, ...] = ()  # skipped by earlier trials
    lr_states: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Engine name -> its learning-rate state before a trial; restored by `Trial.ACCEPT`."""
    lr_scale_before: float = 1.0
    """The lowest learning-rate multiplier when the order was carried out."""


@dataclass(frozen=True, kw_only=True)
class RollbackRecord(Order):
    """A rollback that was carried out."""

    number: int = 0  # of the rollback, from 1 over the whole run
    step: int = 0  # steps done when the rollback began
    target: Step = 0  # step of the restored checkpoint
    skipped: int = 0  # number of skipped batches
    repeated: int = 0  # undone steps that the run repeats
    lost: int = 0  # undone steps that the run does not repeat, because the data was not rewound
    why_lost: str = ""  # why the data was not rewound, in short, or empty if no step is lost
    why_forward: str = ""  # why the data continues forward, or empty if it was rewound
    weights_of: Step | None = None
    """Step of the checkpoint whose weights were restored without its place in the run, or None."""
    engine: str = ""  # optimizer of the next three: lowest multiplier, preferably with a limit
    lr: float | None = None  # the schedule's rate when it began, or None if unknown
    lr_limit: float | None = None  # upper limit of the rate, or None without a limit or if unknown
    lr_scale: float = 1.0  # the multiplier at `target`: 1 where the schedule is below the limit

    @property
    def checkpoint(self) -> int:
        """Step of the restored checkpoint."""
        return self.target if self.weights_of is None else self.weights_of

    def outline(self) -> RollbackRecord:
        """A copy without what only the newest rollback needs.

        The batches of a trial are needed to undo the trial. The batches of the newest rollback are
        needed if the process was killed before it wrote the event of the rollback.
        """
        return self if self.trial else replace(self, batches=())
