"""`Witness`: tests whether earlier weights are better than the current on the same batches.

A loss and a gradient norm do not distinguish a damaged model from different data. Two sets of
weights on the same batch do: a new term of the loss, another scale of the targets or a new task
changes both losses alike. So the current weights are compared with earlier weights (anchors) on the
batch of the step and on one batch trained on since the anchor. If the earlier weights are better on
both, at comparison after comparison, the run rolls back to them:

    no evidence
        | a comparison makes the evidence of an anchor > 1       Anchor.learn
        v
    evidence: no anchor is added, and nothing is learnt as healthy
        | the evidence reaches the threshold                     Witness._verdict
        v
    verdict: carried out at once if the run has had its time to recover
        | otherwise it waits until then                          Witness._postpone
        v
    pending verdict: nothing is compared before `recovers_until`, and then its anchor only
        |---> no evidence is left: the run has recovered
        | the evidence reaches the threshold again
        v
    the run goes back, or accepts the damage                     Recovery.go_back

docs/how-it-decides.md has the theorem and the limits of the comparison.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from healcore.core.decision import Cause
from healcore.core.step_record import Why
from healcore.runtime.driver import LossFn
from healcore.runtime.run.dispatch_queue import StepResult
from healcore.runtime.run.trouble import Trouble, TroubleCause
from healcore.runtime.run.witness.evidence import (
    MEDIAN_OF,
    RECENT,
    ROUNDING,
    SAMPLE_SIZE,
    Anchor,
    ComparisonState,
    TrainedStep,
    rise_of,
    to_compare,
    with_new,
)
from healcore.runtime.run.witness.loss_function import LossFunction
from healcore.runtime.run.witness.recent_steps import (
    REGULAR_INTERVAL,
    STEPS_AFTER_SIGN,
    RecentSteps,
)

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

_NOT_ABOUT_WEIGHTS = Cause.PLATEAU | Cause.OVERFIT
"""Causes that say nothing about damaged weights. Their alarms are no reason to compare weights."""
RESTART_POWER = 0.5
"""A pending verdict starts again with `threshold ** RESTART_POWER` of evidence: 100 of 10,000."""
MAX_SHARE = 0.01
"""Max share of a healthy run's work that comparisons may cost."""
STEP_COST = 3.0
"""Cost of a training step in evaluations: a forward pass, and a backward pass of twice its cost."""
FORWARD_PASS = 1 / STEP_COST
"""Cost of an evaluation in training steps, unless the user states another one."""
CREDIT_STEPS = 1000
"""A run can save up the evaluations that it earns in this number of steps. It starts with them,
because a learning rate that is too high shows in the first steps."""
MAX_DEBT = 40.0
"""Max debt of evaluations after a suspicion: ten comparisons, half of what a verdict needs."""
MEAN_PAUSE = RECENT // 2
"""Steps between two looks at the mean loss, after which half of its losses are other losses. A mean
loss stays high for long where the data have become harder."""
MAX_SAME_LOSSES = 3
"""Comparisons in a row with the same loss for different batches, after which a warning follows."""


