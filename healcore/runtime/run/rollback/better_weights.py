"""`BetterWeights`: compares weights, and answers the verdict that earlier weights are better.

    verdict --> trials at this place so far --> next_trial --> Order --> Recovery.roll_back
                                                   |
                                                ACCEPT: undo the trials, pause the comparisons

Each trial repeats the steps since the better weights with one thing changed. If the damage comes
back after all trials, the program itself causes it, and its values are accepted.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from healcore.core.decision import Cause
from healcore.runtime.data import BatchId
from healcore.runtime.reporting.diagnosis import recovered_text
from healcore.runtime.run.compare.step_history import STEPS_BEFORE_SIGN
from healcore.runtime.run.compare.trained_step import TrainedStep
from healcore.runtime.run.compare.verdict import Verdict
from healcore.runtime.run.dispatch_queue import StepResult
from healcore.runtime.run.engine_states import SavedLrState, lr_states, with_lr_states
from healcore.runtime.run.healthy_ranges import Held
from healcore.runtime.run.orders import Order, OrderReason, RepeatChanges, RollbackRecord
from healcore.runtime.run.rollback.next_trial import MAX_ACCEPTED, Trial, TroubleFacts, next_trial
from healcore.runtime.run.rollback.report import INTENDED
from healcore.runtime.store.ranks import broadcast

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

_NOT_ABOUT_WEIGHTS = Cause.PLATEAU | Cause.OVERFIT
"""Causes that say nothing about damaged weights. Their alarms are no reason to compare weights."""

_NOT_RESTORED = "no checkpoint could be restored, so the run keeps its weights"
"""Why damage is not repaired although a rollback was decided."""


class BetterWeights:
    """Decides what to try where earlier weights are better, see `next_trial`.

    The first rollback for some trouble changes little, and each further rollback for the same
    trouble changes something else. When all trials have failed, the change is accepted and the run
    continues.

    Args:
        run: the parts of the run. This class uses more than eight of them, also `recovery`, which
            is made later.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def compare(self, result: StepResult) -> Verdict | None:
        """Compares the current weights with earlier weights, if there is a reason to.

        Args:
            result: the newest step that was read. Its records are joined into one loss, one
                gradient norm and one rate of each engine. A step that was not taken, or whose loss
                was not finite, counts as a loss of NaN.

        Returns:
            The verdict that earlier weights are better, or None.
        """
        records, taken = result.records, result.records[0].taken
        comparisons = self.run.comparisons
        if not comparisons.is_enabled:
            return None
        if taken and not any(each.judged for each in records):
            return None  # the step is a micro-step of an accumulation
        comparisons.steps_are_windows = self.run.monitor.state.has_micro_steps
        if not taken or any(each.cause & Cause.NONFINITE_LOSS for each in records):
            loss = math.nan
        else:
            loss = sum(each.loss for each in records) / len(records)
        norms: dict[str, float] = {}
        rates: dict[str, float] = {}
        for each in records:
            if each.judged:
                norms[each.engine] = max(each.grad_norm, norms.get(each.engine, 0.0))
            rate = each.trained_rate
            if rate is not None:
                rates[each.engine] = max(rate, rates.get(each.engine, 0.0))
        return comparisons.observe(
            TrainedStep(result.index, result.contents, norms, rates),
            loss,
            alarm=not taken or any(each.cause & ~_NOT_ABOUT_WEIGHTS for each in records),
            has_trained=taken and not all(each.skip for each in records),
        )

    def carry_out_verdict(self, verdict: Verdict, *, finite: bool = True) -> RollbackRecord | None:
        """Carries out a verdict of `comparisons`.

        After `MAX_ACCEPTED` accepted troubles in a row a verdict is only an alert: a program that
        changes its weights at intervals would be repeated forever.

        Args:
            verdict: which earlier weights are better, and since when.
            finite: whether the current weights are finite. Others cannot be accepted; the method
                then does nothing where it would accept them.

        Returns:
            The rollback, or None without one.
        """
        ledger = self.run.ledger
        past = _trials_of(ledger.same_trouble(verdict.onset))
        last_trial = max((each.step for each in _trials_of(ledger.in_force)), default=0)
        if not past and last_trial > ledger.accepted_until:
            ledger.accepted = 0  # the trials at the last place have helped
        order = self._order_of(verdict, past)
        if order.changes.trial == Trial.ACCEPT and finite:
            self._log_verdict("accepted", verdict, why=_why_accepted(len(past)))
            return self._accept(order, verdict, past)
        self._log_verdict("damage", verdict)
        if order.changes.trial == Trial.ACCEPT:
            return None
        self.run.comparisons.suspicion.expect_again(verdict)
        done = self.run.recovery.roll_back(order)
        if done is None and finite:
            ledger.leave(verdict.onset)
            self._log_verdict("accepted", verdict, by="nothing", why=_NOT_RESTORED)
            self.run.comparisons.pause_until(verdict.roll_back_at + 1)
        return done

    def _log_verdict(
        self,
        name: str,
        verdict: Verdict,
        *,
        by: str = "earlier_weights",
        why: str | None = None,
    ) -> None:
        """Writes the event of a verdict."""
        self.run.log.assessment(
            verdict.roll_back_at,
            verdict.onset,
            name,
            by,
            checkpoint=verdict.anchor_step,
            rise=verdict.rise,
            rise_remembered=verdict.rise_remembered,
            loss_before=self._loss_before(name, verdict.anchor_step),
            why=why,
        )

    def _loss_before(self, verdict: str, anchor_step: int) -> float | None:
        """The mean loss when earlier weights were saved, for accepted damage, or None."""
        anchor = self.run.comparisons.state.anchor_of(anchor_step)
        if verdict != "accepted" or anchor is None:
            return None
        return anchor.level

    def report_recoveries(self) -> None:
        """Reports, at the end of a run, accepted damage of which nothing is left.

        A program that makes its loss worse on purpose, for example by a restart of its rate, does
        so in each repeat. If the mean loss is no higher at the end than before, nothing is damaged.
        """
        run = self.run
        loss = run.comparisons.history.mean()
        before: dict[int, float] = {}
        for onset in run.ledger.damage_left:
            level = run.log.history.losses_before.get(onset)
            if loss is not None and level is not None and loss <= level:
                before[onset] = level
        if not before:
            return
        why = (
            f"the mean loss is {loss:.4g} at the end, and was {min(before.values()):.4g} or more "
            "before; probably your program made the change itself, for example by a restart of its "
            "rate"
        )
        for onset in before:
            run.ledger.recover(onset)
            run.log.assessment(run.progress.step - 1, onset, "recovered", why=why)
        run.log.info(f"{recovered_text([*before])}: {why}")

    def _order_of(self, verdict: Verdict, past: Sequence[RollbackRecord]) -> Order:
        """The order for a verdict; `past` are the trials at this place that have not helped."""
        order = Order(
            index=verdict.roll_back_at,
            onset=verdict.onset,
            first_alarm_of_cause=verdict.onset,
            reason=OrderReason.BETTER_WEIGHTS,
            anchor_step=verdict.anchor_step,
            changes=RepeatChanges(trial=Trial.ACCEPT, held_before=self.run.holding.held),
        )
        tried = [Trial(each.order.changes.trial) for each in past]
        if not tried and self.run.ledger.accepted >= MAX_ACCEPTED:
            return order
        held, batches = Held(), tuple[BatchId, ...]()
        if tried:
            verdict, held, batches = self._with_unusual(verdict, past)
            order = replace(order, anchor_step=verdict.anchor_step)
        policy = self.run.policy
        max_rate_limits = 0
        if policy.engine.scales_lr:
            max_rate_limits = policy.engine.config.budget.lr_cuts
        facts = TroubleFacts(
            rates=verdict.rates,
            healthy_rates=verdict.healthy_rates,
            from_start=verdict.anchor_step <= self.run.record.first_step,
            unusual=bool(held or batches),
            repeats_batches=self.run.loaders.can_rewind,
            max_rate_limits=max_rate_limits,
        )
        trial = broadcast(self.run.ranks, next_trial(tried, facts))  # rates may differ by rank
        order = order.with_changes(trial=trial)
        if trial == Trial.LIMIT_RATE:
            return self._with_rate_limit(order, verdict, from_start=facts.from_start)
        if trial == Trial.HOLD:
            both = self.run.holding.held.with_newer(held)
            if Trial.HOLD in tried:  # what was unusual was not the cause, or not all of it
                both = replace(both, frozen_steps=_steps_to_freeze(verdict, past))
            return replace(order, batches=batches).with_changes(held=both)
        return order

    def _with_unusual(
        self, verdict: Verdict, past: Sequence[RollbackRecord]
    ) -> tuple[Verdict, Held, tuple[BatchId, ...]]:
        """What was unusual at the trouble and no trial has held or skipped yet. Collective.

        Looks at older weights that are better too, until something is found: the newest better
        weights may already have a part of the trouble. Returns the verdict about the weights at
        which something was found, or the given verdict.
        """
        held, batches = self._newly_unusual(verdict, past)
        if held or batches:
            return verdict, held, batches
        for older in self.run.comparisons.about_older_weights(verdict):
            held, batches = self._newly_unusual(older, past)
            if held or batches:
                return older, held, batches
        return verdict, held, batches

    def _with_rate_limit(self, order: Order, verdict: Verdict, *, from_start: bool) -> Order:
        """The order of a trial that limits the rates to the last healthy rates."""
        engine = self.run.policy.engine
        rates = verdict.rates[:1] if from_start else verdict.rates
        highest = broadcast(self.run.ranks, _highest(rates))
        states = lr_states(self.run.driver.engines())
        if not engine.limits_lr:  # the policy cuts the multiplier, whatever the rate is
            highest = {name: float(state["scale"]) for name, state in states.items()}
        held = self.run.holding.held
        if from_start:
            held = held.with_newer(Held(start_rates=states, until=verdict.roll_back_at + 1))
        else:  # this limit lasts, and replaces a guess from the start of the run
            held = replace(held, start_rates={})
        return order.with_changes(lr_at_fault=highest, lr_states=states, held=held)

    def _newly_unusual(
        self, verdict: Verdict, past: Sequence[RollbackRecord]
    ) -> tuple[Held, tuple[BatchId, ...]]:
        """What was unusual at the trouble, and is neither held nor skipped yet. Collective."""
        held = self.run.holding.outside_ranges(verdict)
        new = held.without(self.run.holding.held)
        unusual = broadcast(self.run.ranks, self.run.holding.unusual_batches(verdict))
        if not self.run.loaders.can_rewind:
            return new, ()
        skipped = {*_batches_of(past)}
        batches = self.run.monitor.state.batches_of(unusual)
        return new, tuple(each for each in batches if each not in skipped)

    def _accept(
        self, order: Order, verdict: Verdict, past: Sequence[RollbackRecord]
    ) -> RollbackRecord | None:
        """Undoes the trials. No later rollback is for this trouble.

        The trials are undone by a last rollback if a repeat of the steps can differ without them;
        otherwise the run continues where it is, with the program's own rates and numbers.
        """
        ledger = self.run.ledger
        until = self.run.progress.step + 1
        ledger.accepted += 1
        ledger.accept(verdict.onset, until)
        # A restored checkpoint may hold the trouble, such as a rate that the program sets once.
        oldest = min((each.continues_at for each in past), default=verdict.anchor_step)
        order = _undone(replace(order, anchor_step=min(verdict.anchor_step, oldest)), past)
        changes = order.changes
        undone = bool(changes.lr_states or changes.read_again or changes.held is not None)
        # Trials without any effect on the losses need no repeat to be undone.
        repeats = undone and not verdict.recurred
        # The run goes back even without an effect of the trials if the better weights are older
        # than every restored checkpoint: that checkpoint may hold the trouble.
        repeats = repeats or verdict.anchor_step < oldest
        done = None
        if repeats:
            done = self.run.recovery.roll_back(order)
        if done is None:
            driver = self.run.driver
            driver.load(None, with_lr_states(driver.engines(), changes.lr_states))
            if changes.held is not None:
                self.run.holding.hold(changes.held, until)
        self.run.comparisons.pause_until(until)
        line = f"step {order.index}: "
        if done is None:  # otherwise the line of the rollback has said so
            line += f"the weights of step {verdict.anchor_step} are better on the same batches, "
            line += f"since step {verdict.onset}; "
        line += _why_accepted(len(past))
        if undone:
            line += "; the trials are undone"
        line += "; the run continues, without another rollback for this change"
        self.run.log.warning(line)
        return done

    def accept_intended(self, index: int) -> RollbackRecord | None:
        """Accepts the numbers that are held although the program keeps its own value for long.

        The run rolls back to before the numbers were held, undoes the trials, and repeats the steps
        with the program's values, as it would have trained without healcore. Where this cannot be,
        or where a later rollback has healed other trouble that would come back, the values are used
        from now on.

        Args:
            index: the newest step.

        Returns:
            The rollback, or None without one.
        """
        intended = self.run.holding.take_intended()
        if not intended:
            return None
        until = self.run.progress.step + 1
        held = self.run.holding.held
        values = ", ".join(f"{name} of {value:.4g}" for name, value in intended.items())
        past = self._trials_that_hold(intended)
        done = None
        if past:
            onset = past[-1].onset
            steps = [each.continues_at for each in past]
            steps += [held.numbers[name].last_step_before for name in intended]
            order = Order(
                index=index,
                onset=onset,
                first_alarm_of_cause=onset,
                reason=OrderReason.INTENDED,
                anchor_step=min(steps),
                changes=RepeatChanges(trial=Trial.ACCEPT, intended=values),
            )
            self.run.log.assessment(
                index, onset, "accepted", "intended_numbers", why=f"{values}: {INTENDED}"
            )
            self.run.ledger.accept(onset, until)
            done = self.run.recovery.roll_back(_undone(order, past))
        if done is None:
            self.run.holding.hold(held.without_numbers(intended), until)
            self.run.log.warning(f"step {index}: {values}: {INTENDED}, and is used from now on")
        self.run.comparisons.pause_until(until)
        return done

    def _trials_that_hold(self, names: Container[str]) -> list[RollbackRecord]:
        """The trials of the trouble for which these numbers are held, oldest first.

        Empty if the steps since then are not repeated by a rollback, or if a later rollback was for
        other trouble.
        """
        ledger = self.run.ledger
        if not self.run.loaders.can_rewind:
            return []
        first = None
        for each in ledger.in_force:
            held = each.order.changes.held
            if held is not None and any(name in names for name in held.numbers):
                first = each
                break
        if first is None:
            return []
        trials = ledger.same_trouble(first.onset)
        if trials[-1] != ledger.in_force[-1] or _trials_of(trials) != trials:
            return []
        return trials


