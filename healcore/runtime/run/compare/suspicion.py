"""`Suspicion`: what happens between the first evidence of damage and the answer to it.

    no evidence
        | a comparison makes the evidence of an anchor > 1       Anchor.learn
        v
    evidence: no anchor is added, and nothing is learnt as healthy
        | the evidence reaches the threshold                     Comparisons._weigh
        v
    verdict: carried out at once if the run has had its time to recover
        | otherwise it waits until then                          Suspicion.postpone
        v
    pending verdict: nothing is compared before `recovers_until`, and then its anchor only
        |---> no evidence is left: the run has recovered         Suspicion.report_recovery
        | the evidence reaches the threshold again
        v
    the run goes back, or accepts the damage                     Recovery.go_back

A restart continues wherever the run was: `ComparisonState` holds the facts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from healcore.runtime.run.compare.evidence import Anchor
from healcore.runtime.run.compare.rises import Rises, rise_of
from healcore.runtime.run.compare.step_history import STEPS_AFTER_SIGN, WINDOWS
from healcore.runtime.run.trouble import Trouble, TroubleCause

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

RESTART_POWER = 0.5
"""A pending verdict starts again with `threshold ** RESTART_POWER` of evidence: 100 of 10,000."""


class Suspicion:
    """The suspicion that earlier weights are better: its onset, and the verdict that waits.

    It owns `bursts` and `verdict` of the `ComparisonState`. A checkpoint holds
    this state, so a restart continues the suspicion.

    Args:
        run: the parts of the run.

    Attributes:
        threshold: evidence for a verdict, see `[rollback] evidence` of the policy.
        strong_evidence: evidence that is enough where a run cannot wait for the threshold.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.threshold = run.policy.rollback.evidence
        self.strong_evidence = self.threshold**RESTART_POWER

    # -- before a verdict -----------------------------------------------------------------------

    def add_high_step(self, index: int) -> None:
        """Adds a step with a sign of trouble or a high loss, to date the onset later.

        Args:
            index: index of the step. It extends the newest burst of such steps, or begins another
                burst after a gap.
        """
        bursts = self.run.comparisons.state.bursts
        if bursts and index - bursts[-1][1] <= STEPS_AFTER_SIGN:
            first, _ = bursts[-1]
            bursts[-1] = (first, index)
        else:
            bursts.append((index, index))
            del bursts[:-WINDOWS]

    # -- the verdict ----------------------------------------------------------------------------

    def verdict_about(self, index: int, anchor: Anchor, compared: Rises) -> Trouble:
        """The verdict about an anchor, or the pending verdict with its newest evidence.

        Args:
            index: index of the newest step.
            anchor: the weights that are better. Their evidence is the evidence of the verdict.
            compared: what the newest comparison has shown.
        """
        verdict = self.run.comparisons.state.verdict
        if verdict is None:
            onset = self._onset(index, anchor)
            verdict = Trouble(
                cause=TroubleCause.BETTER_WEIGHTS,
                onset=onset,
                found_at=self.run.comparisons.history.newest,
                since=onset,
                finite=True,
                sound_before=True,
                better_step=anchor.step,
            )
        rise = compared.rise if math.isfinite(compared.rise) else None
        return replace(verdict, rise=rise)

    def _onset(self, index: int, anchor: Anchor) -> int:
        """The first step of a burst of high steps that lasts until shortly before the evidence.

        The comparison that finds trouble is later than the beginning of the trouble. Without such a
        burst, the onset is the comparison with the first evidence.
        """
        onset = index
        if anchor.onset is not None:
            onset = anchor.onset
        for first, last in reversed(self.run.comparisons.state.bursts):
            if last >= onset - STEPS_AFTER_SIGN:
                onset = min(onset, first)
        return max(onset, anchor.step)

    def has_waited(self, verdict: Trouble, index: int) -> bool:
        """Whether the run has had its time to recover from the trouble of a verdict.

        True from step `recovers_until` on, and if the run was rolled back for this trouble before.

        Args:
            verdict: the verdict.
            index: index of the newest step.
        """
        return index >= verdict.recovers_until or bool(self.run.ledger.same_trouble(verdict.onset))

    def postpone(self, verdict: Trouble, index: int) -> None:
        """Keeps a verdict pending until its step `recovers_until`.

        Its anchor keeps a part of the evidence, so that the threshold is reached sooner the second
        time. The other anchors lose their evidence.

        Args:
            verdict: the verdict, which has just been found.
            index: index of the newest step.
        """
        self.run.comparisons.state.verdict = verdict
        for anchor in self.run.comparisons.state.anchors:
            anchor.evidence, anchor.onset = 1.0, None
            if anchor.step == verdict.better_step:
                anchor.onset, anchor.evidence = verdict.onset, self.strong_evidence
        self.run.log.assessment(index, verdict.onset, "worse", checkpoint=verdict.better_step)
        self.run.log.warning(
            f"step {index}: the weights of step {verdict.better_step} are better on the same "
            f"batches, since step {verdict.onset}; the run has until step "
            f"{verdict.recovers_until}, or the end of the data, to recover. Then they are compared "
            "again, and it rolls back if they are still better"
        )

    def report_recovery(self, index: int) -> None:
        """Reports that the run has recovered from the trouble of the pending verdict.

        Args:
            index: index of the newest step.
        """
        verdict = self.run.comparisons.state.verdict
        if verdict is None:
            return
        self.run.log.assessment(index, verdict.onset, "recovered", checkpoint=verdict.better_step)
        recovered = f"the run has recovered from the damage of step {verdict.onset}"
        self.run.log.info(f"step {index}: {recovered}")

    # -- a run that cannot wait -----------------------------------------------------------------

    def verdict_without_waiting(self, index: int, *, at_end: bool = False) -> Trouble | None:
        """The pending verdict, or a verdict with less evidence than the threshold.

        For a run that cannot wait for more evidence: at the end of the data, or if no step is
        finite any more. A wrong verdict costs the repeat of some steps. A longer wait could cost
        the result of the run.

        Args:
            index: index of the newest step.
            at_end: whether any evidence is enough, for a question that `decide_at_end` answers.
                Otherwise it has to be `strong_evidence`.
        """
        if not self.run.comparisons.is_enabled:
            return None
        if self.run.comparisons.state.verdict is not None:
            return self.run.comparisons.state.verdict
        newest = None
        for anchor in self.run.comparisons.state.anchors:
            is_strong = anchor.evidence >= self.strong_evidence
            if is_strong or (at_end and anchor.evidence > 1):
                newest = anchor
        if newest is None or self.has_learnt_since(newest):
            return None
        return self.verdict_about(index, newest, Rises(0))

    def decide_at_end(self, index: int) -> Trouble | None:
        """Decides about a suspicion at the end of the run, after which no step can be compared.

        Any evidence is enough for the question, because the batches kept of usual steps answer it
        at once. The batches are counted one by one: a bad batch would dominate their mean.

        Args:
            index: index of the newest step.

        Returns:
            The verdict, if the anchor's loss is lower on most of the kept batches. Without strong
            evidence, the loss has to be lower on all of them.
        """
        strong = self.verdict_without_waiting(index)
        verdict = strong
        if verdict is None:
            verdict = self.verdict_without_waiting(index, at_end=True)
        if verdict is None:
            return None
        anchor = self.run.comparisons.state.anchor_of(verdict.better_step)
        if anchor is None:
            return None
        losses = self.run.comparisons.losses_of(anchor.usual or anchor.sample, anchor)
        if losses is None:
            return None
        is_lower = [rise_of(now, then) > 0 for now, then in zip(*losses, strict=True)]
        is_better = bool(is_lower) and all(is_lower)
        if strong is not None:
            is_better = 2 * sum(is_lower) > len(is_lower)
        if not is_better:
            return None
        return verdict

    def has_learnt_since(self, anchor: Anchor) -> bool:
        """Whether the anchor is the start of the run, and the loss is lower now than at the start.

        Such a run has learnt, so its first weights are not better. A comparison that says otherwise
        is not a measure: in self-distillation, for example, the loss of the first weights is low.

        Args:
            anchor: the weights that seem to be better.
        """
        first, mean = (
            self.run.comparisons.state.first_losses,
            self.run.comparisons.history.level.mean(),
        )
        if anchor.step > self.run.record.first_step or mean is None or not first:
            return False
        return mean < sum(first) / len(first)
