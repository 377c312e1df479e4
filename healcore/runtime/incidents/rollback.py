"""`Order` and `Rollback`: what a run answers to trouble, and what it then did.

Steps are counted from 0. A checkpoint of step n holds the state that step n starts from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from healcore.core.verdict import Action
from healcore.runtime.data import BatchId
from healcore.runtime.healthy_range import HealthyRange

Step = Annotated[int, Field(ge=0)]
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Order:
    """An order to the host: to save, to stop or to roll back (`action`)."""

    __pydantic_config__ = ConfigDict(extra="ignore")

    index: int
    """Step whose records led to the order."""
    onset: int
    """Step of the first alarm of the trouble."""
    since: int = -1
    """Step of the first alarm with one of the causes, not before `onset`."""
    action: int = int(Action.ROLLBACK)
    """`Action` flags."""
    cause: int = 0
    """`Cause` flags."""
    depth: int = 1
    """Known-good checkpoint to restore: 1 is the newest before the onset, 2 the next older."""
    batches: tuple[BatchId, ...] = ()
    """Ids of the batches to skip when the run repeats the steps."""
    exact: bool = False
    """Whether the state is known to be sound up to `onset`."""
    forced: bool = False
    """Whether a hook, the state check or better weights gave the order, not the engine."""
    arrays: tuple[str, ...] = ()
    """Names of arrays with NaN or Inf, if a save led to the order; otherwise empty."""
    better: int | None = None
    """Step of the better earlier weights that the rollback restores, or None."""
    lr_at_fault: float | None = None
    """Learning rate in force that caused the trouble, or None if the rollback sets no limit. In an
    order NaN stands for the current rate, or for the multiplier alone if the rate is unknown."""
    trial: str = ""
    """What the run tries for better earlier weights (`recovery.trials.Trial`), or empty."""
    read_again: tuple[BatchId, ...] = ()
    """Ids of batches that earlier trials have left out and that are read again."""
    lr_states: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Engine name -> its learning-rate state before a trial of the rate; restored by `accept`."""
    numbers: Mapping[str, HealthyRange | None] = field(default_factory=dict)
    """Number of an optimizer -> its healthy values, in which it is held; None ends a hold."""

    @property
    def numbers_text(self) -> str:
        """The numbers that are held, as a clause, or an empty string."""
        held = [f"{name} {each.last:.3g}" for name, each in self.numbers.items() if each]
        more = f" and {len(held) - _SHOWN} more" if held[_SHOWN:] else ""
        text = f"{', '.join(held[:_SHOWN])}{more} while the program sets other values"
        return text if held else ""


@dataclass(frozen=True, kw_only=True)
class Rollback(Order):
    """A rollback that was carried out."""

    number: int = 0
    """Number of the rollback, from 1 over the whole run."""
    step: int = 0
    """Steps done when the rollback began."""
    target: Step = 0
    """Step of the restored checkpoint."""
    skipped: int = 0
    """Number of skipped batches."""
    initial: bool = False
    """Whether the first snapshot was restored, because no known-good checkpoint was left."""
    repeated: bool = False
    """Whether an earlier rollback for this trouble restored the same, oldest checkpoint."""
    lr: float | None = None
    """The schedule's learning rate when it began, without the multiplier, or None if unknown."""
    lr_limit: float | None = None
    """Upper limit of the learning rate, or None without a limit or if the rate is unknown."""
    lr_scale: float = 1.0
    """The multiplier at `target`: 1 where the schedule is below the limit."""

    def outline(self) -> Rollback:
        """A copy for the ledger: only the batches of a trial are needed, to undo the trial."""
        return self if self.trial else replace(self, batches=())
