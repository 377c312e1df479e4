"""`Rollback`: one rollback, from the order to the restored checkpoint.

The journal stores this object, so that a start after a crash does what the live run would have
done. Steps are counted from 0. A checkpoint of step n holds the state that step n starts from.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from healcore.core.verdict import Action
from healcore.events.schema import lr_text
from healcore.runtime.data import BatchId
from healcore.runtime.healthy_range import HealthyRange

Step = Annotated[int, Field(ge=0)]
_Loader = Annotated[str, Field(pattern=r"^[0-9]{1,18}$")]
_SHOWN = 3
_BatchId = Annotated[list[Step], Field(min_length=2, max_length=2)]


class Status(StrEnum):
    """Stage of a rollback."""

    ORDERED = "ordered"
    DECLINED = "declined"
    """The run continues without the rollback: evidence, budget or checkpoint is missing."""
    PLANNED = "planned"
    """The changes on disk have begun; a start after a crash repeats them."""
    APPLIED = "applied"


@dataclass(kw_only=True)
class Rollback:
    """An order to the host, and the rollback that follows from it.

    An order may also save or stop (`action`); only an order with `Action.ROLLBACK` is planned and
    applied.
    """

    __pydantic_config__ = ConfigDict(extra="ignore")

    # -- the order
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
    batches: list[BatchId] = field(default_factory=list)
    """Ids of the batches to skip when the run repeats the steps."""
    exact: bool = False
    """Whether the state is known to be sound up to `onset`."""
    forced: bool = False
    """Whether a hook, the state check or better weights gave the order, not the engine."""
    arrays: list[str] = field(default_factory=list)
    """Names of arrays with NaN or Inf, if a save led to the order; otherwise empty."""
    better: int | None = None
    """Step of the better earlier weights that the rollback restores, or None."""
    lr_at_fault: float | None = None
    """Learning rate in force that caused the trouble, or None if the rollback sets no limit. The
    plan replaces NaN by the current rate, or by the multiplier alone if the rate is unknown."""
    trial: str = ""
    """What the run tries for better earlier weights (`recovery.trials.Trial`), or empty."""
    read_again: list[BatchId] = field(default_factory=list)
    """Ids of batches that earlier trials have left out and that are read again."""
    lr_states: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Engine name -> its learning-rate state before a trial of the rate; restored by `accept`."""
    numbers: dict[str, HealthyRange | None] = field(default_factory=dict)
    """Number of an optimizer -> its healthy values, in which it is held; None ends a hold."""
    status: Status = Status.ORDERED

    # -- the plan
    number: int = 0
    """Number of the rollback, from 1 over the whole run."""
    step: int = 0
    """Steps done when the rollback began."""
    candidates: list[Step] = field(default_factory=list)
    """Steps of the checkpoints to try, in this order."""
    quarantine: list[int] = field(default_factory=list)
    """Steps of the checkpoints to quarantine."""
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Engine states when the rollback began; once it is applied, the states after it."""
    left_out: dict[_Loader, list[_BatchId]] = field(default_factory=dict)
    """Number of a loader -> ids of the batches that the loader skips."""
    forward: dict[_Loader, dict[str, Any]] = field(default_factory=dict)
    """Number of a loader that cannot be rewound -> its position when the rollback began."""
    lr: float | None = None
    """The schedule's learning rate when it began, without the multiplier, or None if unknown."""
    skipped: int = 0
    """Number of skipped batches."""
    initial: bool = False
    """Whether the first snapshot is restored, because no known-good checkpoint is left."""
    repeated: bool = False
    """Whether an earlier rollback for this trouble restored the same, oldest checkpoint."""

    # -- the result
    target: int = -1
    """Step of the restored checkpoint."""
    lr_limit: float | None = None
    """Upper limit of the learning rate, or None without a limit or if the rate is unknown."""
    lr_scale: float = 1.0
    """The multiplier at `target`: 1 where the schedule is below the limit."""

    @property
    def lr_text(self) -> str:
        """See `healcore.events.schema.lr_text`."""
        return lr_text(self)

    @property
    def numbers_text(self) -> str:
        """The numbers that are held, as a clause, or an empty string."""
        held = [f"{name} {each.last:.3g}" for name, each in self.numbers.items() if each]
        more = f" and {len(held) - _SHOWN} more" if held[_SHOWN:] else ""
        text = f"{', '.join(held[:_SHOWN])}{more} while the program sets other values"
        return text if held else ""

    def outline(self) -> Rollback:
        """A copy without the fields that are used only to apply the rollback."""
        batches = self.batches if self.trial else []  # an undo reads them again
        return replace(
            self, batches=batches, candidates=[], quarantine=[], engines={}, left_out={}, forward={}
        )
