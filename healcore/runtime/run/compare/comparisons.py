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
        is it enough evidence?             Anchor.learn --> a Trouble, at once or later

`suspicion` draws what follows from the evidence. docs/how-it-decides.md has the theorem and the
limits of the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from healcore.core.decision import Cause
from healcore.core.step_record import Why
from healcore.runtime.run.compare.anchor_choice import (
    best_on_average,
    newest_better,
    to_compare,
    with_new,
)
from healcore.runtime.run.compare.comparison_state import ComparisonState
from healcore.runtime.run.compare.credit import Credit
from healcore.runtime.run.compare.evidence import RECENT, Anchor
from healcore.runtime.run.compare.loss_function import Losses, LossFn, LossFunction
from healcore.runtime.run.compare.rises import ROUNDING, Rises, joined, rise_of
from healcore.runtime.run.compare.step_history import Signs, StepHistory
from healcore.runtime.run.compare.suspicion import Suspicion
from healcore.runtime.run.compare.trained_step import TrainedStep
from healcore.runtime.run.compare.usual_values import LossLevel
from healcore.runtime.run.dispatch_queue import StepResult
from healcore.runtime.run.trouble import Trouble

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

_NOT_ABOUT_WEIGHTS = Cause.PLATEAU | Cause.OVERFIT
"""Causes that say nothing about damaged weights. Their alarms are no reason to compare weights."""
MEDIAN_OF = 3
"""Past batches of a comparison while there is evidence. The median of their rises is steadier than
a single rise, and bad batches in the sample do not dominate the median as they dominate a mean."""
MEAN_PAUSE = RECENT // 2
"""Steps for which a high mean loss is no reason to compare again, after a comparison because of it
has found no evidence. By then half of the losses of the mean are other losses. A mean loss stays
high for long where the data have become harder: without pauses such a run would compare at every
step."""


