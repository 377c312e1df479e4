"""`BetterWeights`: compares weights after a step, and says what became of accepted damage."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from healcore.core.decision import Cause
from healcore.runtime.reporting.diagnosis import recovered_text
from healcore.runtime.run.compare.trained_step import TrainedStep
from healcore.runtime.run.dispatch_queue import StepResult
from healcore.runtime.run.rollback.trouble import Trouble

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

_NOT_ABOUT_WEIGHTS = Cause.PLATEAU | Cause.OVERFIT
"""Causes that say nothing about damaged weights. Their alarms are no reason to compare weights."""


class BetterWeights:
    """Compares the weights with earlier weights, and says what became of accepted damage.

    Args:
        run: the parts of the run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def compare(self, result: StepResult) -> Trouble | None:
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
