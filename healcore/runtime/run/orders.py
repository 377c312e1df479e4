"""Orders to the host, and the records of the rollbacks that were done. Steps are counted from 0.

An order is a value that never changes. Whatever decides makes one (a rule of the policy, a hook, a
save with NaN, a comparison of weights); `rollback.recovery` has it carried out in one place.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pydantic import NonNegativeInt

from healcore.core.decision import Action
from healcore.runtime.data import BatchId
from healcore.runtime.run.healthy_ranges import Held


class OrderReason(StrEnum):
    """Why an order is given. Checkpoints hold the values."""

    RULE = "rule"
    """A rule of the policy."""
    HOOK = "hook"
    """A hook of the program has asked for a rollback or a stop that no rule orders."""
    SAVED_NAN = "saved_nan"
    """A save has found NaN or Inf in an array."""
    BATCH = "batch"
    """The repeat after `SAVED_NAN` has shown the batch that makes the array NaN or Inf."""
    WEIGHTS_NAN = "weights_nan"
    """The weights have NaN or Inf, under a policy without a rule for that."""
    DEAD_RUN = "dead_run"
    """No step is finite any more, although the weights are finite."""
    BETTER_WEIGHTS = "better_weights"
    """A comparison has found that earlier weights are better."""
    INTENDED = "intended"
    """A number that was held has turned out to be intended."""

    @property
    def is_optional(self) -> bool:
        """Whether the run can continue without the rollback: its weights are finite."""
        return self in _OPTIONAL


_OPTIONAL = (
    OrderReason.BATCH,
    OrderReason.DEAD_RUN,
    OrderReason.BETTER_WEIGHTS,
    OrderReason.INTENDED,
)


@dataclass(frozen=True, kw_only=True)
class RepeatChanges:
    """What a rollback changes when the run repeats the steps, besides the batches to skip."""

    lr_at_fault: Mapping[str, float] | None = None
    """Engine name -> learning rate in force that caused the trouble; None if the rollback sets no
    limit. Without an entry it is the current rate, or the multiplier alone if that is unknown."""
    lr_states: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Engine name -> its learning-rate state before a trial; restored by `Trial.ACCEPT`."""
    held: Held | None = None
    """What is held in its healthy range from now on, or None to change nothing that is held."""
    held_before: Held | None = None
    """What was held before a trial; restored by `Trial.ACCEPT`."""
    read_again: tuple[BatchId, ...] = ()
    """Batches that earlier trials have skipped, to be read again."""
    trial: str = ""
    """`next_trial.Trial` for better earlier weights, or an empty string."""
    revival: int = 0
    """`dead_run.Revival` to bring back a dead run, or 0."""
    intended: str = ""
    """The held numbers that have turned out to be intended, and their values; or empty."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """An order to the host: to save, to stop or to roll back (`action`).

        restored from here        onset                 index
    --------------------------------|---- trouble --------|--> the order is carried out

    All orders have `index`, `onset`, `first_alarm_of_cause` and `action`. The other fields depend
    on the reason, and a field that is not set has no effect:

        reason            set besides                                            made by
        ---------------   ----------------------------------------------------   -------------------
        RULE, HOOK        cause, depth, batches                                  `IncidentMonitor`
        SAVED_NAN         arrays, sound_until_onset, batches (of alarms),        `NonfiniteRecovery`
                          untrained
        BATCH             arrays, sound_until_onset, batches (one), untrained    `NonfiniteRecovery`
        WEIGHTS_NAN       cause, batches                                         `NonfiniteRecovery`
        DEAD_RUN          cause, sound_until_onset,                              `DeadRun`
                          changes: revival, lr_at_fault, lr_states
        BETTER_WEIGHTS    anchor_step, batches,                                  `BetterWeights`
                          changes: trial, held, held_before, lr_*, read_again
        INTENDED          anchor_step,                                           `BetterWeights`
                          changes: trial, held, lr_states, read_again, intended

    `Recovery` adds depth, `is_last` and a limit of the rate to an order within the policy's budget.
    If evidence shows that the damage is older than the first alarm, it sets `sound_until_onset`.
    """

    index: int
    """Step whose records led to the order."""
    onset: int
    """Step of the first alarm of the trouble. A checkpoint of a later step may hold the damage."""
    first_alarm_of_cause: int
    """First step of the trouble that the order answers, as the log names it ("since step 26"). It
    is later than `onset` if the incident began with another cause. It is earlier if only a save
    shows the trouble, which may have begun at any step since the last sound save."""
    reason: OrderReason = OrderReason.RULE
    """Why the order is given."""
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
    arrays: tuple[str, ...] = ()
    """Names of the arrays with NaN or Inf, if a save led to the order."""
    untrained: bool = False
    """Whether healthy steps have followed NaN or Inf in `arrays`, so that the run does not train on
    them."""
    anchor_step: int | None = None
    """Step of the better earlier weights to restore, or None."""
    is_last: bool = False
    """Whether the next order for the same trouble stops the run. The rate is then limited to the
    rate of the restored step: a factor may not be enough, and there is no other attempt."""
    changes: RepeatChanges = field(default_factory=RepeatChanges)
    """What changes when the run repeats the steps."""

    @property
    def is_harmless(self) -> bool:
        """Whether the run trains on as well without the rollback.

        Such an order limits no rate, never stops the run, and says nothing about a later trouble.
        """
        return self.untrained or self.reason is OrderReason.BATCH

    def with_changes(self, **changes: Any) -> Order:
        """A copy with other values of some fields of `changes`.

        Args:
            **changes: fields of `RepeatChanges`.
        """
        return replace(self, changes=replace(self.changes, **changes))


@dataclass(frozen=True, kw_only=True)
class RollbackRecord:
    """A rollback that was carried out. The run's ledger keeps it, and the record of a checkpoint.

    Later orders depend on it: the same trouble is answered differently the second time. The report
    and the events of a rollback are made from it too.
    """

    order: Order
    """The order, as it was carried out."""
    number: int = 0
    """Number of the rollback, from 1 over the whole run."""
    step: int = 0
    """Steps done when the rollback began."""
    continues_at: NonNegativeInt = 0
    """Steps done where the run continues: the step of the restored checkpoint."""
    skipped: int = 0
    """Number of skipped batches."""
    repeated: int = 0
    """Number of undone steps that the run repeats."""
    lost: int = 0
    """Number of undone steps that the run does not repeat, because the data was not rewound."""
    why_lost: str = ""
    """Why the data was not rewound, in short, or an empty string if no step is lost."""
    rewind_obstacle: str = ""
    """Why the data continues forward, with what to write instead, or an empty string if it was
    rewound."""
    engine: str = ""
    """Optimizer of the next three fields: the optimizer with the lowest multiplier, preferably with
    a limit."""
    lr: float | None = None
    """The schedule's learning rate when the rollback began, or None if unknown."""
    lr_limit: float | None = None
    """Upper limit of the rate, or None without a limit or if unknown."""
    lr_scale: float = 1.0
    """The multiplier at `continues_at`: 1 where the schedule is below the limit."""
    lr_scale_before: float = 1.0
    """The lowest multiplier of all optimizers when the rollback began."""
    undone: bool = False
    """Whether the trouble has stopped the run all the same. The next start undoes the rollback, and
    later decisions do not count the rollback."""

    @property
    def onset(self) -> int:
        """Step of the first alarm of the trouble."""
        return self.order.onset

    @property
    def cause(self) -> int:
        """`Cause` flags of the trouble."""
        return self.order.cause

    @property
    def batches(self) -> tuple[BatchId, ...]:
        """Batches that the rollback has skipped. Empty in the outline of an older rollback."""
        return self.order.batches

    def outline(self) -> RollbackRecord:
        """A copy without what only the newest rollback needs.

        The batches of a trial are needed to undo the trial. The batches of the newest rollback are
        needed if the process was killed before it wrote the event of the rollback. All others would
        only make the records of checkpoints grow.
        """
        if self.order.changes.trial:
            return self
        return replace(self, order=replace(self.order, batches=()))

    def to_saved(self) -> dict[str, Any]:
        """The rollback as one flat dict, for checkpoints and `HealingReport.to_dict`.

        The keys are the names that the fields had before an order was a part of the record, so that
        programs and checkpoints that have them still work.
        """
        saved: dict[str, Any] = {}
        for part in (self.order.changes, self.order, self):
            for each in fields(part):
                if each.name not in ("order", "changes"):
                    saved[_SAVED_AS.get(each.name, each.name)] = _plain(getattr(part, each.name))
        saved["by_host"] = self.order.reason is not OrderReason.RULE
        return saved

    if not TYPE_CHECKING:  # otherwise a misspelt name would pass pyright

        def __getattr__(self, name: str) -> Any:
            """The value of an earlier name, such as `rollback.target`, with a warning."""
            if name in ("order", "changes") or name.startswith("__"):
                raise AttributeError(name)
            return _of_old_name(self, name)


