"""`RunMetrics`: the metrics of a run, from the records that the host reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from healcore.core.decision import Action, Cause, StepRecord
from healcore.events.log import COMPARED
from healcore.history.run import by_name

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
    """

    def __init__(self, *, per_tensor: bool, observes: bool) -> None:
        self._changes = ("skips", "lr_cuts") if per_tensor else ("clips", "skips", "lr_cuts")
        self._observes = observes
        self.eval_loss: float | None = None
        """Loss of an evaluation since the last step that was read, or None."""
        self._means: dict[str, tuple[float, int]] = {}
        """Engine -> mean of its healthy losses, and their number, at most `_MEAN_STEPS`."""
        self._counts: dict[str, dict[str, int]] = {}
        self._last: dict[str, StepRecord] = {}

    def set(self, engines: Mapping[str, Mapping[str, Any]]) -> None:
        """Sets the counts from engine states (`Driver.engines`), and drops undone steps."""
        for name, engine in engines.items():
            tally = engine["state"]["tally"]
            self._counts[name] = {count: int(tally[count]) for count in COUNTS}
            if name in self._last and self._last[name].step > engine["state"]["step"]:
                del self._last[name]

    def with_loss_ratios(self, records: Sequence[StepRecord]) -> list[StepRecord]:
        """The records of one step, with the loss and the evaluation relative to the mean loss.

        Losses of steps with a cause do not enter the mean. Each process starts a new mean.
        """
        evaluated, self.eval_loss = self.eval_loss, None
        return [self._compare(record, evaluated) for record in records]

    def _compare(self, record: StepRecord, eval_loss: float | None) -> StepRecord:
        mean, count = self._means.get(record.engine, (record.loss, 0))
        has_loss = not (record.cause and record.cause & Cause.NONFINITE_LOSS)
        is_known = record.judged and mean != 0 and has_loss
        if is_known and not record.cause:
            count = min(count + 1, _MEAN_STEPS)
            self._means[record.engine] = mean + (record.loss - mean) / count, count
        return record.compared(
            loss_ratio=record.loss / mean if is_known and mean > 0 else None,
            eval_loss=eval_loss,
            eval_gap=eval_loss - mean if eval_loss is not None and mean != 0 else None,
        )

    def add(self, records: Iterable[StepRecord]) -> None:
        """Adds the records of one step."""
        for record in records:
            counts = self._counts.get(record.engine)
            if counts is None:
                counts = self._counts[record.engine] = dict.fromkeys(COUNTS, 0)
            if record.judged:
                counts["clips"] += record.grad_scale < 1 and not record.skip
                counts["skips"] += record.skip
                counts["lr_cuts"] += bool(record.action and record.action & Action.CUT_LR)
                counts["alarms"] += record.cause != 0
            last = self._last.get(record.engine)
            if last is not None and last.eval_loss is not None and record.eval_loss is None:
                record = record._replace(eval_loss=last.eval_loss, eval_gap=last.eval_gap)
            self._last[record.engine] = record

    def total(self, count: str) -> int:
        """Sum of one of `COUNTS` over all engines."""
        return sum(counts[count] for counts in self._counts.values())

    def values(self) -> dict[str, float]:
        """Name -> value, such as `heal/skips`, or `heal/<engine>/skips` with several engines."""
        metrics: dict[str, float] = {}
        for name, record in self._last.items():
            prefix = "heal" if len(self._last) == 1 else f"heal/{name}"
            counts = self._counts[name]
            numbers = {n: v for n in (*_LAST, *COMPARED) if (v := getattr(record, n)) is not None}
            numbers |= {"incidents": record.incident, "loss": record.readings.loss}
            numbers |= {each: counts[each] for each in ("rollbacks", "alarms")}
            changes = {each: counts[each] for each in self._changes}
            numbers |= by_name(observes=self._observes, **changes)
            metrics |= {f"{prefix}/{each}": float(number) for each, number in numbers.items()}
        return metrics


class ChangedMetrics:
    """Metrics for the rows of a trainer's own log: only values that changed since the last row.

    Metrics of single steps are omitted: they are `LAG` steps older than the row, which has the loss
    itself. The loss ratio comes with any change. A row without a change has no metrics.
    """

    def __init__(self, values: Callable[[], Mapping[str, float]]) -> None:
        self._values = values
        self._before: dict[str, float] = {}

    def __call__(self) -> dict[str, float]:
        """Full name -> value of the changed counts, multipliers and evaluations."""
        steps = {"loss", "threshold", "grad_scale", "loss_ratio"}
        values = self._values()
        now = {n: v for n, v in values.items() if n.rpartition("/")[2] not in steps}
        before = {n: float(n.endswith("/lr_scale")) for n in now} | self._before
        changed = {n: value for n, value in now.items() if value != before[n]}
        self._before |= now
        ratios = {n: v for n, v in values.items() if n.endswith("/loss_ratio")} if changed else {}
        return changed | ratios
