"""From one step's numbers to what the host is to do about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from healcore.core.evidence import Evidence
from healcore.core.step_record import Readings, StepRecord
from healcore.core.verdict import Action, Cause, names
from healcore.runtime.data import BatchId
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.delayed_reader import JudgedStep
from healcore.runtime.incidents.hooks import Hooks
from healcore.runtime.incidents.incident import Facts, Incident
from healcore.runtime.ledger import IncidentRecord, Ledger
from healcore.runtime.store.ranks import Ranks

_SEVERE = (Action.STOP, Action.ROLLBACK, Action.SAVE)
_ALARMS = 100
"""Alarms of one incident, and of the time without one, that get a line of their own."""

_REMEMBERED = 1000
"""Steps whose data is remembered, at least; more where the policy's region is longer."""


class Order(NamedTuple):
    """What is to be carried out."""

    action: Action
    depth: int
    onset: int
    """Index of the incident's first alarm."""
    since: int
    """Index of the first alarm with a cause of this order: the incident may have begun before."""
    index: int
    """Of the step that brought the order."""
    cause: Cause
    bad: tuple[BatchId, ...]
    """Data of the steps since then."""
    overridden: bool
    """It is not the engine's: a hook has had its way, or earlier weights were better."""
    loss: float
    """Of the step that brought the order; the last finite one."""
    arrays: tuple[str, ...] = ()
    """What brought the order instead of a step: arrays that a save has found NaN or Inf in."""


class Worst(NamedTuple):
    """The first alarm of the last incident, for the diagnosis."""

    readings: Readings
    evidence: tuple[Evidence, ...]
    batches: tuple[BatchId, ...]


