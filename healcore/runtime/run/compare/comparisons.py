"""`Comparisons`: tests whether earlier weights are better than the current on the same batches.

A loss and a gradient norm do not distinguish a damaged model from different data. Two sets of
weights on the same batch do: a new term of the loss, another scale of the targets or a new task
changes both losses alike. So the current weights are compared with earlier weights (anchors) on the
batch of the step and on one batch trained on since the anchor. If the earlier weights are better on
both, at comparison after comparison, the run rolls back to them.

    observe(step)
        is there a reason to compare?      signs of `StepHistory`, `Credit`, best_on_average
        with which earlier weights?        to_compare
        what is the rise of the loss?      LossFunction.losses, rises.joined
        is it enough evidence?             Anchor.learn --> Verdict, at once or `due` later

docs/how-it-decides.md has the theorem and the limits of the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from healcore.runtime.driver import LossFn
from healcore.runtime.run.compare.evidence import (
    FIRST_PAUSE,
    FORWARD_PASS,
    RECENT,
    REGULAR_INTERVAL,
    Anchor,
    ComparisonState,
    Credit,
    ObservedBatch,
    TrainedStep,
    Verdict,
    best_on_average,
    newest_better,
    to_compare,
    with_new,
)
from healcore.runtime.run.compare.loss_function import LossFunction
from healcore.runtime.run.compare.rises import Rises, joined, rise_of
from healcore.runtime.run.compare.saved_form import (
    numbers_from_text,
    numbers_to_text,
    pack_batches,
    unpack_batches,
)
from healcore.runtime.run.compare.step_history import (
    STEPS_AFTER_SIGN,
    WINDOWS,
    StepHistory,
)
from healcore.runtime.store.packed_values import PackedValues

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

MEDIAN_OF = 3
"""Past batches of a comparison while there is evidence. The median of their rises is steadier than
one of them, and bad batches in the sample do not rule it as they rule a mean."""
RESTART_POWER = 0.5
"""A pending verdict starts again with `threshold ** RESTART_POWER` of evidence: 100 of 10,000."""


class Comparisons:
    """Compares the weights with earlier weights, and returns a verdict if the earlier are better.

    Several ranks call the same methods with the same steps, compare their own batches and decide
    by the mean. Comparisons are collective, so they depend only on values that are equal on all
    ranks: reduced losses and alarms. None of them depends on the clock.

    Args:
        run: the parts of the run.
        loss_fn: the user's function, or None to compare nothing.
        loss_fn_cost: cost of one call of `loss_fn` on a batch, in training steps.
    """

    def __init__(
        self,
        run: Run,
        loss_fn: LossFn | None,
        *,
        loss_fn_cost: float = FORWARD_PASS,
    ) -> None:
        self.state = ComparisonState()
        """What a checkpoint holds."""
        self.steps_are_windows = False
        """Whether each step ends an accumulation. The next accumulation may have begun."""
        self.loss_function = LossFunction(run, loss_fn)
        self.run = run
        self._threshold = run.policy.rollback.evidence
        self._strong = self._threshold**RESTART_POWER
        """Evidence that is enough where a run cannot wait for `_threshold`."""
        self.history = StepHistory()
        self._credit = Credit(loss_fn_cost)
        self._wanted = False
        """Whether a step of the current dispatch gives a reason to compare."""
        if self.is_enabled:
            run.driver.watch_numbers()
        self._dispatch_losses: list[float] = []
        """Losses of the steps of the current dispatch."""
        self._expected: Verdict | None = None
        """The verdict whose rollback is about to begin, or None."""

    @property
    def is_enabled(self) -> bool:
        """Whether weights are compared, which requires a `loss_fn`.

        A `loss_fn` that fails is dropped, so the value may become False during a run. Then nothing
        is compared or held any more.
        """
        return self.loss_function.function is not None

    @property
    def anchors(self) -> list[Anchor]:
        """The earlier weights, see `ComparisonState`."""
        return self.state.anchors

    @property
    def steps_needed(self) -> frozenset[int]:
        """Steps of the checkpoints that a rollback may need.

        They are the checkpoints of the anchors. While a number of an optimizer is held, the
        checkpoint from before the program set the number is among them too, see
        `HeldNumber.before`. `Saver` and `Deleter` keep them.
        """
        steps = [anchor.step for anchor in self.anchors]
        for number in self.run.holding.held.numbers.values():
            steps.append(number.last_step_before)
        return frozenset(steps)

    @property
    def has_evidence(self) -> bool:
        """Whether an anchor has evidence, or a verdict is pending.

        While this is true, no anchor is added and nothing is learnt as healthy: the current weights
        may be the damaged ones.
        """
        return self.state.verdict is not None or any(anchor.evidence > 1 for anchor in self.anchors)

    def forget_unsaved_anchor(self, step: int) -> None:
        """Drops the anchor of a step whose checkpoint could not be saved.

        A verdict about it could not be carried out, because a rollback restores the checkpoint and
        not the anchor.

        Args:
            step: step of the checkpoint.
        """
        self.state.anchors = [anchor for anchor in self.anchors if anchor.step != step]

    def add_anchor(self, step: int, restorable: Container[int]) -> None:
        """Adds the current weights as an anchor, unless they are suspect.

        Args:
            step: steps done; its checkpoint is about to be saved, or was resumed.
            restorable: steps of the checkpoints. An anchor of any other step is dropped, because no
                rollback could restore its place in the run.
        """
        if self.is_enabled and self._dispatch_losses and not self.loss_function.is_checked:
            self.loss_function.function = None
            self.anchors.clear()
            why = "no step had a batch for loss_fn: use healer.batches, or healer.loss(batch)"
            self.run.log.problem(step, f"{why} (in JAX healer.update(state, batch=batch))")
        if not self.is_enabled:
            self.run.holding.release_all(step)
            return
        if self.has_evidence or step < self.state.silent_until:
            return
        if self.run.holding.learn(step):
            return
        self.state.anchors = [anchor for anchor in self.anchors if anchor.step in restorable]
        if step not in restorable or self.anchor_of(step) is not None:
            return
        level = self.history.mean()
        spread = 0.0 if level is None else self.history.spread()
        new = Anchor(step, level=level, spread=spread, healthy=self.state.ranges.values)
        new.weights = self.run.driver.copy_weights()
        self.state.anchors = with_new(self.anchors, new)

    def observe(
        self, step: TrainedStep, loss: float, *, alarm: bool, trained: bool
    ) -> Verdict | None:
        """Compares weights after a step if there is a reason.

        The reasons: an alarm; a loss above each of the last `REGULAR_INTERVAL` losses; an unusual
        gradient norm; the end of a burst of these; a mean loss that exceeds the best anchor's by
        more than its spread; a regular step.

        Args:
            step: the step and its batches. In a dispatch of several steps the last step has the
                batches of all steps, and the others have none.
            loss: the step's training loss, the mean over its batches and over all ranks; or NaN.
            alarm: whether a detector has raised an alarm.
            trained: whether the step was not skipped.

        Returns:
            A verdict if the run has to roll back, or None.
        """
        if not self.is_enabled:
            return None
        state, index = self.state, step.index
        self._credit.after_step()
        if len(state.first_losses) < RECENT and math.isfinite(loss):
            state.first_losses.append(loss)
        signs = self.history.add(step, loss, alarm=alarm, healthy=not self.has_evidence)
        if signs.high:
            _extend_bursts(state.bursts, index)
        if signs.first_alarm or signs.last_is_over:  # compared even if no credit is left
            self._credit.left = max(self._credit.left, 1.0)
        best = self._best_on_average(index)
        self._wanted |= (
            signs.sign or signs.last_is_over or self._credit.is_regular(index) or best is not None
        )
        self._dispatch_losses.append(loss)
        if not step.batches:
            return None
        losses, self._dispatch_losses = self._dispatch_losses, []
        if not self.loss_function.is_checked:
            self._learn_first_step(step, losses)
        if recurred := self._recurred(index):
            return recurred
        wanted, self._wanted = self._wanted and self._credit.left > 0, False
        if state.verdict is not None:
            wanted = index >= state.verdict.due
            best = None
        else:
            wanted = index >= self.state.silent_until and (wanted or self.has_evidence)
        verdict = self._compare(step, sum(losses) / len(losses), best) if wanted else None
        if wanted and self._credit.is_regular(index) and not self.has_evidence:
            self.history.accept_level()
        if wanted and best is not None and best.evidence <= 1:
            self.state.mean_quiet_until = index + self.state.pause
            self.state.pause = min(REGULAR_INTERVAL, 2 * self.state.pause)
        elif best is None and index > self.state.mean_quiet_until:
            self.state.pause = FIRST_PAUSE
        if trained:
            for anchor in self.anchors:
                anchor.add(step, is_usual=not signs.high and not self.has_evidence)
        return verdict

    def _learn_first_step(self, step: TrainedStep, losses: Sequence[float]) -> None:
        """Checks the `loss_fn` on the first step with batches, and `losses` of its dispatch."""
        first = self.anchor_of(step.index)
        single = losses[0] if len(losses) == 1 else math.nan
        self.loss_function.learn_first_step(step, single, first and first.weights)
        if not self.is_enabled:
            self.anchors.clear()

    def pending_verdict(self, index: int) -> Verdict | None:
        """The verdict that waits to see whether the run recovers, or None if no verdict waits.

        Args:
            index: step at which the run would roll back now. It replaces the step of the verdict.
        """
        if self.state.verdict is None:
            return None
        return self.state.verdict._replace(index=index)

    def suspicion(self, index: int, *, at_end: bool = False) -> Verdict | None:
        """The pending verdict, or one about an anchor with `RESTART_POWER` of the threshold.

        For a run that cannot wait for more evidence: at the end of the data, or if no step is
        finite any more. A verdict costs the repeat of some steps, the wait would cost the result.

        Args:
            index: the newest step.
            at_end: whether any evidence is enough, for a question that `decide_at_end` answers.
        """
        if not self.is_enabled:
            return None
        if self.state.verdict is not None:
            return self.pending_verdict(index)
        newest = None
        for anchor in self.anchors:
            is_strong = anchor.evidence >= self._strong
            if is_strong or (at_end and anchor.evidence > 1):
                newest = anchor
        if newest is None or self._has_learnt_since(newest):
            return None
        return self._verdict(index, newest, Rises(0))

    def decide_at_end(self, index: int) -> Verdict | None:
        """Decides about a suspicion at the end of the run, after which no step can be compared.

        Any evidence is enough for the question, because the batches kept of usual steps answer it
        at once. They count one by one: a bad batch among them would rule their mean.

        Args:
            index: steps done.

        Returns:
            The verdict with `index`, if the anchor's loss is lower on most of the kept batches, and
            on all of them where `suspicion` alone has not enough evidence.
        """
        strong = self.suspicion(index)
        verdict = strong
        if verdict is None:
            verdict = self.suspicion(index, at_end=True)
        if verdict is None:
            return None
        anchor = self.anchor_of(verdict.anchor)
        if anchor is None:
            return None
        losses = self.losses_of(anchor.usual or anchor.sample, anchor)
        if losses is None:
            return None
        better = [rise_of(now, then) > 0 for now, then in zip(*losses, strict=True)]
        is_better = bool(better) and all(better)
        if strong is not None:
            is_better = 2 * sum(better) > len(better)
        return verdict if is_better else None

    def on_rollback(self, target: int) -> None:
        """Drops all evidence, and the anchors and samples from step `target` on.

        The steps are repeated, so that their losses and samples would count twice. What was healthy
        is taken from the newest anchor that is left.

        Args:
            target: the step at which the run continues.
        """
        self.state.repeated, self._expected = self._expected, None
        self.state.anchors = [anchor for anchor in self.anchors if anchor.step <= target]
        for anchor in self.anchors:
            anchor.rewind(target)
        ranges = self.state.ranges
        if self.anchors:
            ranges.values = ranges.values.with_better(self.anchors[-1].healthy)
        self._forget_trouble()
        self.history.forget(ranges.values.norms)
        self.run.holding.on_rollback(target)

    def pause_until(self, step: int) -> None:
        """Drops anchors and losses, and compares and copies no weights before `step`.

        Called after a change that was accepted: earlier weights are better by the old measure, and
        would lead to the same verdict again.

        Args:
            step: first step at which weights may be compared. A later step of an earlier call
                stays.
        """
        self.state.silent_until = max(self.state.silent_until, step)
        self.state.repeated = self._expected = None
        self.anchors.clear()
        self._forget_trouble()
        self.history.forget()

    def on_structure_change(self) -> None:
        """Drops all anchors and the evidence, because the program has changed its model.

        Parameters that are new, gone or resized cannot be compared. The rest alone is not a
        measure: old layers work together with the old other layers only. The losses stay, so that
        damage soon after the change is a reason to compare. What was learnt about the numbers and
        rates of the optimizers stays too, because a new group has new names.
        """
        self.state.repeated = self._expected = None
        self.anchors.clear()
        self._forget_trouble()

    def expect_again(self, verdict: Verdict) -> None:
        """Keeps a verdict, to recognise its trouble in the repeat. Called before its rollback.

        If the repeated steps have the same losses bit for bit, the program itself causes the
        trouble. The verdict is then found at once, without comparing weights until the evidence is
        strong again.

        Args:
            verdict: the verdict whose rollback is about to begin.
        """
        self._expected = verdict._replace(recurred=False)

    def _recurred(self, index: int) -> Verdict | None:
        """The verdict of the last rollback, if the losses of its repeat are the same up to it."""
        repeated = self.state.repeated
        if repeated is None or index < repeated.found:
            return None
        self.state.repeated = None
        if index > repeated.found or self.history.digest(repeated.anchor) != repeated.losses:
            return None
        if self.anchor_of(repeated.anchor) is None:
            return None
        return repeated._replace(index=index, recurred=True)

    def about_older_weights(self, verdict: Verdict) -> Iterator[Verdict]:
        """The same verdict about each older anchor that is better too, the newest first.

        The newest better weights may already have a part of the trouble, such as a number that the
        program has set before their checkpoint and that shows its effect after it.

        Args:
            verdict: the verdict about the newest better weights.

        Yields:
            The verdict with the step of an older anchor, and otherwise unchanged.
        """
        for anchor in reversed(self.anchors):
            if anchor.step < verdict.anchor and anchor.evidence >= self._strong:
                yield verdict._replace(anchor=anchor.step)

    # -- checkpoints and restarts ---------------------------------------------------------------

    def to_save(self) -> ComparisonState:
        """The state of the comparisons for a checkpoint's record.

        A restart that lost it would compare with other weights than the run that was not killed,
        and would answer known trouble as new.

        Returns:
            A copy of `state`. It has no batches, see `batches_to_save`, and anchors hold no sampled
            steps but only
            the numbers of these steps.
        """
        return replace(
            self.state,
            anchors=[anchor.to_save() for anchor in self.anchors],
            gives_loss=self.loss_function.gives_loss,
            credit=self._credit.left,
            history=self.history.to_text(),
            numbers=numbers_to_text(self.run.holding.numbers()),
        )

    def batches_to_save(self) -> PackedValues | None:
        """The batches of the steps that a later comparison may evaluate, by step.

        Returns:
            The batches; `pack_batches` says which batches are missing. None without comparisons.
        """
        if not self.is_enabled:
            return None
        steps: list[TrainedStep] = []
        for anchor in self.anchors:
            steps += [*anchor.sample, *anchor.usual]
        return pack_batches([*steps, *self.history.steps_with_batches()])

    def continue_from(
        self,
        saved: ComparisonState,
        weights: Mapping[int, Any],
        *,
        step: int,
        batches: Mapping[int, Any] | None = None,
    ) -> None:
        """Continues an earlier process at a checkpoint, and holds what is held from there on.

        Args:
            saved: what the checkpoint holds.
            weights: copies of weights, by the step of their checkpoint. An anchor without weights
                is dropped, and with it a verdict about it.
            step: step of the checkpoint.
            batches: the values that `batches_to_save` has packed for this checkpoint, or None.
        """
        verdict = saved.verdict
        if verdict is not None and verdict.anchor not in weights:
            verdict = None
        anchors = [anchor for anchor in saved.anchors if anchor.step in weights]
        self.state = replace(saved, anchors=anchors, verdict=verdict)
        self.history.forget(self.state.ranges.values.norms)
        holding = self.run.holding
        self.history.norm_limits = holding.held.norm_limits
        observed: dict[int, tuple[ObservedBatch, ...]] = {}
        if self.is_enabled and batches is not None:
            observed = unpack_batches(batches)
        steps = {index: TrainedStep(index, each) for index, each in observed.items()}
        if saved.history:
            steps |= self.history.restore(saved.history, observed)
        steps = {index: each for index, each in steps.items() if each.batches}
        for anchor in anchors:
            anchor.weights = weights[anchor.step]
            anchor.restore_samples(steps)
        self.loss_function.gives_loss |= saved.gives_loss
        if saved.credit is not None:
            self._credit.left = saved.credit
        if self.is_enabled:  # without a `loss_fn` nothing is held, nor released
            holding.hold(holding.held, step)
        if saved.numbers and self.run.driver.state_is_in_place:
            holding.continue_numbers(numbers_from_text(saved.numbers))

    def anchor_of(self, step: int) -> Anchor | None:
        """The anchor of a step, or None if its weights are not kept.

        Args:
            step: step of the checkpoint at which the weights were copied.

        Returns:
            The anchor, which `state.anchors` holds too.
        """
        for anchor in self.anchors:
            if anchor.step == step:
                return anchor
        return None

    def _forget_trouble(self) -> None:
        """Forgets a suspicion and its verdict. The credit is refilled for the next one."""
        self.state.verdict = None
        self.state.intended = {}
        self.state.rates.clear()
        self.state.bursts.clear()
        self._credit.refill()
        self._dispatch_losses.clear()

    def _best_on_average(self, index: int) -> Anchor | None:
        """`anchors.best_on_average`; None for some steps after such a comparison without evidence.

        See `FIRST_PAUSE`.
        """
        if index < self.state.mean_quiet_until:
            return None
        mean = self.history.mean()
        if mean is None:
            return None
        return best_on_average(self.anchors, mean, index)

    def _eligible_anchors(self, index: int, best: Anchor | None = None) -> list[Anchor]:
        """`anchors.to_compare`. A pending verdict has its own anchor, the only one to compare."""
        verdict = self.state.verdict
        if verdict is not None:
            return [anchor for anchor in self.anchors if anchor.step == verdict.anchor]
        return to_compare(self.anchors, index, every=self.run.schedule.every, best=best)

    def _compare(self, step: TrainedStep, loss: float, best: Anchor | None) -> Verdict | None:
        """Compares with each eligible anchor. Returns a verdict if the run has to roll back now."""
        if not (self.steps_are_windows or self.run.driver.may_save(self.run.schedule.every)):
            return None  # within an accumulation: the weights have not changed since the last step
        evaluations = 0
        verdict = None
        loss_fn = self.loss_function
        known: list[float] | None = None  # losses of the step that need no evaluation
        if loss_fn.gives_loss and not loss_fn.draws and not math.isnan(loss):
            known = [loss]
        for anchor in self._eligible_anchors(step.index, best):
            compared = self._compare_with(anchor, step, known)
            if compared is None:
                return None
            evaluations += compared.evaluations
            if not math.isnan(compared.evidence):
                found = self._weigh(step.index, anchor, compared)
                if found is not None:
                    verdict = found
        if verdict is not None and step.index < verdict.due and not self._has_waited(verdict):
            self._postpone(verdict)
            verdict = None
        if self.has_evidence:
            rates = self.run.holding.known_rates()
            if rates:
                self.state.rates.append(rates)
        else:
            self.state.rates.clear()
        self._credit.charge(evaluations)
        return verdict

    def _compare_with(
        self, anchor: Anchor, step: TrainedStep, known: list[float] | None
    ) -> Rises | None:
        """Compares with one anchor, on the step and on a past step; returns None without losses."""
        losses = self.losses_of([step], anchor, known)
        if losses is None:
            return None
        [now], [then] = losses
        rise = rise_of(now, then)
        evaluations = 1 if known is not None else 2
        if not 0 < rise < math.inf:
            return Rises(evaluations, rise, now - then)
        past = anchor.draw(MEDIAN_OF if anchor.evidence > 1 else 1)
        if not past:  # no batch was trained on since the anchor
            return Rises(evaluations)
        losses = self.losses_of(past, anchor)
        if losses is None:
            return None
        pairs = [*zip(*losses, strict=True)]
        return joined(evaluations + 2 * len(past), (now, then), pairs)

    def _weigh(self, index: int, anchor: Anchor, compared: Rises) -> Verdict | None:
        """Updates an anchor's evidence. Returns a verdict if the evidence is sufficient."""
        anchor.learn(index, compared.evidence, is_retest=self.state.verdict is not None)
        if anchor.evidence >= self._threshold and self._has_learnt_since(anchor):
            anchor.evidence, anchor.onset = 1.0, None
        if anchor.evidence >= self._threshold:
            better = newest_better(self.anchors, anchor, self._strong)
            better.onset = anchor.onset
            return self._verdict(index, better, compared)
        if self.state.verdict is not None and anchor.evidence <= 1:
            onset = self.state.verdict.onset
            self.run.log.assessment(index, onset, "recovered")
            recovered = f"the run has recovered from the damage of step {onset}"
            self.run.log.info(f"step {index}: {recovered}")
            self._forget_trouble()
        return None

    def _has_learnt_since(self, anchor: Anchor) -> bool:
        """Whether the anchor is the start of the run, and the loss is lower now than it was then.

        A run that has learnt has not lost all of it. Where the comparison says so, it is no
        measure: in self-distillation, for example, the loss of the first weights is low.
        """
        first, mean = self.state.first_losses, self.history.mean()
        if anchor.step > self.run.record.first_step or mean is None or not first:
            return False
        return mean < sum(first) / len(first)

    def _has_waited(self, verdict: Verdict) -> bool:
        """Whether the run was rolled back for this trouble: it has had its time to recover."""
        return bool(self.run.ledger.same_trouble(verdict.onset))

    def _postpone(self, verdict: Verdict) -> None:
        """Keeps a verdict pending until its step `due`."""
        self.state.verdict = verdict
        for other in self.anchors:
            other.evidence, other.onset = 1.0, None
            if other.step == verdict.anchor:
                other.onset, other.evidence = verdict.onset, self._strong
        self.run.log.assessment(verdict.index, verdict.onset, "worse")
        self.run.log.warning(
            f"step {verdict.index}: the weights of step {verdict.anchor} are better on the same "
            f"batches, since step {verdict.onset}; unless the run recovers, it rolls back to them "
            f"at step {verdict.due}, or at the end of the data"
        )

    def _verdict(self, index: int, anchor: Anchor, compared: Rises) -> Verdict:
        """The verdict about an anchor, or the pending verdict with its newest evidence.

        The onset is the first step of a burst of signs that lasts until shortly before the first
        evidence: the comparison that finds trouble is later than its beginning.
        """
        verdict = self.state.verdict
        if verdict is None:
            onset = index if anchor.onset is None else anchor.onset
            for first, last in reversed(self.state.bursts):
                if last >= onset - STEPS_AFTER_SIGN:
                    onset = min(onset, first)
            verdict = Verdict(
                index=index,
                found=self.history.newest,  # at the end of the data, `index` has no step
                anchor=anchor.step,
                onset=max(onset, anchor.step),
                evidence=1.0,
                rise=None,
                rise_remembered=None,
                healthy_rates=self.run.holding.highest_rates(anchor.step),
                rates=tuple(self.state.rates),
                losses=self.history.digest(anchor.step),
            )
        return verdict._replace(
            index=index,
            evidence=anchor.evidence,
            rise=_finite_or_none(compared.rise),
            rise_remembered=_finite_or_none(compared.rise_remembered),
        )

    def losses_of(
        self, steps: Sequence[TrainedStep], anchor: Anchor, known: list[float] | None = None
    ) -> tuple[list[float], list[float]] | None:
        """`LossFunction.losses` of the current weights and an anchor's weights. Collective.

        Args:
            steps: the steps whose batches are evaluated.
            anchor: the earlier weights. It is dropped if the parameters have changed since.
            known: losses of the steps with the current weights, or None to evaluate these.

        Returns:
            Two lists with one loss per step, current and earlier weights; or None if the weights
            cannot be compared.
        """
        losses = self.loss_function.losses(steps, anchor.weights, known)
        if not self.is_enabled:
            self.anchors.clear()
        elif losses is None:  # the parameters have changed: the next checkpoint makes an anchor
            self.anchors.remove(anchor)
            if self.state.verdict is not None:
                self._forget_trouble()
        return losses


def _extend_bursts(bursts: list[tuple[int, int]], index: int) -> None:
    """Adds a high step to the newest burst, or begins another one."""
    if bursts and index - bursts[-1][1] <= STEPS_AFTER_SIGN:
        bursts[-1] = (bursts[-1][0], index)
    else:
        bursts.append((index, index))
        del bursts[:-WINDOWS]


def _finite_or_none(rise: float) -> float | None:
    """A rise for an event, which has no NaN and no Inf."""
    return rise if math.isfinite(rise) else None
