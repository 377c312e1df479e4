"""`RunMetrics`: numbers of a run, from the records that the host reads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from healcore.core.decision import Action, Cause
from healcore.core.step_record import StepRecord
from healcore.events.metrics import COMPARED
from healcore.history.run_history import changes_made

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

COUNTS = ("clips", "skips", "lr_cuts", "rollbacks", "alarms")
"""Counts since the run began: keys of an engine's `tally`."""
_OF_STEP = ("/loss", "/threshold", "/grad_scale", "/loss_ratio")
"""How the names of metrics of a single step end."""
_MEAN_STEPS = 100  # number of healthy losses that the mean covers


class RunMetrics:
    """Metrics from the records that the host reads `LAG` steps later, without a further sync.

    Counts and multipliers come from the engines' states at the start of a run and after a rollback,
    when these are on the host. Each record then adds to the counts. Records do not show the clips
    of a policy that clips each tensor by itself (`per_tensor`): such a run has no metric
    `heal/clips`.

    Args:
        run: the parts of the run. If its policy only observes, the counts are of changes that it
            would have made.

    Attributes:
        eval_loss: loss of an evaluation since the last step that was read, or None.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.eval_loss: float | None = None
        self._means: dict[str, tuple[float, int]] = {}
        """Engine -> mean of its healthy losses, and their number, at most `_MEAN_STEPS`."""
        self._counts: dict[str, dict[str, int]] = {}
        """Engine -> its counts since the run began, by the names of `COUNTS`."""
        self._scales: dict[str, float] = {}
        """Engine -> its learning-rate multiplier, where it is known."""
        self._last: dict[str, StepRecord] = {}
        """Engine -> its newest record."""

    def read(self) -> None:
        """Takes counts and multipliers from the states of the engines, and drops undone steps.

        Called after a start or a rollback. The states are on the host then, and hold values that no
        record has shown.
        """
        for name, engine in self.run.driver.engines().items():
            state = engine["state"]
            self._scales[name] = state["lr"]["scale"]
            self._counts[name] = {count: int(state["tally"][count]) for count in COUNTS}
            if name in self._last and self._last[name].step > state["step"]:
                del self._last[name]

    def with_loss_ratios(self, records: Sequence[StepRecord]) -> list[StepRecord]:
        """The records of one step, with the loss and the evaluation relative to the mean loss.

        Losses of steps with a cause do not enter the mean. Each process starts a new mean.

        Args:
            records: the records of one step, one per engine.
        """
        eval_loss, self.eval_loss = self.eval_loss, None
        compared: list[StepRecord] = []
        for record in records:
            mean, count = self._means.get(record.engine, (record.loss, 0))
            finite = not (record.cause and record.cause & Cause.NONFINITE_LOSS)
            is_known = record.judged and bool(mean) and finite
            if is_known and not record.cause:
                count = min(count + 1, _MEAN_STEPS)
                self._means[record.engine] = mean + (record.loss - mean) / count, count
            ratio = gap = None
            if is_known and mean > 0:
                ratio = record.loss / mean
            if eval_loss is not None and mean:
                gap = eval_loss - mean
            compared.append(record._replace(loss_ratio=ratio, eval_loss=eval_loss, eval_gap=gap))
        return compared

    def add(self, records: Iterable[StepRecord]) -> None:
        """Adds the records of one step. An evaluation stays in the metrics until the next one.

        Args:
            records: the records of the step, as `with_loss_ratios` returns them.
        """
        for record in records:
            name = record.engine
            counts = self._counts.setdefault(name, dict.fromkeys(COUNTS, 0))
            counts["clips"] += record.grad_scale < 1 and record.taken
            counts["skips"] += record.judged and not record.taken
            counts["lr_cuts"] += bool(record.action and record.action & Action.CUT_LR)
            counts["alarms"] += record.cause != 0
            self._scales[name] = record.lr_scale
            if record.lr is not None:
                self.run.journal.last_rates[name] = float(record.lr)
            last = self._last.get(name)
            if last is not None and record.eval_loss is None:
                record = record._replace(eval_loss=last.eval_loss, eval_gap=last.eval_gap)
            self._last[name] = record

    @property
    def has_several_engines(self) -> bool:
        """Whether the run has several engines, also if only one of them takes the current step."""
        return len(self._counts) > 1

    def newest(self, engine: str) -> StepRecord | None:
        """The newest record of an engine, or None if no record was read."""
        return self._last.get(engine)

    def total(self, count: str) -> int:
        """The sum of one of `COUNTS` over all engines.

        A model with two optimizers has two engines, and a step that both skip counts twice.
        """
        return sum(counts[count] for counts in self._counts.values())

    def values(self) -> dict[str, float]:
        """The metrics of the newest step that was read, and the counts.

        Returns:
            Name -> value, such as `heal/skips`, or `heal/<engine>/skips` with several engines.
            Empty until the first step is read.
        """
        metrics: dict[str, float] = {}
        policy = self.run.policy
        changes = ["skips", "lr_cuts"]
        if not policy.engine.per_tensor:
            changes.insert(0, "clips")
        for name, record in self._last.items():
            prefix = "heal"
            if self.has_several_engines:
                prefix = f"heal/{name}"
            counts = self._counts[name]
            numbers = {
                "threshold": record.threshold,
                "grad_scale": record.grad_scale,
                "lr_scale": record.lr_scale,
                **{field: getattr(record, field) for field in COMPARED},
                "incidents": record.incident,
                "loss": record.readings.loss,
                "rollbacks": counts["rollbacks"],
                "alarms": counts["alarms"],
                **changes_made({each: counts[each] for each in changes}, observes=policy.observes),
            }
            for field, number in numbers.items():
                if number is not None:
                    metrics[f"{prefix}/{field}"] = float(number)
        if self.run.journal.dropped and metrics:
            metrics["heal/scaler_skips"] = float(self.run.journal.dropped)
        return metrics

    # -- learning rates -------------------------------------------------------------------------

    def scale_of(self, engine: str) -> float:
        """The multiplier of an engine in (0, 1], after the newest step that was read."""
        return self._scales.get(engine, 1.0)

    @property
    def lr_scale(self) -> float:
        """The smallest multiplier of all engines, which the report and rollbacks show."""
        return min(self._scales.values(), default=1.0)

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
        neutral = float(name.endswith("lr_scale"))
        if not name.endswith(_OF_STEP) and value != before.get(name, neutral):
            row[name] = value
    before.update(metrics)
    return row