def _highest(rates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Engine name -> its highest rate."""
    highest: dict[str, float] = {}
    for each in rates:
        for name, rate in each.items():
            highest[name] = max(rate, highest.get(name, rate))
    return highest


def _steps_to_freeze(verdict: Verdict, past: Sequence[RollbackRecord]) -> tuple[int, int]:
    """First and last step that a second hold freezes, see `Held.frozen_steps`.

    From shortly before the onset up to the earliest evidence, of this verdict or of a past trial.
    """
    first = max(verdict.anchor_step, verdict.onset - STEPS_BEFORE_SIGN)
    last = min(verdict.found_at, *(each.order.index for each in past))
    return first, max(first, last)


def _trials_of(rollbacks: Sequence[RollbackRecord]) -> list[RollbackRecord]:
    """The rollbacks for better weights among some rollbacks."""
    return [each for each in rollbacks if each.order.changes.trial]


def _batches_of(past: Sequence[RollbackRecord]) -> tuple[BatchId, ...]:
    """The batches that these rollbacks have skipped."""
    batches: list[BatchId] = []
    for each in past:
        batches += each.batches
    return tuple(batches)


def _why_accepted(trials: int) -> str:
    """Why a change by the program is accepted after a number of trials, as a clause."""
    if not trials:
        return (
            f"the last {MAX_ACCEPTED} changes came back after all trials: healcore cannot "
            "repair this one either, or the program intends it"
        )
    times = "the rollback" if trials == 1 else f"each of the {trials} rollbacks"
    return (
        f"the damage has come back after {times}: healcore cannot repair it, or the program "
        "intends the change"
    )


def _undone(order: Order, past: Sequence[RollbackRecord]) -> Order:
    """The order with everything undone that these trials of one trouble have changed.

    Rates and held values return to what they were before the first trial, and the batches that a
    trial has skipped are read again.
    """
    rates: Mapping[str, SavedLrState] = {}
    for each in past:
        changes = each.order.changes
        if changes.trial == Trial.LIMIT_RATE:
            rates = changes.lr_states
            break
    held = None
    if any(each.order.changes.held is not None for each in past):
        held = past[0].order.changes.held_before or Held()
    return order.with_changes(lr_states=rates, read_again=_batches_of(past), held=held)