class Judge:
    """Keeps the ledger, writes the events of every step, asks the hooks.

    Args:
        policy: the policy.
        ledger: what is remembered.
        hooks: the user's.
        ranks: the processes of this run.
        log_event: writes an event, see `Log.write`.
        facts: how the run stands, for hooks.
    """

    def __init__(
        self,
        *,
        policy: HostPolicy,
        ledger: Ledger,
        hooks: Hooks,
        ranks: Ranks,
        log_event: Callable[..., object],
        facts: Callable[[], Facts],
    ) -> None:
        self.policy = policy
        self.ledger = ledger
        self.hooks = hooks
        self.ranks = ranks
        self.log_event = log_event
        self.facts = facts
        self.untold = 0
        """Alarms without a line of their own."""
        self.worst: Worst | None = None
        self._data: dict[int, tuple[BatchId, ...]] = {}
        self._lr_scale: dict[str, float] = {}
        self._lr_scale_before: dict[str, float] = {}
        self._quiet_alarms = 0
        self._known = 0

    def judge(self, step: JudgedStep) -> Order | None:
        """Takes one step; an order only where something has to be carried out."""
        self._remember(step)
        episode = self.ledger.judge(step.index, step.records)
        if episode is not None and episode.number > self._known:
            self._known = episode.number
            first = max(step.records, key=lambda each: each.cause != 0)
            self.worst = Worst(first.readings, first.evidence, step.batches)
            self.log_event(
                "incident",
                step=step.index,
                incident=episode.number,
                onset=episode.onset,
                cause=names(Cause(episode.cause)),
                batches=[list(each) for each in step.batches],
            )
        order = None
        for record in step.records:
            if record.cause:
                self._alarm(step, record, episode)
            self._note_rate(step, record)
            if record.action:
                order = _worse(order, self._order(step, record, episode))
        return order

    def order_for(self, onset: int, last: int) -> Order:
        """To go back to before `onset` and leave out the data up to step `last`, for their loss."""
        ids = [each for index, each in sorted(self._data.items()) if onset <= index <= last]
        bad = tuple(each for step in ids for each in step)
        return Order(Action.ROLLBACK, 1, onset, onset, last, Cause.LOSS_SPIKE, bad, True, math.nan)

    @staticmethod
    def also_bad(later: list[JudgedStep]) -> tuple[BatchId, ...]:
        """Data of steps after an order, up to the last one with an alarm."""
        last = max([i for i, step in enumerate(later) if _alarmed(step)], default=-1)
        return tuple(each for step in later[: last + 1] for each in step.batches)

    def data_of(self, steps: Iterable[int]) -> tuple[BatchId, ...]:
        """Data of some steps, as far as it is remembered."""
        return tuple(each for step in steps for each in self._data.get(step, ()))

    def went_back(self, target: int) -> None:
        """Steps from `target` on are taken again."""
        self._data = {index: ids for index, ids in self._data.items() if index < target}

    def goes_on(self, lr_scale: dict[str, float]) -> None:
        """Takes over the multipliers in force, by engine: what is known is not told as new."""
        self._lr_scale, self._lr_scale_before = dict(lr_scale), dict(lr_scale)

    @property
    def lr_scale(self) -> float:
        """The multiplier in force, the smallest of all engines."""
        return min(self._lr_scale.values(), default=1.0)

    @property
    def lr_scale_before(self) -> float:
        """The one before the last step that was judged."""
        return min(self._lr_scale_before.values(), default=1.0)

    # -- within ---------------------------------------------------------------------------------

    def _remember(self, step: JudgedStep) -> None:
        self._data[step.index] = step.batches
        self._data.pop(step.index - max(self.policy.region, _REMEMBERED), None)

    def _order(
        self, step: JudgedStep, record: StepRecord, episode: IncidentRecord | None
    ) -> Order | None:
        action, depth = record.action, record.rollback_depth
        onset = episode.onset if episode else step.index
        number = episode.number if episode else 0
        answer = self.hooks.ask(
            Incident(
                number=number,
                step=step.index,
                onset=onset,
                cause=record.cause,
                decision=record.decision,
                readings=record.readings,
                engine=record.engine,
                evidence=record.evidence,
                batches=tuple((each.epoch, each.index) for each in step.batches),
                facts=self.facts() if len(self.hooks) else Facts(),  # it lists the store
            )
        )
        for problem in answer.problems:
            self.log_event("hook", step=step.index, hook="", problem=problem)
        ordered = action
        if answer.action is not None and not self.policy.observes:
            action = answer.action
            self.log_event(
                "hook",
                step=step.index,
                hook=answer.by,
                ordered=names(ordered),
                action=names(action),
            )
        if self.ranks.world > 1:
            # The most severe wins everywhere; the engines agree, hooks need not.
            said = self.ranks.gather((int(action), depth))
            action = Action(0)
            for flags, deep in said:
                action |= Action(flags)
                depth = max(depth, deep)
        if self.policy.observes or action & ~Action.ALERT & ~Action.CUT_LR:
            self.log_event(
                "order",
                step=step.index,
                incident=number,
                cause=names(record.cause),
                action=names(action),
                depth=depth,
                observed=self.policy.observes,
            )
        if self.policy.observes or not any(action & each for each in _SEVERE):
            return None
        first = episode.first if episode else {}
        since = min([first[name] for name in names(record.cause) if name in first], default=onset)
        bad = [ids for index, ids in sorted(self._data.items()) if since <= index <= step.index]
        return Order(
            action=action,
            depth=max(depth, 1),
            onset=onset,
            since=since,
            index=step.index,
            cause=record.cause,
            bad=tuple(each for ids in bad for each in ids),
            overridden=action != ordered,
            loss=record.loss,
        )

    def _alarm(self, step: JudgedStep, record: StepRecord, episode: IncidentRecord | None) -> None:
        self._quiet_alarms += episode is None
        if (episode.alarms if episode else self._quiet_alarms) > _ALARMS:
            self.untold += 1
            return
        self.log_event(
            "alarm",
            step=step.index,
            engine=record.engine,
            incident=episode.number if episode else 0,
            cause=names(record.cause),
            skip=record.skip,
            grad_scale=record.grad_scale,
            lr_scale=record.lr_scale,
            action=names(record.action),
            readings=record.readings._asdict(),
            evidence=[each._asdict() for each in record.evidence],
            batches=[list(each) for each in step.batches],
            observed=self.policy.observes,
        )

    def _note_rate(self, step: JudgedStep, record: StepRecord) -> None:
        """A line for each cut, and one when the ramp has ended; not for each step of the ramp."""
        now = record.lr_scale
        before = self._lr_scale.get(record.engine, 1.0)
        self._lr_scale[record.engine] = now
        self._lr_scale_before[record.engine] = before
        if now < before or (now == 1.0 and before < 1.0):
            self.log_event(
                "lr",
                step=step.index,
                engine=record.engine,
                lr_scale_before=before,
                lr_scale=now,
                observed=self.policy.observes,
            )


def _alarmed(step: JudgedStep) -> bool:
    return any(record.cause for record in step.records)


def _worse(one: Order | None, other: Order | None) -> Order | None:
    """What two engines want, as one order."""
    if one is None or other is None:
        return one or other
    return one._replace(
        action=one.action | other.action,
        depth=max(one.depth, other.depth),
        since=min(one.since, other.since),
        bad=max(one.bad, other.bad, key=len),
        cause=one.cause | other.cause,
        overridden=one.overridden or other.overridden,
        loss=max(one.loss, other.loss),
    )