class Witness:
    """Compares the weights with earlier weights, and returns a verdict if the earlier are better.

    Several ranks call the same methods with the same steps, compare their own batches and decide
    by the mean. Comparisons are collective, so they depend only on values that are equal on all
    ranks: reduced losses and alarms. No comparison depends on the clock.

    Comparisons may cost `MAX_SHARE` of the work of a healthy run. Each step earns a part of an
    evaluation. A run that has spent what it has earned compares only where a comparison cannot
    wait, and while there is evidence.

    Args:
        run: the parts of the run.
        loss_fn: the program's `loss_fn`, or None to compare nothing.
        loss_fn_cost: cost of one call of `loss_fn` on a batch, in training steps. It is not
            measured: the same program makes the same comparisons on any machine.

    Attributes:
        loss_function: evaluates `loss_fn`.
        recent: losses, gradient norms and batches of the last steps.
        threshold: evidence for a verdict, see `[rollback] evidence` of the policy.
        strong: evidence that is enough where a run cannot wait for the threshold.
    """

    def __init__(self, run: Run, loss_fn: LossFn | None, loss_fn_cost: float) -> None:
        self.run = run
        self.loss_function = LossFunction(run, loss_fn)
        self.recent = RecentSteps(run)
        self.threshold = run.policy.rollback.evidence
        self.strong = self.threshold**RESTART_POWER
        self._earned = MAX_SHARE / loss_fn_cost
        """Evaluations that a step earns."""
        self._most = CREDIT_STEPS * self._earned
        """Evaluations that may be spent before they are earned."""
        self._interval = REGULAR_INTERVAL * max(1, round(loss_fn_cost * STEP_COST))
        """Steps between two regular comparisons."""
        self._has_reason = False
        """Whether a step of the current dispatch gives a reason to compare."""
        self._same_losses = 0
        """Comparisons in a row whose batches have had the same loss."""

    @property
    def state(self) -> ComparisonState:
        """What a checkpoint holds. It is replaced at a way back."""
        return self.run.record.comparisons

    @property
    def is_enabled(self) -> bool:
        """Whether weights are compared, which requires a `loss_fn`.

        A `loss_fn` that fails is dropped, so the value may become False during a run.
        """
        return self.loss_function.function is not None

    # -- anchors --------------------------------------------------------------------------------

    @property
    def steps_needed(self) -> frozenset[int]:
        """Steps of the checkpoints that a rollback may need.

        These are the checkpoints of the anchors. While a number of an optimizer is held, the
        restored checkpoint is needed too, in case that the number is intended. `Saver` keeps these
        checkpoints.
        """
        steps = [anchor.step for anchor in self.state.anchors]
        if self.run.record.envelope.numbers:
            in_force = self.run.ledger.in_force
            steps += [each.checkpoint for each in in_force if each.after.numbers]
        return frozenset(steps)

    def add_anchor(self, step: int, restorable: Container[int]) -> None:
        """Adds the current weights as an anchor, unless they are suspect.

        Args:
            step: steps done; its checkpoint is about to be saved, or was resumed.
            restorable: steps of the checkpoints. An anchor of any other step is dropped, because no
                rollback could restore its place in the run.
        """
        if self.recent.newest >= 0 and self.is_enabled and not self.loss_function.is_checked:
            self.loss_function.drop(
                "no step had a batch for loss_fn: use healer.batches, or healer.loss(batch) (in "
                "JAX healer.update(state, batch=batch))"
            )
        if self.state.has_evidence or step < self.state.silent_until:
            return
        self.run.holding.learn(step)
        if not self.is_enabled:
            return
        state = self.state
        state.anchors = [anchor for anchor in state.anchors if anchor.step in restorable]
        if step not in restorable or state.anchor_of(step) is not None:
            return
        new = Anchor(step)
        if len(state.recent) == RECENT:
            new.level, new.spread = self.recent.mean_loss(), statistics.stdev(state.recent)
        new.weights = self.run.driver.copy_weights()
        state.anchors = with_new(state.anchors, new)

    # -- after each step ------------------------------------------------------------------------

    def observe(self, result: StepResult) -> Trouble | None:
        """Compares weights after a step if there is a reason.

        The reasons are:

        - a sign of trouble: an alarm, a loss above each of the last `REGULAR_INTERVAL` losses, or
          an unusual gradient norm;
        - the end of a burst of signs;
        - at every `MEAN_PAUSE`th step, a mean loss that exceeds the mean loss of the best anchor by
          more than its spread;
        - a regular comparison, which finds damage that raises no alarm and no loss.

        Args:
            result: the newest step that was read. In a dispatch of several steps the last step has
                the batches of all steps, and the other steps have none.

        Returns:
            A verdict if the run has to roll back, or None.
        """
        records, keeps_state = result.records, result.why == Why.STATE_KEPT
        if not (keeps_state or result.judged):
            return None  # a micro-step of an accumulation, or an overflow at a loss scale
        if not self.is_enabled:
            return None
        trained, loss = trained_step(result)
        state, index = self.state, trained.index
        if len(state.first_losses) < RECENT and math.isfinite(loss):
            state.first_losses.append(loss)
        state.spent = max(0.0, state.spent - self._earned)
        alarm = keeps_state or any(each.cause & ~_NOT_ABOUT_WEIGHTS for each in records)
        signs = self.recent.add(trained, loss, alarm=alarm)
        if signs.is_urgent:  # this comparison cannot wait
            state.spent = min(state.spent, self._most - 1.0)
        is_regular = index % self._interval == self._interval - 1
        best = self._best_on_average(index)
        is_high = best is not None and index % MEAN_PAUSE == 0
        self._has_reason |= signs.sign or signs.is_urgent or is_regular or is_high
        if not trained.batches:
            return None  # not the last step of its dispatch
        if not self.loss_function.is_checked:
            self.loss_function.check(trained, loss)
        verdict = None
        if self._is_due(index):
            verdict = self._compare(trained, loss, best)
            if is_regular and not self.state.has_evidence:
                self.recent.accept()
        if result.taken:
            is_usual = not signs.high and not self.state.has_evidence
            for anchor in self.state.anchors:
                anchor.add(trained, is_usual=is_usual)
        return verdict

    def _best_on_average(self, index: int) -> Anchor | None:
        """The anchor with the lowest mean loss, if the mean loss exceeds it by its spread.

        An anchor of a few steps ago has no sample yet, and does not count.
        """
        best = min(self.state.anchors, key=lambda anchor: anchor.level, default=None)
        if best is None or index - best.step < SAMPLE_SIZE:
            return None
        if self.recent.mean_loss() > best.level + best.spread:
            return best
        return None

    def _is_due(self, index: int) -> bool:
        """Whether weights are compared at the last step of a dispatch.

        If each step ends an accumulation, the next one may have begun, and the weights can be
        compared all the same. Within one the weights have not changed since the last step.
        """
        run, state = self.run, self.state
        has_reason = self._has_reason and state.spent < self._most
        self._has_reason = False
        begin = state.silent_until
        if state.verdict is not None:  # the run may recover until then
            begin = state.verdict.recovers_until
        if not self.is_enabled or index < begin:
            return False
        if not (has_reason or self.state.has_evidence):
            return False
        return run.journal.has_micro_steps or run.driver.may_save(run.schedule.every)

    def _compare(self, trained: TrainedStep, loss: float, best: Anchor | None) -> Trouble | None:
        """Compares with each eligible anchor.

        Args:
            trained: the step, with the batches of its dispatch.
            loss: its training loss.
            best: an anchor to compare with at any age, or None.

        Returns:
            A verdict if the run has to roll back now, or None.
        """
        index, state = trained.index, self.state
        anchors = to_compare(state.anchors, index, every=self.run.schedule.every, best=best)
        if state.verdict is not None:
            anchors = [each for each in state.anchors if each.step == state.verdict.better_step]
        verdict = None
        for anchor in anchors:
            self._compare_with(anchor, trained, loss)
            if anchor.evidence >= self.threshold and self._has_learnt_since(anchor):
                anchor.forget()
            elif anchor.evidence >= self.threshold:
                verdict = self._verdict(anchor)
            elif state.verdict is not None and anchor.evidence <= 1:
                log, onset = self.run.log, state.verdict.onset
                log.assessment(index, onset, "recovered", say=log.info, checkpoint=anchor.step)
                state.forget_trouble()
        if verdict is None or state.anchor_of(verdict.better_step) is None:
            return None  # its anchor may have been dropped after it was found
        if index >= verdict.recovers_until or self.run.ledger.same_trouble(verdict.onset):
            return verdict
        self._postpone(verdict, index)
        return None

    def _compare_with(self, anchor: Anchor, trained: TrainedStep, loss: float) -> None:
        """Compares with one anchor, on the batches of the step and then on past batches.

        The past batches are evaluated only if the loss of the step has risen. The smaller of the
        two rises is the evidence: on a bad batch that the model has just seen, or that it has
        trained on, one of the two says little. Batches with equal losses are no evidence, because
        an oscillation of the loss looks like damage then.
        """
        if self.state.gives_loss and not math.isnan(loss):
            known = [loss]
        else:
            known = None
        losses = self.losses_of([trained], anchor, known)
        if losses is None:
            return
        evidence = rise_of(*losses[0])
        if 0 < evidence < math.inf:  # else not higher, or not finite: this batch alone decides
            if anchor.evidence > 1:
                number = MEDIAN_OF
            else:
                number = 1
            past = self.losses_of(anchor.draw(number), anchor)
            if not past:  # no batch was trained on since the anchor
                return
            past.sort(key=lambda each: rise_of(*each))
            middle = past[len(past) // 2]
            if math.isclose(losses[0][1], middle[1], rel_tol=ROUNDING):
                self._same_losses += 1
                if self._same_losses == MAX_SAME_LOSSES:
                    self.run.loop.warn(
                        "loss_fn has returned the same loss for different batches, so no "
                        "comparison counts: loss_fn has to compute the loss of the batch that it "
                        "gets"
                    )
                return
            self._same_losses = 0
            evidence = min(rise_of(*middle), evidence)  # NaN of the past batches stays
        if not math.isnan(evidence):
            anchor.learn(trained.index, evidence, is_retest=self.state.verdict is not None)

    def losses_of(
        self, steps: Sequence[TrainedStep], anchor: Anchor, known: list[float] | None = None
    ) -> list[tuple[float, float]] | None:
        """Losses of steps, with the current weights and with an anchor's weights. Collective.

        Args:
            steps: the steps whose batches are evaluated.
            anchor: the earlier weights. All are dropped if the parameters have changed since.
            known: losses of the steps with the current weights, or None to evaluate these.

        Returns:
            Current and earlier loss of each step; or None if the weights cannot be compared.
        """
        if not steps:
            return []
        losses, state = self.loss_function.losses(steps, anchor.weights, known), self.state
        if known:
            evaluations = len(steps)
        else:
            evaluations = 2 * len(steps)
        state.spent = min(state.spent + evaluations, self._most + MAX_DEBT)
        if losses is None:  # the next checkpoint makes an anchor
            state.anchors.clear()
            state.forget_trouble()
        return losses

    # -- the verdict ----------------------------------------------------------------------------

    def _verdict(self, anchor: Anchor) -> Trouble:
        """The pending verdict, or the verdict about an anchor.

        The comparison that finds trouble is later than the beginning of the trouble. So the onset
        is the first step of a burst of high steps that lasts until shortly before the evidence.
        The newest anchor up to the evidence whose own evidence is strong counts as the better one:
        its rollback repeats least.
        """
        if self.state.verdict is not None:
            return self.state.verdict
        onset = found = anchor.onset or anchor.step
        for each in self.state.anchors:
            if anchor.step < each.step <= found and each.evidence >= self.strong:
                anchor = each
        for first, last in reversed(self.state.bursts):
            if last >= onset - STEPS_AFTER_SIGN:
                onset = min(onset, first)
        onset = max(onset, anchor.step)
        return Trouble(
            cause=TroubleCause.BETTER_WEIGHTS,
            onset=onset,
            found_at=self.recent.newest,
            since=onset,
            finite=True,
            sound_before=True,
            better_step=anchor.step,
            loss_before=anchor.level if math.isfinite(anchor.level) else None,
        )

    def _postpone(self, verdict: Trouble, index: int) -> None:
        """Keeps a verdict pending until its step `recovers_until`.

        Its anchor keeps a part of the evidence, so that the threshold is reached sooner the second
        time. The other anchors lose their evidence.
        """
        self.state.verdict = verdict
        for anchor in self.state.anchors:
            anchor.forget()
            if anchor.step == verdict.better_step:
                anchor.evidence, anchor.onset = self.strong, verdict.onset
        self.run.log.assessment(
            index,
            verdict.onset,
            "worse",
            say=self.run.log.warning,
            checkpoint=verdict.better_step,
            why=f"the run has until step {verdict.recovers_until} to recover",
        )

    def verdict_now(self, *, at_end: bool = False) -> Trouble | None:
        """The pending verdict, or a verdict with less evidence than the threshold.

        For a run that cannot wait for more evidence: at the end of the data, or if no step is
        finite any more. A wrong verdict costs the repeat of some steps. A longer wait could cost
        the result of the run.

        Args:
            at_end: whether any evidence is enough, for a question that `decide_at_end` answers.
                Otherwise it has to be `strong`.
        """
        if self.state.verdict is not None:
            return self.state.verdict
        enough = [each for each in self.state.anchors if each.evidence >= self.strong]
        if at_end:
            enough = [each for each in self.state.anchors if each.evidence > 1]
        if not enough or self._has_learnt_since(enough[-1]):
            return None
        return self._verdict(enough[-1])

    def decide_at_end(self) -> Trouble | None:
        """Decides about a suspicion at the end of the run, after which no step can be compared.

        Any evidence is enough for the question, because the batches kept of usual steps answer it
        at once. The batches are counted one by one: a bad batch would dominate their mean.

        Returns:
            The verdict, if the anchor's loss is lower on most of the kept batches. Without strong
            evidence, the loss has to be lower on all of them.
        """
        strong = self.verdict_now()
        verdict = strong or self.verdict_now(at_end=True)
        anchor = verdict and self.state.anchor_of(verdict.better_step)
        if anchor:
            losses = self.losses_of(anchor.sample, anchor)
        else:
            losses = None
        if not losses:
            return None
        lower = sum(rise_of(*each) > 0 for each in losses)
        if strong:
            needed = len(losses) // 2 + 1
        else:
            needed = len(losses)
        if lower >= needed:
            return verdict
        return None

    def _has_learnt_since(self, anchor: Anchor) -> bool:
        """Whether the anchor is the start of the run, and the loss is lower now than at the start.

        Such a run has learnt, so its first weights are not better. A comparison that says otherwise
        is not a measure: in self-distillation, for example, the loss of the first weights is low.
        """
        first = self.state.first_losses
        if anchor.step > self.run.record.first_step or not first:
            return False
        return self.recent.mean_loss() < statistics.fmean(first)

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
        older = [each for each in self.state.anchors if each.step < newest]
        return [newest, *(each.step for each in reversed(older) if each.evidence >= self.strong)]

    # -- changes, and the way back --------------------------------------------------------------

    def pause_until(self, step: int) -> None:
        """Begins again: compares and copies no weights before `step`.

        Called after a change that was accepted. Earlier weights are better by the old measure, and
        would lead to the same verdict again.

        Args:
            step: first step at which weights may be compared. A later step of an earlier call
                stays.
        """
        state = self.state
        state.anchors, state.recent, state.usual = [], [], []
        state.forget_trouble()
        state.silent_until = max(state.silent_until, step)
        self.recent = RecentSteps(self.run)

    def on_structure_change(self) -> None:
        """Drops all anchors and the evidence, because the program has changed its model.

        Parameters that are new, removed or resized cannot be compared. The other parameters alone
        are not a measure, because old layers work only with the other old layers. The losses stay,
        so that damage soon after the change is a reason to compare. The healthy ranges of the
        optimizers' numbers and rates stay too, because a new group has new names.
        """
        self.state.anchors.clear()
        self.state.forget_trouble()

    def continue_from(
        self, saved: ComparisonState, step: int, weights: Mapping[int, Any] = {}
    ) -> None:
        """Continues from what a checkpoint knows, at a start and at a rollback.

        An anchor whose weights are known no longer is dropped.

        Args:
            saved: the state in the checkpoint.
            step: step of the checkpoint.
            weights: step -> weights of that step, besides the weights of the present anchors.
        """
        for anchor in saved.anchors:
            live = self.state.anchor_of(anchor.step)
            anchor.weights = weights.get(anchor.step)
            if anchor.weights is None and live is not None:
                anchor.take_samples(live, before=step)
        saved.anchors = [each for each in saved.anchors if each.weights is not None]
        if saved.verdict is not None and saved.anchor_of(saved.verdict.better_step) is None:
            saved.verdict = None
        self.run.record.comparisons = saved
        self.recent = RecentSteps(self.run)
        if step < self.run.ledger.accepted_until:
            self.pause_until(self.run.ledger.accepted_until)


def trained_step(result: StepResult) -> tuple[TrainedStep, float]:
    """The records of a step, joined, and its loss.

    Args:
        result: the step. If it kept its old state, or its loss was not finite, the loss is NaN.
    """
    loss, norms, rates = math.nan, {}, {}
    if result.why != Why.STATE_KEPT and not result.causes & Cause.NONFINITE_LOSS:
        loss = statistics.fmean(each.loss for each in result.records)
    for each in result.records:
        if each.judged:
            norms[each.engine] = each.grad_norm
        if each.trained_rate is not None:
            rates[each.engine] = each.trained_rate
    return TrainedStep(result.index, result.contents, norms, rates), loss
