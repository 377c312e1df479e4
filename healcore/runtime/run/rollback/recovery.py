"""`Recovery`: answers the records of steps, and has the remedy of each trouble carried out.

    find_order(step)              log and monitor the step; a trouble that the policy names, or None
    act(step, order)              the trouble of the step, whatever has shown it
        answer(trouble)           of rules, hooks and NaN: is there evidence?
            go_back(trouble)      the one way back, for every cause:
                tries             the rollbacks for this trouble so far
                facts             what had left its healthy range since a snapshot
                remedy            the table: repeat in an envelope, accept, or stop
                restore           `restore/way_back.py`; the loop continues at its step

Where no rollback can help, the run stops (`ending/stopping.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from healcore.console import counted, first_of
from healcore.core.decision import Action, Cause
from healcore.runtime.run import reports
from healcore.runtime.run.dispatch_queue import StepResult
from healcore.runtime.run.envelope import Envelope
from healcore.runtime.run.healthy_ranges import HealthyValues
from healcore.runtime.run.rollback.nonfinite import SERIOUS
from healcore.runtime.run.rollback.remedy import Facts, Outcome, RateFact, Remedy, remedy
from healcore.runtime.run.trouble import RollbackRecord, Trouble, TroubleCause
from healcore.runtime.store.checkpoints import NoGoodCheckpoint, StateMismatch, StoreError
from healcore.runtime.store.ranks import broadcast

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


class Recovery:
    """Processes the steps that the loop reads, and answers each trouble.

    It is the place where a run decides to roll back, to save or to stop. `WayBack` does the
    rollback, `Stopping` the stop, and `Loop` calls this class between two steps.

    Args:
        run: the parts of the run.
        ends_by_steps: whether a trainer takes a given number of steps, from as many batches as they
            need.

    Attributes:
        ends_by_steps: see the argument.
        counts_steps: whether the loop asks for the number of each step, so that a rollback repeats
            steps also where healcore reads no data for the loop.
    """

    def __init__(self, run: Run, *, ends_by_steps: bool) -> None:
        self.run = run
        self.counts_steps = False
        self.ends_by_steps = ends_by_steps
        self._said: set[str] = set()
        """Why troubles had no rollback. Each reason has one line in a process."""

    @property
    def repeats_batches(self) -> bool:
        """Whether the steps after a rollback have the same batches again.

        They have if the loaders can be rewound, and in a loop without a loader that asks for the
        number of each step.
        """
        loaders = self.run.loaders
        return loaders.can_rewind or (loaders.last_trained is None and self.counts_steps)

    def find_order(self, result: StepResult) -> Trouble | None:
        """Logs a step that was read, gives it to the monitor, and finds what the policy orders.

        Args:
            result: the oldest step that was not given to this method yet.

        Returns:
            The trouble that the rules of the policy or a hook name, or None.
        """
        run = self.run
        result.records[:] = run.metrics.with_loss_ratios(result.records)
        run.log.records(
            result.index,
            result.records,
            several=run.metrics.has_several_engines,
            steps_at_once=result.steps_at_once,
        )
        order = run.monitor.note_step(result)
        seen = [(each.engine, each.trained_rate) for each in result.records]
        if run.journal.nonfinite_streak == 1:  # not every record has the rate of its step
            seen += run.metrics.rates_in_force().items()
        highest = run.journal.rates
        for name, rate in seen:
            if rate is not None:
                highest[name] = max(rate, highest.get(name, 0.0))
        return order

    def act(self, result: StepResult, order: Trouble | None) -> RollbackRecord | None:
        """Decides after a step whether the run rolls back, and carries out the rollback.

        The order of the calls is part of the decision:

        1. A run in which no step is finite any more goes back, whatever the policy orders.
        2. Without an order of the policy, NaN or Inf in the weights is a trouble.
        3. A run that trains nothing stops.
        4. The weights are compared with earlier weights.
        5. The trouble is answered, or else the verdict of the comparison, or else numbers that the
           program has kept outside of their range for long.

        Args:
            result: the step.
            order: the result of `find_order` for the step.

        Returns:
            The rollback, or None if the run continues with the next step.

        Raises:
            RunStopped: the trouble stops the run, or the run trains nothing any more.
        """
        run = self.run
        found = run.nonfinite_recovery.in_a_row(result)
        if found is not None and not found.is_in_budget:
            rollback = self.go_back(found, result.index)
            if rollback is not None:
                return rollback
            found = None
        trouble = order or found
        run.nonfinite_recovery.stop_if_never_finite(trouble)
        verdict = run.witness.observe(result)
        if trouble is not None:
            return self.answer(trouble)
        if verdict is not None:
            return self.go_back(verdict, result.index)
        if run.record.envelope.numbers:  # a step has few calls
            return self.accept_intended(result.index)
        return None

    def accept_intended(self, index: int, *, at_end: bool = False) -> RollbackRecord | None:
        """Accepts the numbers that are held although the program keeps its own value for long.

        The run goes back to before the numbers were held, and repeats the steps with the program's
        values, as it would have trained without healcore. Where this cannot be, or where a later
        rollback has healed other trouble that would come back, the values are used from now on.

        Args:
            index: the newest step.
            at_end: whether the data have ended.

        Returns:
            The rollback, or None without one.
        """
        run, holding = self.run, self.run.holding
        intended = holding.intended(run.progress.step, at_end=at_end)
        if not intended or (run.witness.state.has_evidence and not at_end):
            return None
        values = ", ".join(f"{name} of {value:.4g}" for name, value in intended.items())
        in_force = run.ledger.in_force
        since = [each for each in in_force if intended.keys() & each.after.numbers.keys()]
        others = [each for each in since if each.trouble.is_asked_for or each.onset > since[0].step]
        done = None
        if since and not others and self.repeats_batches:
            trouble = replace(
                since[0].trouble,
                cause=TroubleCause.INTENDED,
                found_at=index,
                finite=True,
                better_step=since[0].checkpoint,
                intended=values,
            )
            done = self.go_back(trouble, index)
        if done is None:
            until = run.progress.step + 1
            holding.hold(holding.envelope.without_numbers(intended), until)
            run.witness.pause_until(until)
            run.log.warning(f"step {index}: {values}: {reports.INTENDED}, and is used from now on")
        return done

    # -- rules, hooks and NaN: is there evidence? -----------------------------------------------

    def answer(self, trouble: Trouble) -> RollbackRecord | None:
        """Answers a trouble that the policy, a hook or NaN has shown.

        Under `[rollback] confirm` an order of the policy needs evidence that the model is worse:
        weights or state with NaN or Inf. All other evidence comes from the comparisons. Weights
        that are not finite do not recover, so a verdict that waits for a recovery is followed now.

        Args:
            trouble: the trouble. Without the action rollback or stop nothing is done here: the
                monitor has written its alert, and `Loop.read_and_act` saves.

        Returns:
            The rollback, or None without one.

        Raises:
            RunStopped: the trouble stops the run, or its budget of rollbacks is exhausted.
        """
        run, damage, cause = self.run, trouble, Cause(trouble.flags)
        if trouble.is_asked_for:
            damage = run.nonfinite_recovery.damage_of(trouble)
        if damage is None and self._needs_evidence(trouble):
            at = trouble.found_at
            run.log.assessment(at, trouble.onset, "unknown", "nothing", cause=cause)
            return None
        found = damage or trouble
        if found.action & Action.STOP:
            run.stopping.stop(self._stop_reason(found), onset=found.onset)
        if not found.action & Action.ROLLBACK:
            return None
        if damage is not None:
            by = damage.cause.value
            run.log.assessment(damage.found_at, damage.onset, "damage", by, cause=cause)
            if run.witness.state.verdict is not None:
                found = replace(run.witness.state.verdict, finite=damage.finite)
        return self.go_back(found, trouble.found_at)

    def _needs_evidence(self, trouble: Trouble) -> bool:
        """Whether an order needs evidence. Only rules need it, and not a rule that stops."""
        if trouble.cause is not TroubleCause.RULE or not trouble.action & SERIOUS:
            return False
        for rule in self.run.policy.engine.config.rules:
            if rule.action & Action.STOP and rule.causes & trouble.flags:
                return False
        return self.run.policy.rollback.confirm

    def _stop_reason(self, trouble: Trouble) -> str:
        """Why an order stops the run, as a clause."""
        if trouble.cause is TroubleCause.HOOK:
            return "an on_incident hook stopped it"
        engines = self.run.driver.engines().values()
        if any(engine["state"]["budget"]["recoveries"] == 0 for engine in engines):
            return "the budget of recoveries is exhausted, and the trouble continues"
        if trouble.cause is TroubleCause.WEIGHTS:
            return "the weights have NaN or Inf"
        return reports.reason_of(trouble)

    # -- the one way back -----------------------------------------------------------------------

    def go_back(self, trouble: Trouble, index: int) -> RollbackRecord | None:
        """Does what the table says about a trouble: repeats, accepts or stops. Collective.

        Args:
            trouble: the trouble.
            index: the newest step.

        Returns:
            The rollback, or None if the run continues where it is.

        Raises:
            RunStopped: the table stops the run, or no snapshot is usable and the weights cannot be
                kept.
        """
        run = self.run
        tries = self._tries(trouble)
        past = run.ledger.in_force
        if past and not tries and past[-1].step > run.ledger.accepted_until:
            run.ledger.accepted = 0  # the tries at the last place have helped
        depth = trouble.depth
        if trouble.cause is TroubleCause.RULE:
            depth = run.policy.rollback.depth + run.policy.rollback.deepen * len(tries)
        if trouble.exact:
            tried = []
        else:
            tried = [each.checkpoint for each in tries]
        try:
            steps = run.way_back.choose(trouble, depth=depth, tried=tried)
        except StoreError as error:
            return self._without_snapshot(trouble, error)
        steps, outside, known = self._unusual_since(trouble, steps, older=bool(tries))
        facts = self._facts(trouble, tries, steps[0], outside, known)
        chosen = broadcast(run.ranks, remedy(trouble, tries, facts))
        if chosen.outcome is Outcome.STOP:
            reach = counted(self._reach, "step")
            rollbacks = counted(self._spent(trouble), "rollback has", "rollbacks have")
            why = f"{rollbacks} been made within {reach} of the run"
            run.stopping.stop(why, onset=trouble.onset)
        if chosen.outcome is Outcome.ACCEPT:
            return self._accept(trouble, tries, chosen, index)
        if trouble.cause is TroubleCause.BETTER_WEIGHTS:
            at = trouble.better_step
            run.log.assessment(index, trouble.onset, "damage", checkpoint=at)
        return self._restore(trouble, chosen, steps, index)

    def _tries(self, trouble: Trouble) -> list[RollbackRecord]:
        """The rollbacks for a trouble so far, oldest first.

        Where a batch that makes NaN was left out, and where another change was accepted, later NaN
        in the weights is another trouble.
        """
        if trouble.is_in_budget:
            region = self.run.policy.rollback.region
        else:
            region = 0
        tries: list[RollbackRecord] = []
        for each in self.run.ledger.same_trouble(trouble.onset, region):
            is_healed = each.trouble.exact and trouble.onset > each.step
            if trouble.cause is TroubleCause.STATE:
                if {*trouble.arrays} <= {*each.trouble.arrays}:
                    tries.append(each)
            elif is_healed or (each.accepts and not trouble.finite):
                tries = []
            else:
                tries.append(each)
        return tries

    def _unusual_since(
        self, trouble: Trouble, steps: list[int], *, older: bool
    ) -> tuple[list[int], Envelope, HealthyValues]:
        """Looks for a snapshot since which something new is unusual. Collective.

        The newest sound snapshot may already have a part of the trouble: a number that has left its
        range before it, or a rate.

        Args:
            trouble: the trouble.
            steps: steps of the snapshots, the best first.
            older: whether to look at older snapshots too. Else they are there in case that the
                first one is damaged.

        Returns:
            The steps from this snapshot on, or all; what was unusual; and what was known as healthy
            at the first of the steps.
        """
        run, records = self.run, self.run.way_back.records()
        among = run.witness.better_steps(trouble) or steps
        live = run.record.healthy
        known = {step: live.with_better(each.healthy) for step, each in records.items()}
        found, looked_at = Envelope(), steps[:1]
        if older:
            looked_at = steps
        looked_at = [step for step in looked_at if step in among and step in known]
        for step in looked_at:
            found = run.holding.outside(trouble, step, known[step]).beyond(run.holding.envelope)
            if found:
                steps = steps[steps.index(step) :]
                break
        # An unusual norm may be a symptom of the rate, so it does not end the search for one.
        if trouble.cause is TroubleCause.BETTER_WEIGHTS and not (found.numbers or found.left_out):
            for step in looked_at:
                is_higher = run.holding.rate_fact(trouble, step, known[step]) is RateFact.HIGHER
                if step in steps and is_higher:
                    return steps[steps.index(step) :], found, known[step]
        return steps, found, known.get(steps[0], live)

    def _facts(
        self,
        trouble: Trouble,
        tries: Sequence[RollbackRecord],
        step: int,
        outside: Envelope,
        known: HealthyValues,
    ) -> Facts:
        """What the table reads besides the trouble and the tries."""
        run, policy = self.run, self.run.policy
        limits = policy.engine.scales_lr
        if trouble.is_asked_for or not trouble.finite:
            limits = policy.may_limit_lr
        cuts = [policy.budget.lr_cuts - sum(each.limits_rate for each in tries)]
        cuts += [each["state"]["budget"]["lr_cuts"] for each in run.driver.engines().values()]
        left = math.inf
        if trouble.is_in_budget and not trouble.exact:  # each of these follows another try
            left = max(policy.budget.recoveries, 1) - self._spent(trouble)
        return Facts(
            now=run.holding.envelope,
            outside=outside,
            snapshot=step,
            from_start=step <= run.record.first_step,
            rate=run.holding.rate_fact(trouble, step, known),
            lr_cuts=int(min(cuts)) if limits else 0,
            rollbacks_left=left,
            repeats_batches=self.repeats_batches,
            accepted=run.ledger.accepted,
        )

    @property
    def _reach(self) -> int:
        """Steps within which the budget of the policy counts rollbacks.

        The engine's budget does not limit the rollbacks for one trouble: healthy repeated steps
        refund it, and rollbacks by a hook do not use it.
        """
        return max(self.run.policy.budget.refund_after, 1)

    def _spent(self, trouble: Trouble) -> int:
        """Number of rollbacks within reach that count for a trouble, without those for the loss.

        A rollback for arrays that no loss reads says nothing about a later trouble.
        """
        ledger, count = self.run.ledger, 0
        for each in ledger.same_trouble(trouble.onset, self._reach):
            counts = each.trouble.is_in_budget and not each.trouble.exact
            count += counts and (trouble.finite or not each.trouble.finite)
        if trouble.onset <= self.run.record.first_step + self._reach:
            count += ledger.spent  # by a run in another framework, whose engine was ported
        return count

    def _restore(
        self, trouble: Trouble, chosen: Remedy, steps: Sequence[int], index: int
    ) -> RollbackRecord | None:
        """Restores a snapshot, reports the rollback, and forgets the undone steps.

        Args:
            trouble: the trouble.
            chosen: what is held when the steps are repeated.
            steps: steps of the snapshots to try, the best first.
            index: the newest step.

        Returns:
            The rollback. None if no snapshot is usable and the weights can be kept: then the run
            continues.

        Raises:
            RunStopped: no snapshot is usable, and the weights are damaged.
        """
        run = self.run
        if trouble.batches and not trouble.exact:
            # Unread steps belong to the trouble up to their last alarm.
            unread = run.dispatch_queue.peek_all()
            until = max((place for place, step in enumerate(unread, 1) if step.causes), default=0)
            batches = tuple(each for step in unread[:until] for each in step.batches)
            more = chosen.envelope.joined(Envelope(left_out=batches))
            chosen = replace(chosen, envelope=more)
        try:
            done = run.way_back.roll_back(trouble, chosen, steps)
        except StoreError as error:
            return self._without_snapshot(trouble, error)
        reports.report_rollback(run, done, index)
        return done

    def _without_snapshot(self, trouble: Trouble, error: StoreError) -> None:
        """Continues where no snapshot can be restored and the weights can be kept, or stops.

        After an error other than these two, the live state may have changed in part.
        """
        run = self.run
        may_continue = isinstance(error, NoGoodCheckpoint | StateMismatch)
        if may_continue and not trouble.finite:
            may_continue = run.nonfinite_recovery.weights_are_finite()
        if not may_continue:
            run.stopping.stop(str(error), onset=trouble.onset)
        why = reports.reason_of(trouble)
        if why not in self._said:
            self._said.add(why)
            problem = f"{why}, but {error}; the run continues without a rollback"
            run.log.problem(run.progress.step, problem)
        if trouble.cause is TroubleCause.BETTER_WEIGHTS and trouble.finite:
            why = "no checkpoint could be restored"
            self._keep_damage(trouble, run.progress.step - 1, "nothing", why)
            run.witness.pause_until(run.progress.step + 1)

    def _accept(
        self,
        trouble: Trouble,
        tries: Sequence[RollbackRecord],
        chosen: Remedy,
        index: int,
    ) -> RollbackRecord | None:
        """Accepts the program's own way. No later rollback is for this trouble.

        The tries are undone by a last rollback if they have held anything: the repeat differs
        without it. Otherwise the run continues where it is.
        """
        run, cause = self.run, trouble.cause
        if any(each.accepts for each in tries):
            return None  # it was accepted before
        if cause is TroubleCause.STATE:
            # A batch that was left out for the arrays stays left out: to read it again, the run
            # would have to repeat its steps once more.
            run.record.nonfinite_ok += trouble.arrays
            run.store.nonfinite_ok += trouble.arrays
            if tries:
                why = "again after a rollback"
            else:
                why = "and no rollback is left"
            run.log.problem(
                run.progress.step,
                f"{first_of(trouble.arrays)} became NaN or Inf {why}. The run continues, and NaN "
                "and Inf are allowed in them from now on, as with nonfinite_ok",
            )
            return None
        until = run.progress.step + 1
        run.ledger.accepted += cause is TroubleCause.BETTER_WEIGHTS
        if cause is not TroubleCause.NO_FINITE_STEP:
            run.ledger.accepted_until = until
            self._keep_damage(trouble, index, cause, reports.why_accepted(trouble, len(tries)))
        done = None
        if any(each.holds for each in tries):
            oldest = min(each.checkpoint for each in tries)
            done = self._restore(trouble, chosen, [oldest], index)
            if done is None:
                run.holding.hold(chosen.envelope, until)
        run.witness.pause_until(until)
        return done

    def _keep_damage(self, trouble: Trouble, index: int, by: str, why: str) -> None:
        """Notes damage that the weights keep."""
        log = self.run.log
        self.run.ledger.keep_damage(trouble.onset)
        log.assessment(
            index,
            trouble.onset,
            "accepted",
            by,
            say=log.warning if by == TroubleCause.BETTER_WEIGHTS else None,
            checkpoint=trouble.better_step,
            loss_before=trouble.loss_before,
            why=why,
        )