_SAVED_AS = {
    "first_alarm_of_cause": "since",
    "anchor_step": "better_step",
    "revival": "attempt",
    "continues_at": "target",
    "rewind_obstacle": "why_forward",
}
"""Name of a field -> its key in a checkpoint, where the two differ."""


def _plain(value: Any) -> Any:
    """A value of a field, with dicts instead of dataclasses."""
    if isinstance(value, Held):
        return asdict(value)
    return value


def nested(saved: Any) -> Any:
    """The fields of a `RollbackRecord` as nested dicts, from the flat dict of `to_saved`.

    Args:
        saved: the flat dict, as read from a checkpoint. Unknown keys are dropped. Anything but a
            dict is returned as it is: the validation of the record reports it.
    """
    if not isinstance(saved, Mapping):
        return saved
    changes = _fields_in(saved, RepeatChanges)
    order = _fields_in(saved, Order)
    order["changes"] = changes
    order.setdefault("reason", _reason_in(saved))
    if order.get("first_alarm_of_cause", -1) == -1:  # an earlier version did not know it
        order["first_alarm_of_cause"] = order.get("onset")
    record = _fields_in(saved, RollbackRecord)
    record["order"] = order
    return record


def _fields_in(saved: Mapping[str, Any], kind: type[Any]) -> dict[str, Any]:
    """Name of a field of a dataclass -> its value in a flat dict, where it has one."""
    found: dict[str, Any] = {}
    for each in fields(kind):
        key = _SAVED_AS.get(each.name, each.name)
        if key in saved and each.name not in ("order", "changes"):
            found[each.name] = saved[key]
    return found


