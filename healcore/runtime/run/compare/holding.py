"""`Holding`: learns the ranges in which a run is healthy, and holds what has left them.

At a checkpoint whose weights are not suspect, the run learns the learning rates, the numbers of the
optimizers (such as a momentum) and the gradient norms that it had. If damage recurs after a
rollback that changed nothing, a second rollback holds what was outside of these ranges:

    healthy checkpoint --> learn, and release what is back in its range
    verdict            --> outside_ranges, unusual_batches --> an order with `held` --> hold
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from healcore.core.engine import Engine
from healcore.runtime.driver import Driver, NumberRange
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run.compare.credit import REGULAR_INTERVAL
from healcore.runtime.run.compare.evidence import Anchor
from healcore.runtime.run.compare.step_history import STEPS_BEFORE_SIGN, StepHistory, SuspectSteps
from healcore.runtime.run.compare.verdict import Verdict
from healcore.runtime.run.engine_states import SavedLrState, limit_norms, with_lr_states
from healcore.runtime.run.healthy_ranges import HealthyValues, Held
from healcore.runtime.store.ranks import Ranks, broadcast

if TYPE_CHECKING:
    from healcore.runtime.run.compare.anchor_losses import AnchorLosses
    from healcore.runtime.run.compare.comparison_state import ComparisonState
    from healcore.runtime.run.incidents.rate_log import RateLog
    from healcore.runtime.run.record.run_record import RunRecord

LASTING_STEPS = 2 * REGULAR_INTERVAL
"""Steps after the trouble from which on a number that the program has not taken back is intended. A
fault that ends by itself is shorter in all our benchmarks, at most 100 steps."""


class Holding:
    """What a run holds in its healthy range, and what was outside of it at a trouble.

    It owns `ranges` and `intended` of the `ComparisonState`, which a checkpoint holds. Learning
    rates and the optimizers' numbers are set by the program, so a rollback alone does not change
    them: trouble that they cause recurs until they are held.

    Args:
        engine: the engine of the policy, whose limits of norms hold a norm.
        driver: holds numbers of the optimizers, and has the states of the engines.
        ranks: the ranks, which hold what rank 0 has seen.
        log: the log, for what is released.
        record: the step at which the run began.
        rate_log: has the learning rates in force.
        state: the state of the comparisons.
        history: the last steps.
        anchor_losses: evaluates batches with the better weights.
        save_every: steps between two saves.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        driver: Driver,
        ranks: Ranks,
        log: RunLog,
        record: RunRecord,
        rate_log: RateLog,
        state: ComparisonState,
        history: StepHistory,
        anchor_losses: AnchorLosses,
        save_every: int,
    ) -> None:
        self._engine = engine
        self._driver = driver
        self._ranks = ranks
        self._log = log
        self._record = record
        self._rate_log = rate_log
        self._state = state
        self._history = history
        self._anchor_losses = anchor_losses
        self._save_every = save_every
        self.freezes = False
        """Whether the next step is frozen, see `Held.frozen_steps`."""
        self._earlier_numbers: Mapping[str, NumberRange] = {}
        """Ranges of the numbers in earlier processes, since something was last held."""

    @property
    def held(self) -> Held:
        """What is held in its healthy range now. It is false if nothing is held.

        Setting it changes the state that checkpoints save, and nothing else. `hold` also applies it
        to the driver and the engines.
        """
        return self._state.ranges.held

    @held.setter
    def held(self, held: Held) -> None:
        self._state.ranges.held = held

    def on_rollback(self, target: int) -> None:
        """Takes the healthy ranges of the newest anchor, and notes whether `target` is frozen.

        Called after the restore, which has limited the engines already, and after the anchors of
        later steps were dropped.

        Args:
            target: the step at which the run continues.
        """
        ranges = self._state.ranges
        if self._state.anchors:
            ranges.values = ranges.values.with_better(self._state.anchors[-1].healthy)
        self.freezes = self.held.freezes(target)

    def release_all(self, step: int) -> None:
        """Releases what is held if a `loss_fn` that failed has ended the comparisons.

        Nothing would release it later. Frozen steps stay, because they end by themselves.

        Args:
            step: steps done.
        """
        held = self.held
        left = Held(frozen_steps=held.frozen_steps, until=held.until)
        if held == left:
            return
        self._restore_start_rates(held.start_rates)
        self.hold(left, step)
        self._log.info(
            f"step {step}: what was held is released, because no weights are compared any more"
        )

    def _restore_start_rates(self, before: Mapping[str, SavedLrState]) -> None:
        """Ends a limit of the rate from the start of the run, if there is one."""
        if before:
            self._driver.load(None, with_lr_states(self._driver.engines(), before))

    def learn(self, step: int) -> bool:
        """Learns the rates and numbers at a healthy checkpoint, and releases what is back.

        Args:
            step: step of the checkpoint.

        Returns:
            Whether a number has turned out to be intended, see `take_intended`. Then neither the
            anchors nor the current weights are a measure any more.
        """
        history, ranges = self._history, self._state.ranges

        # Learn.
        seen = broadcast(self._ranks, self.numbers())
        history.learn_doubtful_norms(step, self.held.norm_limits)
        rates: dict[str, float] = {}
        if step > self._record.first_step:  # no step was trained before the first checkpoint
            rates = self.known_rates()
        ranges.learn(
            history.healthy_rates(rates),
            seen,
            history.largest_norms(),
            history.largest_usual_loss(),
        )

        # Release, and adapt what stays held.
        held = ranges.held
        released = ranges.release(step, seen)
        self._state.intended = ranges.lasting_numbers(step, seen, after=LASTING_STEPS)
        ranges.follow_norms(step, history.typical_norms())
        before = ranges.release_start_rates(step)
        if before:
            self._restore_start_rates(before)
            self._log.info(
                f"step {step}: the learning rate is the program's own again; its limit was for the "
                "first steps"
            )
        if ranges.held != held:
            self.hold(ranges.held, step)
        if released:
            self._log.info(
                f"step {step}: {', '.join(released)}: the program's own value is in its healthy "
                "range again, and is used"
            )
        return bool(self._state.intended)

    def take_intended(self) -> dict[str, float]:
        """Takes the held numbers that have turned out to be intended, each once.

        Returns:
            Name -> the value that the program keeps.
        """
        state = self._state
        intended, state.intended = state.intended, {}
        return intended

    def hold(self, held: Held, step: int) -> None:
        """Holds this, and nothing else.

        Args:
            held: what is held. It replaces what was held before.
            step: the next step, from which on it is held.
        """
        self.freezes = held.freezes(step)
        self.held = held
        engines = self._driver.engines()
        limited = limit_norms(self._engine, engines, held.norm_limits, freeze=self.freezes)
        self._driver.load(None, limited)
        self._driver.hold_numbers(held.number_ranges)
        self._earlier_numbers = {}

    def freezing_changes(self, step: int) -> bool:
        """Whether the frozen steps begin or end at a step. Called once per step.

        Args:
            step: index of the step that is about to begin.
        """
        return self.held.freezes(step) != self.freezes

    def update_freezing(self, step: int) -> None:
        """Begins or ends the frozen steps at `step`, see `Held.frozen_steps`.

        Call it after all earlier steps have been read, because it replaces the engines' states.
        Also call it if a `loss_fn` that failed has ended the comparisons: otherwise all later steps
        would be frozen.

        Args:
            step: index of the step that is trained next.
        """
        self.hold(self.held, step)

    def outside_ranges(self, verdict: Verdict) -> Held:
        """What was outside of its healthy range at the trouble of a verdict. Collective.

        Args:
            verdict: the finding that earlier weights are better. Their anchor knows the ranges of
                its time.

        Returns:
            What to hold, without regard to what is held already.
        """
        suspects = self._suspect_steps(verdict)
        norms: Mapping[str, float] = {}
        if suspects is not None:
            norms = suspects.largest_norms()
        found = self.healthy_at(verdict.anchor_step).outside(
            broadcast(self._ranks, self.numbers()),
            norms,
            intervals=(verdict.onset - verdict.anchor_step) / self._save_every,
            last_step_before=verdict.anchor_step,
        )
        return replace(found, until=verdict.roll_back_at + 1)

    def unusual_batches(self, verdict: Verdict) -> list[int]:
        """Steps since the onset whose batches are unusual under the better weights. Collective.

        A batch is unusual if its loss under the better weights exceeds the largest loss of the
        usual batches of all anchors from before the onset by more than their range. Where a limit
        of the gradient norm has not helped, the batches of the steps with an unusual norm are
        unusual too: the cause may be the batch, and its norm only a symptom.

        Args:
            verdict: the finding that earlier weights are better.

        Returns:
            Indices of steps, ascending.
        """
        suspects, anchor = self._suspect_steps(verdict), self._state.anchor_of(verdict.anchor_step)
        if suspects is None or anchor is None:
            return []
        unusual = set()
        healthy = self.healthy_at(verdict.anchor_step)
        for index in suspects.with_unusual_norm(self.held.norms, healthy):
            if index >= anchor.step:
                unusual.add(index)
        return sorted(unusual | self._with_high_loss(suspects, anchor))

    def _with_high_loss(self, suspects: SuspectSteps, anchor: Anchor) -> set[int]:
        """Suspect steps whose loss under an anchor's weights is not ordinary."""
        before = suspects.start - STEPS_BEFORE_SIGN
        usual_by_index = {}
        for each in self._state.anchors:
            for step in each.usual:
                if step.index < before:
                    usual_by_index[step.index] = step
        usual = [*usual_by_index.values()]
        steps = [step for step in suspects.steps if step.batches and step.index >= anchor.step]
        if not usual or not steps:
            return set()
        both = [*usual, *steps]
        losses = self._anchor_losses.losses_of(both, anchor, [math.nan] * len(both))
        if losses is None:
            return set()
        _, under_better = losses
        ordinary, rest = under_better[: len(usual)], under_better[len(usual) :]
        limit = max(ordinary) + (max(ordinary) - min(ordinary))
        high = set()
        for step, loss in zip(steps, rest, strict=True):
            if not loss <= limit:  # written with `not`, so that a loss of NaN counts as high
                high.add(step.index)
        return high

    def healthy_at(self, step: int) -> HealthyValues:
        """What was known as healthy at the anchor of a step.

        The knowledge of the anchor counts, because later knowledge may be a part of trouble that
        had not shown yet. Names that were unknown at the anchor are taken from later knowledge.

        Args:
            step: step of an anchor. For another step the newest knowledge is returned.
        """
        anchor, values = self._state.anchor_of(step), self._state.ranges.values
        if anchor is None:
            return values
        return values.with_better(anchor.healthy)

    def highest_rates(self, step: int) -> dict[str, float]:
        """The highest healthy learning rate of each engine up to the anchor of a step.

        A rate has no room above its range, even if the program raises it steadily. Then the rise
        itself is a suspect.

        Args:
            step: step of the anchor.

        Returns:
            Engine name -> learning rate, where it is known.
        """
        return {name: rates.high for name, rates in self.healthy_at(step).rates.items()}

    def known_rates(self) -> dict[str, float]:
        """The learning rate of each engine at the last step.

        It includes the multiplier of the engine, so it is the rate that has updated the weights.

        Returns:
            Engine name -> learning rate, without rates that are unknown, NaN or Inf.
        """
        known = {}
        for name, rate in self._rate_log.rates_in_force().items():
            if rate is not None and math.isfinite(rate):
                known[name] = rate
        return known

    def _suspect_steps(self, verdict: Verdict) -> SuspectSteps | None:
        """The steps that may have caused the trouble of a verdict."""
        return self._history.suspect_steps(verdict.onset, verdict.found_at)

    def numbers(self) -> dict[str, NumberRange]:
        """`Driver.numbers`, with their ranges in earlier processes since something was held.

        The driver of a new process knows no value from before the restart. A number that was set
        and taken back before it would seem to have been healthy all the time.

        Returns:
            Name -> lowest, highest and last value.
        """
        seen = dict(self._driver.numbers())
        for name, earlier in self._earlier_numbers.items():
            now = seen.get(name, earlier)
            low, high = min(now.low, earlier.low), max(now.high, earlier.high)
            seen[name] = NumberRange(low, high, now.last)
        return seen

    def continue_numbers(self, earlier: Mapping[str, NumberRange]) -> None:
        """Takes the ranges of the numbers that an earlier process has seen. Called at a resume.

        The method `numbers` adds them to the ranges of this process.

        Args:
            earlier: name -> lowest, highest and last value, from the record of the checkpoint.
        """
        self._earlier_numbers = earlier
