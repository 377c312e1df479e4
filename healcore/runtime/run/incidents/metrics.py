"""`RunMetrics`: the metrics of a run, from the records that the host reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from healcore.core.decision import Action, Cause
from healcore.core.step_record import StepRecord
from healcore.events.metrics import COMPARED
from healcore.history.incidents import name_changes

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

COUNTS = ("clips", "skips", "lr_cuts", "rollbacks", "alarms")
"""Counts since the run began: keys of an engine's `tally`."""

_LAST = ("loss", "threshold", "grad_scale", "lr_scale")
"""Numbers of the newest step, named as in `StepRecord`."""

_MEAN_STEPS = 100  # number of healthy losses that the mean covers


class RunMetrics:
    """Metrics from the records that the host reads `LAG` steps later, without a further sync.

    The counts come from the engines' states at the start of a run and after a rollback, when these
    are on the host. Each record then adds to the counts. Records do not show the clips of a policy
    that clips each tensor by itself (`per_tensor`): such a run has no metric `heal/clips`.

    Args:
        run: the parts of the run. If its policy only observes, the counts are of changes that it
            would have made.

    Attributes:
        eval_loss: loss of an evaluation since the last step that was read, or None.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._changes: tuple[str, ...] = ("clips", "skips", "lr_cuts")
        if run.policy.engine.per_tensor:
            self._changes = ("skips", "lr_cuts")
        self.eval_loss: float | None = None
        self._means: dict[str, tuple[float, int]] = {}
        """Engine -> mean of its healthy losses, and their number, at most `_MEAN_STEPS`."""
        self._counts: dict[str, dict[str, int]] = {}
        """Engine -> its counts since the run began, by the names of `COUNTS`."""
        self._last: dict[str, StepRecord] = {}
        """Engine -> its newest record."""

    def set_counts(self, engines: Mapping[str, Mapping[str, Any]]) -> None:
        """Sets the counts from the states of the engines, and drops undone steps.

        Args:
            engines: engine name -> what `Driver.engines` returns for it, after a start or rollback.
        """
        for name, engine in engines.items():
            tally = engine["state"]["tally"]
            self._counts[name] = {count: int(tally[count]) for count in COUNTS}
            if name in self._last and self._last[name].step > engine["state"]["step"]:
                del self._last[name]

    def with_loss_ratios(self, records: Sequence[StepRecord]) -> list[StepRecord]:
        """The records of one step, with the loss and the evaluation relative to the mean loss.

        Losses of steps with a cause do not enter the mean. Each process starts a new mean.

        Args:
            records: the records of one step, one per engine.
        """
        eval_loss = self.eval_loss
        self.eval_loss = None
        return [self._compare(record, eval_loss) for record in records]

    def _compare(self, record: StepRecord, eval_loss: float | None) -> StepRecord:
        """The record with its ratios to the mean loss, which it enters if it is healthy."""
        mean, count = self._means.get(record.engine, (record.loss, 0))
        has_loss = not (record.cause and record.cause & Cause.NONFINITE_LOSS)
        is_known = record.judged and mean != 0 and has_loss
        if is_known and not record.cause:
            count = min(count + 1, _MEAN_STEPS)
            self._means[record.engine] = mean + (record.loss - mean) / count, count
        loss_ratio = None
        if is_known and mean > 0:
            loss_ratio = record.loss / mean
        eval_gap = None
        if eval_loss is not None and mean != 0:
            eval_gap = eval_loss - mean
        return record._replace(loss_ratio=loss_ratio, eval_loss=eval_loss, eval_gap=eval_gap)

    def add(self, records: Iterable[StepRecord]) -> None:
        """Adds the records of one step.

        An evaluation stays in the metrics until the next one.

        Args:
            records: the records of the step, as `with_loss_ratios` returns them.
        """
        for record in records:
            counts = self._counts.get(record.engine)
            if counts is None:
                counts = self._counts[record.engine] = dict.fromkeys(COUNTS, 0)
            counts["clips"] += record.grad_scale < 1 and record.taken
            counts["skips"] += record.judged and not record.taken
            counts["lr_cuts"] += bool(record.action and record.action & Action.CUT_LR)
            counts["alarms"] += record.cause != 0
            last = self._last.get(record.engine)
            if last is not None and last.eval_loss is not None and record.eval_loss is None:
                record = record._replace(eval_loss=last.eval_loss, eval_gap=last.eval_gap)
            self._last[record.engine] = record

    @property
    def has_several_engines(self) -> bool:
        """Whether the run has several engines, also if only one of them takes the current step."""
        return len(self._counts) > 1

    def newest(self, engine: str) -> StepRecord | None:
        """The newest record of an engine, or None if no record was read.

        Args:
            engine: name of the optimizer.
        """
        return self._last.get(engine)

    def total(self, count: str) -> int:
        """The sum of a count over all engines.

        A model with two optimizers has two engines, and a step that both skip counts twice.

        Args:
            count: one of `COUNTS`.
        """
        return sum(counts[count] for counts in self._counts.values())

    def values(self) -> dict[str, float]:
        """The metrics of the newest step that was read, and the counts.

        Returns:
            Name -> value, such as `heal/skips`, or `heal/<engine>/skips` with several engines.
            Empty until the first step is read.
        """
        metrics: dict[str, float] = {}
        for name, record in self._last.items():
            prefix = "heal"
            if self.has_several_engines:
                prefix = f"heal/{name}"
            counts = self._counts[name]
            numbers: dict[str, float] = {}
            for field in (*_LAST, *COMPARED):
                value = getattr(record, field)
                if value is not None:
                    numbers[field] = value
            numbers["incidents"] = record.incident
            numbers["loss"] = record.readings.loss
            for count in ("rollbacks", "alarms"):
                numbers[count] = counts[count]
            changes = {count: counts[count] for count in self._changes}
            numbers |= name_changes(observes=self.run.policy.observes, **changes)
            for field, number in numbers.items():
                metrics[f"{prefix}/{field}"] = float(number)
        if self.run.journal.dropped and metrics:
            metrics["heal/scaler_skips"] = float(self.run.journal.dropped)
        return metrics


class ChangedMetrics:
    """Metrics for the rows of a trainer's own log: only values that changed since the last row.

    Metrics of single steps are omitted: they are `LAG` steps older than the row, which has the loss
    itself. The loss ratio comes with any change. A row without a change has no metrics.

    Args:
        values: returns the metrics by their full names, as `RunMetrics.values`.
    """

    def __init__(self, values: Callable[[], Mapping[str, float]]) -> None:
        self._values = values
        self._before: dict[str, float] = {}

    def __call__(self) -> dict[str, float]:
        """The metrics for the next row of the log.

        Returns:
            Full name -> value of the counts, multipliers and evaluations that have changed since
            the last call. Before the first call, a multiplier is 1 and everything else 0.
        """
        of_steps = {"loss", "threshold", "grad_scale", "loss_ratio"}
        changed: dict[str, float] = {}
        ratios: dict[str, float] = {}
        for name, value in self._values().items():
            last_part = name.rpartition("/")[2]
            if last_part == "loss_ratio":
                ratios[name] = value
            if last_part in of_steps:
                continue
            first_value = float(last_part == "lr_scale")
            if value != self._before.get(name, first_value):
                changed[name] = value
            self._before[name] = value
        if changed:
            changed |= ratios
        return changed
