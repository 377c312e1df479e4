"""`Holding`: learns the ranges in which a run is healthy, and holds what has left them.

healthy checkpoint --> learn, and release what is back in its range
trouble            --> outside: what had left its range since a snapshot
remedy             --> hold: rates, numbers and norms, or nothing
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from healcore.runtime.run.engine_states import limit_norms, with_rates
from healcore.runtime.run.envelope import Envelope
from healcore.runtime.run.healthy_ranges import RATE_TOLERANCE, HealthyValues
from healcore.runtime.run.rollback.remedy import RateFact
from healcore.runtime.run.trouble import Trouble, TroubleCause
from healcore.runtime.run.witness.evidence import SAMPLE_SIZE, Anchor, TrainedStep
from healcore.runtime.run.witness.recent_steps import (
    REGULAR_INTERVAL,
    STEPS_AFTER_SIGN,
    STEPS_BEFORE_SIGN,
)
from healcore.runtime.store.ranks import broadcast

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

LASTING_STEPS = 2 * REGULAR_INTERVAL
"""Steps after the trouble from which on a number that the program has not taken back is intended. A
fault that ends by itself is shorter in all our benchmarks, at most 100 steps."""


class Holding:
    """What a run holds in its healthy range, and what was outside of it at a trouble.

    It owns `healthy` and `envelope` of the record. Learning rates and the optimizers' numbers are
    set by the program, so a rollback alone does not change them: trouble that they cause comes back
    until they are held.

    Args:
        run: the parts of the run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.freezes = False
        """Whether the next step is frozen."""

    @property
    def envelope(self) -> Envelope:
        """What is held now."""
        return self.run.record.envelope

    def hold(self, envelope: Envelope, step: int) -> None:
        """Holds this, and nothing else.

        Args:
            envelope: what is held. It replaces what was held before.
            step: the next step, from which on it is held.
        """
        driver = self.run.driver
        self.run.record.envelope = replace(envelope, rates={})
        self.freezes = envelope.freezes(step)
        engines = with_rates(driver.engines(), envelope.rates)
        norms = envelope.norms
        driver.load(None, limit_norms(self.run.policy.engine, engines, norms, freeze=self.freezes))
        driver.hold_numbers({name: each.bounds for name, each in envelope.numbers.items()})

    # -- healthy checkpoints --------------------------------------------------------------------

    def learn(self, step: int) -> None:
        """Learns the rates, numbers and norms at a healthy checkpoint, and releases what is back.

        Args:
            step: step of the checkpoint.
        """
        run = self.run
        if run.journal.nonfinite_streak:
            return  # the weights may be damaged
        known, seen = run.witness.recent.healthy, broadcast(run.ranks, dict(run.driver.numbers()))
        rates: dict[str, float] = {}
        if step > run.record.first_step:  # no step was trained before the first checkpoint
            rates = run.metrics.rates_in_force()
            if not run.witness.is_enabled:  # it has seen no steps
                rates |= run.journal.rates
        held = self.envelope.numbers
        known.add_checkpoint(rates, {name: seen[name] for name in seen if name not in held})
        run.record.healthy = copy.deepcopy(known)
        if step > self._trouble_seen:
            self._release(step)

    @property
    def _trouble_seen(self) -> int:
        """Steps done when the last rollback began. Nothing is released up to this step."""
        rollbacks = self.run.ledger.in_force
        if rollbacks:
            return rollbacks[-1].step
        return 0

    def _release(self, step: int) -> None:
        """Ends what is not needed any more, and lets the limits of the norms grow."""
        run, envelope = self.run, self.envelope
        outside = self._outside_now()
        back = [name for name in envelope.numbers if name not in outside]
        lowest, norms, rates = run.witness.recent.lowest_norms(), {}, {}
        for name, limit in envelope.norms.items():
            norms[name] = max(limit, lowest.get(name, 0.0))
        for each in reversed(run.ledger.in_force if envelope.is_guess else ()):
            if each.after.is_guess:  # in the end, the first one that has guessed a ceiling
                rates = each.before.rates
        kept = envelope.without_numbers(back)
        released = replace(kept, norms=norms, is_guess=False, rates=rates)
        if back:
            run.log.info(
                f"step {step}: {', '.join(back)}: the program's own value is in its healthy "
                "range again, and is used"
            )
        if released != envelope:
            self.hold(released, step)

    def _outside_now(self) -> dict[str, float]:
        """Name of a held number that is outside of its range now -> the program's value."""
        if not self.envelope.numbers:
            return {}
        outside, seen = {}, broadcast(self.run.ranks, dict(self.run.driver.numbers()))
        for name, each in self.envelope.numbers.items():
            if name in seen and not each.bounds.low <= seen[name].last <= each.bounds.high:
                outside[name] = seen[name].last
        return outside

    def intended(self, step: int, *, at_end: bool = False) -> dict[str, float]:
        """The held numbers that the program keeps outside of their range: they are intended.

        Such a value makes the training loss worse, as a regulariser that is switched on late does.
        So the run would look better as long as the number is held.

        Args:
            step: steps done.
            at_end: whether the data have ended, so that the program has no time left to take the
                number back. Else `LASTING_STEPS` have to pass.

        Returns:
            Name -> the program's value. It is finite: NaN and Inf are never intended.
        """
        if not (at_end or step >= self._trouble_seen + LASTING_STEPS):
            return {}
        return {name: value for name, value in self._outside_now().items() if math.isfinite(value)}

    # -- troubles -------------------------------------------------------------------------------

    def rate_fact(self, trouble: Trouble, step: int, healthy: HealthyValues) -> RateFact:
        """What is known of the rates since the last rollback or start.

        Where earlier weights are better, a rate has no room above its range, even if the program
        raises it steadily: then the rise itself is a suspect. NaN has other causes, so a schedule
        may continue.

        Args:
            trouble: the trouble.
            step: step of the snapshot.
            healthy: what was known as healthy there.
        """
        rates, fact = self.run.journal.rates, RateFact.HEALTHY
        if not rates and self.run.journal.last_trained is not None:
            fact = RateFact.UNKNOWN
        for name, rate in rates.items():
            known = healthy.rates.get(name)
            if known is None:
                fact = RateFact.UNKNOWN
                continue
            highest = known.high
            if trouble.cause is not TroubleCause.BETTER_WEIGHTS:
                highest = known.bounds(self._intervals(trouble, step)).high
            if rate > highest * RATE_TOLERANCE:
                fact = RateFact.HIGHER
                break
        return broadcast(self.run.ranks, fact)  # rates may differ by rank

    def outside(self, trouble: Trouble, step: int, healthy: HealthyValues) -> Envelope:
        """What had left its healthy range at a trouble since a snapshot. Collective.

        Where a limit of the gradient norm has not helped, the batches of the first steps with an
        unusual norm are unusual too: the cause may be the batch, and its norm only a symptom.

        Args:
            trouble: the trouble.
            step: step of the snapshot.
            healthy: what was known as healthy there. Later knowledge may be a part of trouble that
                had not shown yet.

        Returns:
            What to hold, without regard to what is held already.
        """
        witness, suspects = self.run.witness, list[TrainedStep]()
        if trouble.cause is TroubleCause.BETTER_WEIGHTS:
            suspects = witness.recent.suspect_steps(trouble.onset, trouble.found_at)
        norms = [each.norms for each in suspects]
        found = healthy.outside(self.run.driver.numbers(), norms, self._intervals(trouble, step))
        unusual, anchor = set[int](), witness.state.anchor_of(step)
        if anchor is not None:
            unusual.update(self._unusual_steps(trouble.onset - STEPS_BEFORE_SIGN, suspects, anchor))
            if self.envelope.norms:
                end = trouble.onset + STEPS_AFTER_SIGN
            else:
                end = 0
            for each in suspects:
                is_unusual = any(healthy.is_unusual_norm(*norm) for norm in each.norms.items())
                if is_unusual and step <= each.index < end:
                    unusual.add(each.index)
        batches = self.run.journal.batches_of(sorted(unusual))
        found = replace(found, left_out=(*trouble.batches, *batches))
        return broadcast(self.run.ranks, found)

    def _intervals(self, trouble: Trouble, step: int) -> float:
        """Checkpoint intervals from a snapshot to the onset of a trouble; may be a fraction."""
        return (trouble.onset - step) / self.run.schedule.every

    def _unusual_steps(
        self, before: int, suspects: Sequence[TrainedStep], anchor: Anchor
    ) -> list[int]:
        """Suspect steps whose batches are unusual under the better weights, ascending. Collective.

        A batch is unusual if its loss under the better weights exceeds the largest loss of the
        sampled batches of all anchors from before the step `before` by more than their range.
        """
        witness, sampled = self.run.witness, dict[int, TrainedStep]()
        for each in witness.state.anchors:
            sampled |= {step.index: step for step in each.sample if step.index < before}
        steps = [step for step in suspects if step.batches and step.index >= anchor.step]
        if len(sampled) < SAMPLE_SIZE or not steps:
            return []  # the spread of a few losses says little
        losses = witness.losses_of([*sampled.values(), *steps], anchor) or []
        under_better = [then for _, then in losses]
        usual = under_better[: len(sampled)]
        if not usual:
            return []
        limit = max(usual) + (max(usual) - min(usual))
        rest = zip(steps, under_better[len(sampled) :], strict=True)
        # Written with `not`, so that a loss of NaN counts as high.
        return [step.index for step, loss in rest if not loss <= limit]
