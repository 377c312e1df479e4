"""`RunMetrics` and `RateLog`: numbers of a run, from the records that the host reads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from healcore.core.decision import Action, Cause
from healcore.core.step_record import StepRecord
from healcore.events.metrics import COMPARED
from healcore.history.incidents import name_changes
from healcore.runtime.driver import Engines

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

COUNTS = ("clips", "skips", "lr_cuts", "rollbacks", "alarms")
"""Counts since the run began: keys of an engine's `tally`."""

_LAST = ("threshold", "grad_scale", "lr_scale")
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
        loss_ratio = eval_gap = None
        if record.judged and mean and not (record.cause and record.cause & Cause.NONFINITE_LOSS):
            if not record.cause:
                count = min(count + 1, _MEAN_STEPS)
                self._means[record.engine] = mean + (record.loss - mean) / count, count
            if mean > 0:
                loss_ratio = record.loss / mean
        if eval_loss is not None and mean:
            eval_gap = eval_loss - mean
        return record._replace(loss_ratio=loss_ratio, eval_loss=eval_loss, eval_gap=eval_gap)

    def add(self, records: Iterable[StepRecord]) -> None:
        """Adds the records of one step.

        An evaluation stays in the metrics until the next one.

        Args:
            records: the records of the step, as `with_loss_ratios` returns them.
        """
        for record in records:
            counts = self._counts.setdefault(record.engine, dict.fromkeys(COUNTS, 0))
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
            prefix = f"heal/{name}" if self.has_several_engines else "heal"
            counts = self._counts[name]
            changes = {count: counts[count] for count in self._changes}
            numbers = {
                **{field: getattr(record, field) for field in (*_LAST, *COMPARED)},
                "incidents": record.incident,
                "loss": record.readings.loss,
                "rollbacks": counts["rollbacks"],
                "alarms": counts["alarms"],
                **name_changes(observes=self.run.policy.observes, **changes),
            }
            for field, number in numbers.items():
                if number is not None:
                    metrics[f"{prefix}/{field}"] = float(number)
        if self.run.journal.dropped and metrics:
            metrics["heal/scaler_skips"] = float(self.run.journal.dropped)
        return metrics


def changed_since(before: dict[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics for a row of a trainer's own log: those that have changed since its last row.

    Metrics of single steps are omitted: they are `LAG` steps older than the row, which has the loss
    itself.

    Args:
        before: the metrics of the last row, at first empty; updated here.
        metrics: the result of `RunMetrics.values`.
    """
    row: dict[str, float] = {}
    for name, value in metrics.items():
        last_part = name.rpartition("/")[2]
        of_step = last_part in ("loss", "threshold", "grad_scale", "loss_ratio")
        if not of_step and value != before.get(name, float(last_part == "lr_scale")):
            row[name] = value
    before.update(metrics)
    return row


class RateLog:
    """Knows the learning-rate multiplier of each engine.

    Args:
        run: the parts of the run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._lr_scales: dict[str, float] = {}
        """Engine name -> its learning-rate multiplier, where it is known."""

    def read(self, engines: Engines) -> None:
        """Takes the multipliers from the engines' states.

        Args:
            engines: engine name -> what `Driver.engines` returns for it.
        """
        self._lr_scales = {name: saved["state"]["lr"]["scale"] for name, saved in engines.items()}

    def scale_of(self, engine: str) -> float:
        """The multiplier of an engine in (0, 1], after the newest step that was read."""
        return self._lr_scales.get(engine, 1.0)

    @property
    def lr_scale(self) -> float:
        """The smallest multiplier of all engines, which the report and rollbacks show."""
        return min(self._lr_scales.values(), default=1.0)

    def rates_in_force(self) -> dict[str, float]:
        """The learning rates of the last step that was read, with the engines' multipliers.

        The program may have set the next rate already, as a scheduler does after each step.

        Returns:
            Engine name -> learning rate, without rates that are unknown, NaN or Inf.
        """
        rates = {**self.run.driver.learning_rates(), **self.run.journal.last_rates}
        return {
            name: rate * self.scale_of(name)
            for name, rate in rates.items()
            if rate is not None and math.isfinite(rate)
        }

    def add(self, record: StepRecord) -> None:
        """Takes the multiplier and the program's rate of a step."""
        self._lr_scales[record.engine] = record.lr_scale
        if record.lr is not None:
            self.run.journal.last_rates[record.engine] = float(record.lr)
