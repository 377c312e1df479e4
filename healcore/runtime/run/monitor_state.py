"""`MonitorState`: what decisions read of earlier steps, apart from the ledger and the comparisons.

A checkpoint holds it. Otherwise the same trouble would be dated or answered differently after a
restart: for example, weights with NaN at the first step after a start were damaged before that
step, by a batch that only the earlier process has read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from pydantic import ConfigDict, NonNegativeInt

from healcore.runtime.data import BatchId


class BatchRange(NamedTuple):
    """The batches of consecutive steps, as long as each step has read the next batches of an epoch.

    A checkpoint then needs one entry for a thousand steps instead of a thousand entries. A gap, a
    new epoch or another number of batches begins another entry.
    """

    first: int
    """The first step."""
    steps: int
    """Number of steps."""
    epoch: int
    """Epoch of all the batches."""
    index: int
    """Index of the first step's first batch in its epoch."""
    batches_per_step: int
    """Batches of each step."""

    def ids(self, step: int) -> list[BatchId]:
        """The batches of a step, or an empty list if the step is not in the range.

        Args:
            step: index of the step.
        """
        if not self.first <= step < self.first + self.steps:
            return []
        start = self.index + (step - self.first) * self.batches_per_step
        return [BatchId(self.epoch, start + place) for place in range(self.batches_per_step)]

    def is_followed_by(self, step: int, ids: Sequence[BatchId]) -> bool:
        """Whether a step is the next one, and has read the next batches of the epoch.

        Args:
            step: index of the step.
            ids: its batches, in the order in which it has read them.
        """
        if step != self.first + self.steps or len(ids) != self.batches_per_step:
            return False
        index = self.index + self.steps * self.batches_per_step
        for batch in ids:
            if batch != (self.epoch, index):
                return False
            index += 1
        return True


def take_fields(live: Any, saved: Any, *, keep: Collection[str] = ()) -> None:
    """Gives a live dataclass the values of a saved one of the same type.

    Args:
        live: the object to change.
        saved: the object with the values. Lists and dicts are shared, not copied.
        keep: names of the fields that stay as they are.
    """
    for each in fields(live):
        if each.name not in keep:
            setattr(live, each.name, getattr(saved, each.name))


@dataclass
class MonitorState:
    """What decisions read of the steps before a checkpoint.

    Attributes:
        last_trained: index of the last step that was not skipped, or None if there is none since
            the start of the run or the last rollback.
        nonfinite_streak: number of consecutive steps up to the newest without a finite step.
        never_finite: whether no step of the run was finite.
        has_micro_steps: whether optax.MultiSteps accumulates gradients around `protect`.
        loader_start: first step of the current loader. Batch ids of earlier loaders have no meaning
            in it.
        batches: the batches of the last steps, oldest first.
        rule_hits: "number of the rule/engine" -> its `RuleState`: streak, age, and the window.
        rule_fired: engine -> the last step at which a rule fired.
        rates: engine -> the highest learning rate in force at a trained step since the last start
            or rollback, where it is known.
        dropped: number of steps that a loss scale has left out.
        first_change: engine -> the two rates of the program between which its rate has changed
            first since the start of the run or the last rollback; empty for a cyclic rate.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    last_trained: NonNegativeInt | None = None
    nonfinite_streak: NonNegativeInt = 0
    never_finite: bool = True
    has_micro_steps: bool = False
    loader_start: int = 0
    batches: list[BatchRange] = field(default_factory=list)
    rule_hits: dict[str, list[int]] = field(default_factory=dict)
    rule_fired: dict[str, int] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    dropped: int = 0
    first_change: dict[str, list[float]] = field(default_factory=dict)

    def add_batches(self, step: int, ids: Sequence[BatchId], *, kept: int) -> None:
        """Adds the batches of a step, and drops the batches of `kept` or more steps ago.

        Args:
            step: index of the step, higher than the steps before.
            ids: the batches that it has read; several with gradient accumulation.
            kept: number of steps whose batches are kept.
        """
        if self.batches:
            last = self.batches[-1]
            if last.is_followed_by(step, ids):
                self.batches[-1] = last._replace(steps=last.steps + 1)
                ids = ()
        # One entry for each row of consecutive batches: two if the step has read over the end of an
        # epoch.
        new: list[BatchRange] = []
        for epoch, index in ids:
            if new:
                row = new[-1]
                if epoch == row.epoch and index == row.index + row.batches_per_step:
                    new[-1] = row._replace(batches_per_step=row.batches_per_step + 1)
                    continue
            new.append(BatchRange(step, 1, epoch, index, 1))
        self.batches += new
        while self.batches and self.batches[0].first + self.batches[0].steps <= step - kept:
            del self.batches[0]

    def batches_of(self, steps: Iterable[int]) -> list[BatchId]:
        """The batches of some steps, as far as they are kept.

        Args:
            steps: indices of the steps. The batches are in the order of the steps.
        """
        found: list[BatchId] = []
        for step in steps:
            for batch_range in self.batches:
                found += batch_range.ids(step)
        return found

    def batches_between(self, first: int, last: int) -> list[BatchId]:
        """The batches of the steps from `first` to `last`, of the current loader.

        Args:
            first: index of the first step. Steps of earlier loaders are left out, because their
                batch ids name other batches in the current loader.
            last: index of the last step, inclusive.
        """
        first = max(first, self.loader_start)
        steps: set[int] = set()
        for batch_range in self.batches:
            end = batch_range.first + batch_range.steps
            steps.update(range(max(first, batch_range.first), min(last + 1, end)))
        return self.batches_of(sorted(steps))

    def continue_from(self, saved: MonitorState) -> None:
        """Continues the state of an earlier process.

        The object stays the same, because other parts of the run refer to it.

        Args:
            saved: the state in the checkpoint that the run resumes from.
        """
        take_fields(self, saved)

    def on_rollback(self, target: int) -> None:
        """Forgets the steps from `target` on, which are repeated.

        Args:
            target: step of the restored checkpoint.
        """
        kept: list[BatchRange] = []
        for batch_range in self.batches:
            steps_before = target - batch_range.first
            if steps_before > 0:
                kept.append(batch_range._replace(steps=min(batch_range.steps, steps_before)))
        self.batches = kept
        self.loader_start = min(self.loader_start, target)
        self.last_trained = None
        self.nonfinite_streak = 0
        self.rule_hits.clear()
        self.rule_fired.clear()
        self.rates.clear()
        self.first_change.clear()
