"""`BetterWeights`: compares weights, and answers the verdict that earlier weights are better."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from healcore.core.decision import Cause
from healcore.runtime.data import BatchId
from healcore.runtime.run.compare.comparisons import LASTING_STEPS
from healcore.runtime.run.compare.evidence import TrainedStep, Verdict
from healcore.runtime.run.compare.step_history import STEPS_BEFORE_SIGN
from healcore.runtime.run.engine_states import lr_states, with_lr_states
from healcore.runtime.run.healthy_ranges import Held
from healcore.runtime.run.orders import Order, RollbackRecord
from healcore.runtime.run.rollback.next_trial import MAX_ACCEPTED, Trial, TroubleFacts, next_trial
from healcore.runtime.run.steps import StepResult
from healcore.runtime.store.ranks import broadcast

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

_NO_REASON = Cause.PLATEAU | Cause.OVERFIT
"""Causes that say nothing about damaged weights: no reason to compare at each of their alarms."""
INTENDED = f"the program has set this for more than {LASTING_STEPS} steps, so it is intended"
"""Why a number that was held is used, as a clause."""


class BetterWeights:
    """Decides what to try where earlier weights are better, see `next_trial`."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def compare(self, step: StepResult) -> Verdict | None:
        """Compares the current weights with earlier ones, if there is a reason to."""
        records, taken = step.records, step.records[0].taken
        if not self.run.comparisons.is_enabled or (
            taken and not any(each.judged for each in records)
        ):
            return None
        self.run.comparisons.steps_are_windows = self.run.monitor.state.has_micro_steps
        bad = not taken or any(each.cause & Cause.NONFINITE_LOSS for each in records)
        loss = math.nan if bad else sum(each.loss for each in records) / len(records)
        norms: dict[str, float] = {}
        rates: dict[str, float] = {}
        for each in records:
            if each.judged:
                norms[each.engine] = max(each.grad_norm, norms.get(each.engine, 0.0))
            if each.judged and not each.skip and each.lr not in (0.0, 1.0):  # else it is unknown
                rate = float(each.lr) * float(each.lr_scale)
                rates[each.engine] = max(rate, rates.get(each.engine, 0.0))
        return self.run.comparisons.observe(
            TrainedStep(step.index, step.contents, norms, rates),
            loss,
            alarm=not taken or any(each.cause & ~_NO_REASON for each in records),
            trained=taken and not all(each.skip for each in records),
        )

    def carry_out(self, verdict: Verdict, *, finite: bool = True) -> RollbackRecord | None:
        """Carries out a verdict of `comparisons`. Returns the rollback, or None without one.

        After `MAX_ACCEPTED` accepted troubles in a row a verdict is only an alert. Weights that are
        not `finite` cannot be accepted; then the method does nothing.
        """
        rise, remembered = verdict.rise, verdict.rise_remembered
        found = verdict.index, verdict.onset, "damage"
        self.run.log.assessment(*found, rise=rise, rise_remembered=remembered)
        ledger = self.run.ledger
        past = [each for each in ledger.same_trouble(verdict.onset) if each.trial]
        last_trial = max((each.step for each in ledger.rollbacks if each.trial), default=0)
        if not past and last_trial > ledger.accepted_until:
            ledger.accepted = 0  # the trials at the last place have helped
        order = self._order_of(verdict, past)
        if order.trial == Trial.ACCEPT:
            return self._accept(order, verdict, past) if finite else None
        self.run.comparisons.expect_again(verdict)
        done = self.run.recovery.roll_back(order)
        if done is None and finite:
            self.run.comparisons.pause_until(verdict.index + 1)
        return done

    def _order_of(self, verdict: Verdict, past: Sequence[RollbackRecord]) -> Order:
        """The order for a verdict; `past` are the trials at this place that have not helped."""
        ranks = self.run.ranks
        order = Order(
            # At the end of the data, the verdict has the number of steps done.
            index=min(verdict.index, self.run.data.step - 1),
            onset=verdict.onset,
            since=verdict.onset,
            by_host=True,
            better_step=verdict.anchor,
            trial=Trial.ACCEPT,
            held_before=self.run.comparisons.held,
        )
        tried = [Trial(each.trial) for each in past]
        if not tried and self.run.ledger.accepted >= MAX_ACCEPTED:
            return order
        held, batches = self._newly_unusual(verdict, past) if tried else (Held(), ())
        if tried and not (held or batches):
            for older in self.run.comparisons.about_older_weights(verdict):
                held, batches = self._newly_unusual(older, past)
                if held or batches:
                    verdict, order = older, replace(order, better_step=older.anchor)
                    break
        policy = self.run.policy
        cuts = policy.engine.config.budget.lr_cuts if policy.engine.scales_lr else 0
        facts = TroubleFacts(
            rates=verdict.rates,
            healthy_rates=verdict.healthy_rates,
            from_start=verdict.anchor <= self.run.record.first_step,
            unusual=bool(held or batches),
            may_limit=cuts,
        )
        trial = broadcast(ranks, next_trial(tried, facts))  # rates may differ by rank
        order = replace(order, trial=trial)
        if trial == Trial.LIMIT_RATE:
            rates = verdict.rates[:1] if facts.from_start else verdict.rates
            highest = {n: max(r[n] for r in rates if n in r) for n in {*chain(*rates)}}
            highest = broadcast(ranks, highest)
            states = lr_states(self.run.driver.engines())
            if not policy.engine.limits_lr:  # the policy cuts the multiplier, whatever the rate is
                highest = {name: float(state["scale"]) for name, state in states.items()}
            order = replace(order, lr_at_fault=highest, lr_states=states)
            held = self.run.comparisons.held
            if facts.from_start:
                held |= Held(start_rates=states, until=verdict.index + 1)
            else:  # this limit lasts, and replaces a guess from the start of the run
                held = replace(held, start_rates={})
            return replace(order, held=held)
        if trial == Trial.HOLD:
            both = self.run.comparisons.held | held
            if Trial.HOLD in tried:  # what was unusual was not the cause, or not all of it
                first = max(verdict.anchor, verdict.onset - STEPS_BEFORE_SIGN)
                last = min(verdict.found, *(each.index for each in past))  # the earliest evidence
                both = replace(both, withheld=(first, max(first, last)))
            return replace(order, held=both, batches=batches)
        return order

    def _newly_unusual(
        self, verdict: Verdict, past: Sequence[RollbackRecord]
    ) -> tuple[Held, tuple[BatchId, ...]]:
        """What was unusual at the trouble, and is neither held nor skipped yet. Collective."""
        held = self.run.comparisons.outside_ranges(verdict)
        new = held.without(self.run.comparisons.held)
        unusual = broadcast(self.run.ranks, self.run.comparisons.unusual_batches(verdict))
        if not self.run.loaders.can_rewind:
            return new, ()
        skipped = {batch for each in past for batch in each.batches}
        batches = [
            each for each in self.run.monitor.state.batches_of(unusual) if each not in skipped
        ]
        return new, tuple(batches)

    def _accept(
        self, order: Order, verdict: Verdict, past: Sequence[RollbackRecord]
    ) -> RollbackRecord | None:
        """Undoes the trials. No later rollback is for this trouble."""
        ledger = self.run.ledger
        until = self.run.data.step + 1
        ledger.accepted += 1
        ledger.accepted_until = until
        # A restored checkpoint may hold the trouble, such as a rate that the program sets once.
        oldest = min((each.target for each in past), default=verdict.anchor)
        order = _undone(replace(order, better_step=min(verdict.anchor, oldest)), past)
        undone = bool(order.lr_states or order.read_again or order.held is not None)
        # Trials without any effect on the losses need no repeat to be undone.
        repeats = (undone and not verdict.recurred) or verdict.anchor < oldest
        done = self.run.recovery.roll_back(order) if repeats else None
        if done is None:
            driver = self.run.driver
            driver.load(None, with_lr_states(driver.engines(), order.lr_states))
            if order.held is not None:
                self.run.comparisons.hold(order.held, until)
        self.run.comparisons.pause_until(until)
        if past:
            times = "the rollback" if len(past) == 1 else f"each of the {len(past)} rollbacks"
            why = f"the damage has come back after {times}, so the change is taken as intended"
        else:
            why = (
                f"the last {MAX_ACCEPTED} changes came back after all trials, so this one is taken "
                "as intended too"
            )
        changes = "; the trials are undone" if undone else ""
        if done is None:  # otherwise the line of the rollback has said so
            better = f"the weights of step {verdict.anchor} are better on the same batches"
            why = f"{better}, since step {verdict.onset}; {why}"
        self.run.log.warning(
            f"step {order.index}: {why}{changes}; the run continues, without another rollback for "
            "this change"
        )
        return done

    def accept_intended(self, index: int) -> RollbackRecord | None:
        """Accepts the numbers that are held although the program keeps its own value for long.

        The run goes back to before they were held, undoes the trials, and repeats the steps with
        the program's values, as it would have trained without healcore. Where this cannot be, or
        where a later rollback has healed other trouble that would come back, the values are used
        from now on.

        Args:
            index: the newest step.

        Returns:
            The rollback, or None without one.
        """
        intended = self.run.comparisons.take_intended()
        if not intended:
            return None
        until = self.run.data.step + 1
        held = self.run.comparisons.held
        values = ", ".join(f"{name} of {value:.4g}" for name, value in intended.items())
        past = self._trials_that_hold(intended)
        done = None
        if past:
            onset = past[-1].onset
            oldest = min(each.target for each in past)
            order = Order(
                index=index,
                onset=onset,
                since=onset,
                by_host=True,
                better_step=min(oldest, *(held.numbers[name].before for name in intended)),
                trial=Trial.ACCEPT,
                intended=values,
            )
            self.run.ledger.accepted_until = until
            done = self.run.recovery.roll_back(_undone(order, past))
        if done is None:
            self.run.comparisons.hold(held.without_numbers(intended), until)
            self.run.log.warning(f"step {index}: {values}: {INTENDED}, and is used from now on")
        self.run.comparisons.pause_until(until)
        return done

    def _trials_that_hold(self, names: Container[str]) -> list[RollbackRecord]:
        """The trials of the trouble for which these numbers are held, oldest first.

        Empty if the steps since then are not repeated by a rollback, or if a later rollback was for
        other trouble.
        """
        ledger, loaders = self.run.ledger, self.run.loaders
        if not loaders.can_rewind:
            return []
        holds = [
            each
            for each in ledger.rollbacks
            if each.held is not None and any(name in names for name in each.held.numbers)
        ]
        if not holds:
            return []
        trials = ledger.same_trouble(holds[0].onset)
        if trials[-1] != ledger.rollbacks[-1] or not all(each.trial for each in trials):
            return []
        return trials


def _undone(order: Order, past: Sequence[RollbackRecord]) -> Order:
    """The order with everything undone that these trials of one trouble have changed."""
    limits = [each.lr_states for each in past if each.trial == Trial.LIMIT_RATE]
    changed = [each for each in past if each.held is not None]
    return replace(
        order,
        lr_states=limits[0] if limits else {},
        read_again=tuple(batch for each in past for batch in each.batches),
        held=past[0].held_before or Held() if changed else None,
    )
