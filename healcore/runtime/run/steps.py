"""Steps as the host reads them, a fixed number of steps later, and the rules that the host counts.

Reading does not wait for the device. The delay does not depend on when records arrive, because all
ranks have to act at the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from healcore.core.array_namespace import NUMPY
from healcore.core.decision import Action, StepRecord
from healcore.core.engine import EngineConfig, RuleConfig
from healcore.core.engine.judge import update_rule
from healcore.core.engine.state import RuleState, init_rule
from healcore.runtime.data import BatchId
from healcore.runtime.driver import PendingDispatch

if TYPE_CHECKING:
    from healcore.runtime.run.monitor_state import MonitorState

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
    steps_at_once: int = 1
    """Number of steps of its dispatch."""
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

    def read_due(self, *, all: bool = False) -> Iterator[StepResult]:
        """Yields the steps that are due, oldest first; with `all` every queued step."""
        while self.has_due(all=all):
            yield self.read_next()

    def has_due(self, *, all: bool = False) -> bool:
        """Whether a step is due; with `all` whether any step is queued."""
        return bool(self._read_steps) or len(self._queue) > (0 if all else LAG)

    def read_next(self) -> StepResult:
        """Returns the oldest step. Waits for the device, unless its dispatch has been read."""
        if not self._read_steps:
            self._read_steps.extend(self._read(*self._queue.popleft()))
        return self._read_steps.popleft()

    def take_count_correction(self) -> int:
        """Steps read since the last call, minus their expected number (`PendingDispatch.count`)."""
        correction, self._correction = self._correction, 0
        return correction

    def _read(self, pending: PendingDispatch, first: StepResult) -> list[StepResult]:
        steps = pending.read()
        more = len(steps) - pending.count
        if more:
            self._correction += more
            queue = [(each, step._replace(index=step.index + more)) for each, step in self._queue]
            self._queue = deque(queue)
        is_whole = len(steps) == 1 and not (self._accumulated or self._contents)
        if is_whole and _has_stepped(steps[0]):  # most dispatches: one step with its own batches
            vote = pending.vote_requested
            return [StepResult(first.index, steps[0], first.batches, first.contents, 1, vote)]
        found = []
        # With as many batches as steps, each step has its own batch. Otherwise steps share them.
        single = len(steps) > 1 and len(first.batches) == len(steps)
        for i, records in enumerate(steps):
            batches = self._accumulated + ((first.batches[i],) if single else first.batches)
            # Accumulated batches belong to the update that their gradients go into.
            has_stepped = _has_stepped(records)
            self._accumulated = () if has_stepped else batches
            is_last = i == len(steps) - 1
            contents = self._contents + first.contents
            if is_last:
                self._contents = () if has_stepped else contents
            result = StepResult(
                first.index + i,
                records,
                batches if has_stepped else (),
                contents if is_last and has_stepped else (),
                len(steps),
                pending.vote_requested and is_last,
            )
            found.append(result)
        return found

    def forget_accumulation(self) -> None:
        """Drops the batches of an accumulation that a rollback has undone; all steps are read."""
        self._accumulated = self._contents = ()


def _has_stepped(records: list[StepRecord]) -> bool:
    """Whether a step is more than a part of an accumulation."""
    return not records[0].taken or any(each.judged for each in records)


class HostRules:
    """Counts the hits of the rules, separately for each optimizer."""

    def __init__(
        self, rules: tuple[RuleConfig, ...], config: EngineConfig, state: MonitorState
    ) -> None:
        """Counts in `state`.

        Args:
            rules: the policy's `host_rules`.
            config: has the depth and the quiet steps.
            state: has the hits, which a rollback forgets.
        """
        self._configs = rules
        self._depth = config.rollback.depth
        self._quiet_steps = config.incident.quiet_steps
        self._state = state

    def with_rollback_order(self, record: StepRecord) -> StepRecord:
        """The record of a judged step, with a rollback if a rule orders one."""
        fired = False
        hits = self._state.rule_hits
        is_counted = record.judged and (record.cause or hits)
        for number, config in enumerate(self._configs if is_counted else ()):
            key = f"{number}/{record.engine}"
            saved = hits.get(key)
            hit = np.bool_(record.cause & config.causes)
            if saved is None and not hit:
                continue
            state = init_rule(config)
            # The window of another policy may have another length: it counts from the start.
            if saved is not None and len(saved) == 2 + config.within:
                run, age, *window = map(np.int32, saved)
                state = RuleState(run, np.array(window, np.int32), age)
            state, firing = update_rule(config, state, hit, np.int32(record.step), 0, xp=NUMPY)
            hits[key] = [int(state.run), int(state.age), *map(int, state.window)]
            fired |= bool(firing.fired)
        if not fired:
            return record
        last = self._state.rule_fired
        before, last[record.engine] = last.get(record.engine), record.step
        if before is not None and record.step - before <= self._quiet_steps:
            return record
        return record._replace(action=record.action | Action.ROLLBACK, rollback_depth=self._depth)