def _reason_in(saved: Mapping[str, Any]) -> OrderReason:
    """The reason of an order in a record that has no key for it."""
    if saved.get("attempt"):
        return OrderReason.DEAD_RUN
    if saved.get("intended"):
        return OrderReason.INTENDED
    if saved.get("better_step") is not None:
        return OrderReason.BETTER_WEIGHTS
    if saved.get("arrays"):
        return OrderReason.SAVED_NAN
    if saved.get("by_host"):
        return OrderReason.HOOK
    return OrderReason.RULE


def _of_old_name(record: RollbackRecord, name: str) -> Any:
    """The value of an attribute that `RollbackRecord` had earlier, with a DeprecationWarning.

    Raises AttributeError if it had no such attribute.
    """
    saved = record.to_saved()
    if name not in saved:
        raise AttributeError(f"'RollbackRecord' object has no attribute {name!r}")
    warnings.warn(
        f"rollback.{name} is deprecated: read {_new_place(name)}", DeprecationWarning, stacklevel=3
    )
    return saved[name]


def _new_place(name: str) -> str:
    """Where the value of an earlier attribute is now, for a message."""
    for part, where in ((RepeatChanges, "order.changes."), (Order, "order."), (RollbackRecord, "")):
        for each in fields(part):
            if _SAVED_AS.get(each.name, each.name) == name:
                return f"rollback.{where}{each.name}"
    return "rollback.order.reason"
