"""Steps as the host reads them, a fixed number of steps later; host rules, and the run's metrics.

Reading does not wait for the device. The delay does not depend on when records arrive, because all
ranks have to act at the same step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from healcore.core.decision import Action, Cause, StepRecord, names
from healcore.core.engine import EngineConfig, RuleConfig
from healcore.core.engine.judge import update_rule
from healcore.core.engine.state import RuleState, init_rule
from healcore.events.log import COMPARED
from healcore.events.schema import flag_names
from healcore.history.incident import by_name
from healcore.runtime.data import BatchId
from healcore.runtime.driver import PendingDispatch

LAG = 1
"""Number of dispatches after which the host reads a decision, so that reading does not wait."""


class StepResult(NamedTuple):
    """One step whose records have been read."""

    index: int
    records: list[StepRecord]
    """One record per engine, or more if an engine judged several times in the step."""
    batches: tuple[BatchId, ...]  # several with gradient accumulation
    contents: tuple[Any, ...] = ()
    """Content of the batches if weights are compared on them. The last step of a dispatch has the
    batches of all its steps, and the other steps have none."""
    vote_requested: bool = False  # of `PendingDispatch`, in the last step of a dispatch


class DelayedReader:
    """Queue of dispatches. Each is read `LAG` dispatches after it was queued."""

    def __init__(self) -> None:
        # Dispatches, each with the index of its first step and its batches.
        self._queue: deque[tuple[PendingDispatch, StepResult]] = deque()
        self._read_steps: deque[StepResult] = deque()
        self._correction = 0
        self._accumulated: tuple[BatchId, ...] = ()
        self._contents: tuple[Any, ...] = ()

    def push(self, pending: PendingDispatch, first: StepResult) -> None:
        """Queues a dispatch. `first` has its first step's index and its batches, but no records."""
        self._queue.append((pending, first))

    def due(self, *, all: bool = False) -> Iterator[StepResult]:
        """Yields the steps that are due, oldest first; with `all` every queued step."""
        while True:
            while self._read_steps:
                yield self._read_steps.popleft()
            if len(self._queue) <= (0 if all else LAG):
                return
            self._read_steps.extend(self._read(*self._queue.popleft()))

    def count_correction(self) -> int:
        """Steps read since the last call, minus their expected number (`PendingDispatch.count`)."""
        correction, self._correction = self._correction, 0
        return correction

    def _read(self, pending: PendingDispatch, first: StepResult) -> Iterator[StepResult]:
        steps = pending.steps()
        more = len(steps) - pending.count
        if more:
            self._correction += more
            queue = [(each, step._replace(index=step.index + more)) for each, step in self._queue]
            self._queue = deque(queue)
        # With as many batches as steps, each step has its own batch. Otherwise steps share them.
        single = len(steps) > 1 and len(first.batches) == len(steps)
        for i, records in enumerate(steps):
            batches = self._accumulated + ((first.batches[i],) if single else first.batches)
            # Accumulated batches belong to the update that their gradients go into.
            has_stepped = not records[0].taken or any(each.judged for each in records)
            self._accumulated = () if has_stepped else batches
            is_last, contents = i == len(steps) - 1, self._contents + first.contents
            if is_last:
                self._contents = () if has_stepped else contents
            yield StepResult(
                first.index + i,
                records,
                batches if has_stepped else (),
                contents if is_last and has_stepped else (),
                pending.vote_requested and is_last,
            )

    def clear(self) -> None:
        """Drops all queued steps, which a rollback has undone."""
        self._queue.clear()
        self._read_steps.clear()
        self._accumulated = self._contents = ()