class Comparisons:
    """Compares the weights with earlier weights, and returns a verdict if the earlier are better.

    Several ranks call the same methods with the same steps, compare their own batches and decide
    by the mean. Comparisons are collective, so they depend only on values that are equal on all
    ranks: reduced losses and alarms. No comparison depends on the clock.

    It owns `anchors`, `first_losses` and `silent_until` of the `ComparisonState`.

    Args:
        run: the parts of the run. This class uses more than eight of them.
        loss_fn: the program's `loss_fn`, or None to compare nothing.
        loss_fn_cost: cost of one call of `loss_fn` on a batch, in training steps.

    Attributes:
        state: what a checkpoint holds. It lacks the facts "in a record", which `to_save` adds.
        history: losses, gradient norms and batches of the last steps.
        suspicion: the verdict that waits, and what dates the trouble.
        credit: number of evaluations that the run may make.
        loss_function: evaluates `loss_fn`.
    """

    def __init__(self, run: Run, loss_fn: LossFn | None, loss_fn_cost: float) -> None:
        self.run = run
        self.state = ComparisonState()
        self.history = StepHistory()
        self.credit = Credit(loss_fn_cost)
        self.loss_function = LossFunction(run, loss_fn)
        self.suspicion = Suspicion(run)
        self._has_reason = False
        """Whether a step of the current dispatch gives a reason to compare."""
        self._dispatch_losses: list[float] = []
        """Losses of the steps of the current dispatch."""

    @property
    def is_enabled(self) -> bool:
        """Whether weights are compared, which requires a `loss_fn`.

        A `loss_fn` that fails is dropped, so the value may become False during a run.
        """
        return self.loss_function.is_usable

    @property
    def anchors(self) -> list[Anchor]:
        """The earlier weights, see `ComparisonState`."""
        return self.state.anchors

    @property
    def steps_needed(self) -> frozenset[int]:
        """Steps of the checkpoints that a rollback may need.

        These are the checkpoints of the anchors. While a number of an optimizer is held, the
        restored checkpoint is needed too, in case that the number is intended. `Saver` keeps
        these checkpoints.
        """
        steps = [anchor.step for anchor in self.anchors]
        if self.run.record.envelope.numbers:
            in_force = self.run.ledger.in_force
            steps += [each.checkpoint for each in in_force if each.after.numbers]
        return frozenset(steps)

    @property
    def has_evidence(self) -> bool:
        """Whether an anchor has evidence, or a verdict is pending.

        While this is true, no anchor is added and nothing is learnt as healthy: the current weights
        may be the damaged ones.
        """
        return self.state.has_evidence

    def forget_unsaved_anchor(self, step: int) -> None:
        """Drops the anchor of a step whose checkpoint could not be saved.

        A verdict about this anchor could not be carried out, because a rollback restores the
        checkpoint and not the anchor.

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
        if self._dispatch_losses and self.loss_function.drop_if_unchecked(step):
            self.anchors.clear()
        if self.has_evidence or step < self.state.silent_until:
            return
        self.run.holding.learn(step)
        if not self.is_enabled:
            return
        self.state.anchors = [anchor for anchor in self.anchors if anchor.step in restorable]
        if step not in restorable or self.state.anchor_of(step) is not None:
            return
        level = self.history.level.mean()
        spread = 0.0
        if level is not None:
            spread = self.history.level.spread()
        new = Anchor(step, level=level, spread=spread)
        new.weights = self.run.driver.copy_weights()
        self.state.anchors = with_new(self.anchors, new)

    def observe_result(self, result: StepResult) -> Trouble | None:
        """`observe` for a step as the host reads it. Its records are joined into one step.

        Args:
            result: the newest step that was read. A step that kept its old state, or whose loss was
                not finite, counts as a loss of NaN.

        Returns:
            A verdict if the run has to roll back, or None.
        """
        if not self.is_enabled:
            return None
        records = result.records
        keeps_state = result.why == Why.STATE_KEPT
        if not (keeps_state or any(each.judged for each in records)):
            return None  # a micro-step of an accumulation, or an overflow at a loss scale
        loss = math.nan
        if not keeps_state and not any(each.cause & Cause.NONFINITE_LOSS for each in records):
            loss = sum(each.loss for each in records) / len(records)
        norms: dict[str, float] = {}
        rates: dict[str, float] = {}
        for each in records:
            if each.judged:
                norms[each.engine] = max(each.grad_norm, norms.get(each.engine, 0.0))
            rate = each.trained_rate
            if rate is not None:
                rates[each.engine] = max(rate, rates.get(each.engine, 0.0))
        return self.observe(
            TrainedStep(result.index, result.contents, norms, rates),
            loss,
            alarm=keeps_state or any(each.cause & ~_NOT_ABOUT_WEIGHTS for each in records),
            taken=result.taken,
        )

    def observe(
        self, trained: TrainedStep, loss: float, *, alarm: bool, taken: bool
    ) -> Trouble | None:
        """Compares weights after a step if there is a reason.

        The reasons are:

        - a sign of trouble: an alarm, a loss above each of the last `REGULAR_INTERVAL` losses, or
          an unusual gradient norm;
        - the end of a burst of signs;
        - a mean loss that exceeds the mean loss of the best anchor by more than its spread;
        - a regular step, see `Credit.is_regular`.

        Args:
            trained: the step and its batches. In a dispatch of several steps the last step has the
                batches of all steps, and the other steps have none.
            loss: the step's training loss, the mean over its batches and over all ranks; or NaN.
            alarm: whether a detector has raised an alarm.
            taken: whether the optimizer has stepped.

        Returns:
            A verdict if the run has to roll back, or None.
        """
        if not self.is_enabled:
            return None
        index = trained.index
        signs = self._note(trained, loss, alarm=alarm)
        best = self._best_on_average(index)
        if self._is_reason(index, signs, best):
            self._has_reason = True
        if not trained.batches:
            return None  # not the last step of its dispatch
        losses = self._dispatch_losses
        self._dispatch_losses = []
        if not self.loss_function.is_checked:
            self._learn_first_step(trained, losses)
        verdict = self._compare_if_due(trained, sum(losses) / len(losses), best)
        if taken:
            is_usual = not signs.high and not self.has_evidence
            for anchor in self.anchors:
                anchor.add(trained, is_usual=is_usual)
        return verdict

    def _note(self, trained: TrainedStep, loss: float, *, alarm: bool) -> Signs:
        """Adds a step to the history, and its credit. Returns the signs of the step."""
        first_losses = self.state.first_losses
        if len(first_losses) < RECENT and math.isfinite(loss):
            first_losses.append(loss)
        self._dispatch_losses.append(loss)
        self.credit.after_step()
        signs = self.history.add(
            trained,
            loss,
            alarm=alarm,
            healthy=not self.has_evidence,
            norm_limits=self.run.record.envelope.norm_limits,
        )
        if signs.high:
            self.suspicion.add_high_step(trained.index)
        if signs.first_alarm or signs.last_is_over:
            self.credit.allow_one()
        return signs

    def _is_reason(self, index: int, signs: Signs, best: Anchor | None) -> bool:
        """Whether a step is a reason to compare weights at the end of its dispatch."""
        if signs.sign or signs.last_is_over:
            return True
        return best is not None or self.credit.is_regular(index)

    def _compare_if_due(
        self, trained: TrainedStep, loss: float, best: Anchor | None
    ) -> Trouble | None:
        """Compares weights at the last step of a dispatch, if this is due.

        Args:
            trained: the step, with the batches of its dispatch.
            loss: mean loss of the dispatch.
            best: the anchor that a high mean loss gives as a reason, or None.

        Returns:
            A verdict if the run has to roll back, or None.
        """
        index = trained.index
        is_due = self._is_due(index)
        if self.state.verdict is not None:
            best = None  # only the anchor of the verdict is compared
        verdict = None
        if is_due:
            verdict = self._compare(trained, loss, best)
            if self.credit.is_regular(index) and not self.has_evidence:
                self.history.level.accept()
            if best is not None and best.evidence <= 1:
                self.state.mean_quiet_until = index + MEAN_PAUSE
        return verdict

    def _is_due(self, index: int) -> bool:
        """Whether weights are compared at the last step of a dispatch."""
        has_reason = self._has_reason and self.credit.left > 0
        self._has_reason = False
        verdict = self.state.verdict
        if verdict is not None:  # the run may recover until then
            return index >= verdict.recovers_until
        return index >= self.state.silent_until and (has_reason or self.has_evidence)

    def _learn_first_step(self, trained: TrainedStep, losses: Sequence[float]) -> None:
        """Checks the `loss_fn` on the first step with batches, and `losses` of its dispatch."""
        first = self.state.anchor_of(trained.index)
        single = math.nan
        if len(losses) == 1:
            single = losses[0]
        weights = None
        if first is not None:
            weights = first.weights
        self.loss_function.learn_first_step(trained, single, weights)
        if not self.is_enabled:
            self.anchors.clear()

    def pause_until(self, step: int) -> None:
        """Drops anchors and losses, and compares and copies no weights before `step`.

        Called after a change that was accepted. Earlier weights are better by the old measure, and
        would lead to the same verdict again.

        Args:
            step: first step at which weights may be compared. A later step of an earlier call
                stays.
        """
        self.state.silent_until = max(self.state.silent_until, step)
        self.anchors.clear()
        self.forget_trouble()
        self.history.forget()

    def on_structure_change(self) -> None:
        """Drops all anchors and the evidence, because the program has changed its model.

        Parameters that are new, removed or resized cannot be compared. The other parameters alone
        are not a measure, because old layers work only with the other old layers. The losses stay,
        so that damage soon after the change is a reason to compare. The healthy ranges of the
        optimizers' numbers and rates stay too, because a new group has new names.
        """
        self.anchors.clear()
        self.forget_trouble()

    def better_steps(self, trouble: Trouble) -> list[int]:
        """Steps of the weights that are better at a trouble, newest first; empty if none was found.

        The newest better weights may already have a part of the trouble, such as a number that the
        program has set before their checkpoint and that shows its effect after it.

        Args:
            trouble: the trouble.
        """
        newest = trouble.better_step
        if newest is None:
            return []
        steps = [newest]
        for anchor in reversed(self.anchors):
            if anchor.step < newest and anchor.evidence >= self.suspicion.strong_evidence:
                steps.append(anchor.step)
        return steps

    # -- checkpoints and restarts ---------------------------------------------------------------

    def to_save(self) -> ComparisonState:
        """The state of the comparisons for a checkpoint's record.

        A restart without this state would answer known trouble as new.

        Returns:
            A copy of `state` with the facts "in a record".
        """
        level = self.history.level
        return replace(
            self.state,
            gives_loss=self.loss_function.gives_loss,
            credit=self.credit.left,
            usual=[*level.usual.values],
            recent=[*level.recent],
        )

    def continue_from(
        self, saved: ComparisonState | None, step: int, weights: Mapping[int, Any] = {}
    ) -> None:
        """Continues from what a checkpoint knows, at a start and at a rollback.

        An anchor whose weights are known no longer is dropped.

        Args:
            saved: the state in the checkpoint, or None if it has none.
            step: step of the checkpoint.
            weights: step -> weights of that step, besides the weights of the present anchors.
        """
        saved = saved or ComparisonState()
        present = {anchor.step: anchor for anchor in self.anchors}
        anchors = []
        for anchor in saved.anchors:
            if anchor.step in weights:
                anchor.weights = weights[anchor.step]
            elif anchor.step in present:
                anchor.take_samples(present[anchor.step], before=step)
            else:
                continue
            anchors.append(anchor)
        known = [anchor.step for anchor in anchors]
        verdict = saved.verdict
        if verdict is not None and verdict.better_step not in known:
            verdict = None
        self.state = replace(saved, anchors=anchors, verdict=verdict)
        self.loss_function.gives_loss |= saved.gives_loss
        if saved.credit is not None:
            self.credit.left = saved.credit
        self._dispatch_losses.clear()
        self.history.forget(self.run.record.healthy.norms)
        self.history.level = LossLevel(saved.usual, saved.recent)
        accepted_until = self.run.ledger.accepted_until
        if step < accepted_until:
            self.pause_until(accepted_until)

    def forget_trouble(self) -> None:
        """Forgets the suspicion, its verdict, and the losses of the current dispatch.

        The credit is refilled for the next suspicion.
        """
        self.state.verdict = None
        self.state.bursts.clear()
        self.credit.refill()
        self._dispatch_losses.clear()

    def _best_on_average(self, index: int) -> Anchor | None:
        """`anchor_choice.best_on_average`, or None during a pause, see `MEAN_PAUSE`."""
        mean = self.history.level.mean()
        if mean is None or index < self.state.mean_quiet_until:
            return None
        return best_on_average(self.anchors, mean, index)

    def _eligible_anchors(self, index: int, best: Anchor | None = None) -> list[Anchor]:
        """`anchor_choice.to_compare`, or only the anchor of a pending verdict."""
        verdict = self.state.verdict
        if verdict is not None:
            return [anchor for anchor in self.anchors if anchor.step == verdict.better_step]
        return to_compare(self.anchors, index, every=self.run.schedule.every, best=best)

    def _compare(self, trained: TrainedStep, loss: float, best: Anchor | None) -> Trouble | None:
        """Compares with each eligible anchor.

        Args:
            trained: the step, with the batches of its dispatch.
            loss: mean training loss of the dispatch. It is the loss of the current weights, if
                `loss_fn` gives the training loss.
            best: an anchor to compare with at any age, or None.

        Returns:
            A verdict if the run has to roll back now, or None.
        """
        # If each step ends an accumulation, the next one may have begun, and the weights can be
        # compared all the same. Within one the weights have not changed since the last step.
        if not (
            self.run.journal.has_micro_steps or self.run.driver.may_save(self.run.schedule.every)
        ):
            return None
        evaluations = 0
        verdict = None
        loss_fn = self.loss_function
        known: list[float] | None = None  # losses of the step that need no evaluation
        if loss_fn.gives_loss and not loss_fn.draws and not math.isnan(loss):
            known = [loss]
        for anchor in self._eligible_anchors(trained.index, best):
            compared = self._compare_with(anchor, trained, known)
            if compared is None:
                if not self.is_enabled:
                    return None  # without a `loss_fn` nothing can test a verdict again
                continue  # only this anchor is of other parameters
            evaluations += compared.evaluations
            if not math.isnan(compared.evidence):
                found = self._weigh(trained.index, anchor, compared)
                if found is not None:
                    verdict = found
        if verdict is not None and self.state.anchor_of(verdict.better_step) is None:
            verdict = None  # its anchor was dropped after it was found
        if verdict is not None and not self.suspicion.has_waited(verdict, trained.index):
            self.suspicion.postpone(verdict, trained.index)
            verdict = None
        self.credit.charge(evaluations)
        return verdict

    def losses_of(
        self, steps: Sequence[TrainedStep], anchor: Anchor, known: list[float] | None = None
    ) -> Losses | None:
        """`LossFunction.losses` of the current weights and an anchor's weights. Collective.

        Args:
            steps: the steps whose batches are evaluated.
            anchor: the earlier weights. It is dropped if the parameters have changed since.
            known: losses of the steps with the current weights, or None to evaluate these.

        Returns:
            Two lists with one loss per step, current and earlier weights; or None if the weights
            cannot be compared.
        """
        state = self.state
        losses = self.loss_function.losses(steps, anchor.weights, known)
        if not self.is_enabled:
            state.anchors.clear()
        elif losses is None:  # the parameters have changed: the next checkpoint makes an anchor
            state.anchors.remove(anchor)
            if state.verdict is not None:
                self.forget_trouble()
        return losses

    def _compare_with(
        self, anchor: Anchor, trained: TrainedStep, known: list[float] | None
    ) -> Rises | None:
        """Compares with one anchor, on the batches of the step and then on past batches.

        The past batches are evaluated only if the loss of the step has risen: the smaller of the
        two rises counts.

        Args:
            anchor: the earlier weights.
            trained: the step, with its batches.
            known: loss of the step with the current weights, or None to evaluate it.

        Returns:
            What the comparison shows, or None if the weights cannot be compared.
        """
        losses = self.losses_of([trained], anchor, known)
        if losses is None:
            return None
        [now], [then] = losses
        rise = rise_of(now, then)
        evaluations = 2
        if known is not None:
            evaluations = 1
        if not 0 < rise < math.inf:  # not higher, or not finite: this batch alone decides
            return Rises(evaluations, rise, now - then)
        number = 1
        if anchor.evidence > 1:
            number = MEDIAN_OF
        past = anchor.draw(number)
        if not past:  # no batch was trained on since the anchor
            return Rises(evaluations)
        losses = self.losses_of(past, anchor)
        if losses is None:
            return None
        pairs = [*zip(*losses, strict=True)]
        same_losses = all(math.isclose(then, each, rel_tol=ROUNDING) for _, each in pairs)
        self.loss_function.note_comparison(same_losses=same_losses)
        return joined(evaluations + 2 * len(past), (now, then), pairs)

    def _weigh(self, index: int, anchor: Anchor, compared: Rises) -> Trouble | None:
        """Updates the evidence of an anchor, and concludes.

        Returns:
            A verdict if the evidence reaches the threshold, or None. If a verdict is pending and no
            evidence is left, the run has recovered and the verdict is forgotten.
        """
        anchor.learn(index, compared.evidence, is_retest=self.state.verdict is not None)
        threshold = self.suspicion.threshold
        if anchor.evidence >= threshold and self.suspicion.has_learnt_since(anchor):
            anchor.evidence, anchor.onset = 1.0, None
        if anchor.evidence >= threshold:
            better = newest_better(self.anchors, anchor, self.suspicion.strong_evidence)
            better.onset = anchor.onset
            return self.suspicion.verdict_about(index, better, compared)
        if self.state.verdict is not None and anchor.evidence <= 1:
            self.suspicion.report_recovery(index)
            self.forget_trouble()
        return None