class HostRules:
    """Counts the hits of the rules, separately for each optimizer."""

    def __init__(self, rules: tuple[RuleConfig, ...], config: EngineConfig) -> None:
        """Takes the policy's `host_rules`, and its depth of a rollback and its quiet steps."""
        self._configs = rules
        self._depth, self._quiet_steps = config.rollback.depth, config.incident.quiet_steps
        self.restart()

    def restart(self) -> None:
        """Forgets all hits, after a rollback."""
        self._states: dict[tuple[str, int], RuleState] = {}
        self._fired: dict[str, int] = {}

    def ordered(self, record: StepRecord) -> StepRecord:
        """The record of a judged step, with a rollback if a rule orders one."""
        fired = False
        for number, config in enumerate(self._configs if record.judged else ()):
            key = record.engine, number
            state, hit = self._states.get(key), np.bool_(record.cause & config.causes)
            if state is None and not hit:
                continue  # most steps of most runs
            state, step = state or init_rule(config), np.int32(record.step)
            self._states[key], firing = update_rule(config, state, hit, step, 0, xp=np)
            fired |= bool(firing.fired)
        if not fired:
            return record
        before, self._fired[record.engine] = self._fired.get(record.engine), record.step
        if before is not None and record.step - before <= self._quiet_steps:
            return record
        return record._replace(action=record.action | Action.ROLLBACK, rollback_depth=self._depth)


FROM_START = 100
"""Steps after which a run ends that has had no finite step."""
IN_A_ROW = 1_000
"""Consecutive steps without a finite step after which any other run ends."""


def nonfinite_row_text(
    record: StepRecord, row: int, weights: Sequence[str], from_start: bool
) -> str:
    """The sentence about a run of which `row` consecutive steps were not finite.

    `weights` has the names of the parameters with NaN or Inf, in their order. A skip changes no
    parameter, so a run without a finite step has the parameters that it was started with.
    """
    which, since, loaded = "last", "", ""
    if from_start:
        which, since, loaded = "first", " since the start", ", because they were loaded so"
    text = f"none of the {which} {row:,} steps was finite, so nothing was trained"
    if weights:
        found = f"the weights are NaN or Inf{since}{loaded}"
        return f"{text}: {found}; the first tensor is {weights[0]}"
    if not record.taken:
        return f"{text}: the training step has kept its old state{since}"
    named = [each.name for each in record.evidence if not math.isfinite(each.grad_norm)]
    first = f"; the first tensor is the gradient of {named[0]}" if named else ""
    what = "loss" if record.cause & Cause.NONFINITE_LOSS else "gradient"
    return f"{text}: the {what} is NaN or Inf{since}{first}"


def cause_text(flags: int) -> str:
    """Names of `Cause` flags, as a clause."""
    return flag_names(names(Cause(flags)))


def is_logged(number: int) -> bool:
    """Whether occurrence `number` has a line: the first ten, then each power of two."""
    return number <= 10 or number & (number - 1) == 0


def passes_power_of_ten(before: int, now: int) -> bool:
    """Whether a count has just reached 1, 10, 100, ..."""
    return now > before and (not before or len(str(now)) > len(str(before)))


# -- metrics of the run ----------------------------------------------------------------------------

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

    def compared(self, records: Sequence[StepRecord]) -> list[StepRecord]:
        """The records of one step, with the loss and the evaluation relative to the mean loss.

        Losses of steps with a cause do not enter the mean. Each process starts a new mean.
        """
        evaluated, self.eval_loss = self.eval_loss, None
        return [self._compare(record, evaluated) for record in records]

    def _compare(self, record: StepRecord, eval_loss: float | None) -> StepRecord:
        mean, count = self._means.get(record.engine, (record.loss, 0))
        is_known = record.judged and mean != 0 and not record.cause & Cause.NONFINITE_LOSS
        if is_known and not record.cause:
            count = min(count + 1, _MEAN_STEPS)
            self._means[record.engine] = mean + (record.loss - mean) / count, count
        return record._replace(
            loss_ratio=record.loss / mean if is_known and mean > 0 else None,
            eval_loss=eval_loss,
            eval_gap=eval_loss - mean if eval_loss is not None and mean != 0 else None,
        )

    def add(self, records: Iterable[StepRecord]) -> None:
        """Adds the records of one step."""
        for record in records:
            counts = self._counts.setdefault(record.engine, dict.fromkeys(COUNTS, 0))
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
        changed = {
            name: value
            for name, value in now.items()
            if value != self._before.get(name, float(name.endswith("/lr_scale")))
        }
        self._before |= now
        ratios = {n: v for n, v in values.items() if n.endswith("/loss_ratio")} if changed else {}
        return changed | ratios
