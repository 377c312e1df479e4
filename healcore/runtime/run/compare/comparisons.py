"""`Comparisons`: tests whether earlier weights are better than the current on the same batches.

A loss and a gradient norm do not distinguish a damaged model from different data. Two sets of
weights on the same batch do: a new term of the loss, another scale of the targets or a new task
changes both losses alike. So the current weights are compared with earlier weights (anchors) on the
batch of the step and on one batch trained on since the anchor. If the earlier weights are better on
both, at comparison after comparison, the run rolls back to them.

docs/how-it-decides.md has the theorem and the limits of the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from healcore.runtime.driver import LossFn, NumberRange
from healcore.runtime.run.compare.evidence import (
    FIRST_PAUSE,
    FORWARD_PASS,
    RECENT,
    REGULAR_INTERVAL,
    SAMPLE_SIZE,
    Anchor,
    ComparisonState,
    Credit,
    ObservedBatch,
    TrainedStep,
    Verdict,
)
from healcore.runtime.run.compare.loss_function import LossFunction
from healcore.runtime.run.compare.step_history import (
    STEPS_AFTER_SIGN,
    STEPS_BEFORE_SIGN,
    WINDOWS,
    StepHistory,
    Suspects,
)
from healcore.runtime.run.engine_states import limit_norms, with_lr_states
from healcore.runtime.run.healthy_ranges import HealthyValues, Held
from healcore.runtime.store import values
from healcore.runtime.store.packed_values import PackedValues
from healcore.runtime.store.ranks import broadcast

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

LASTING_STEPS = 2 * REGULAR_INTERVAL
"""Steps after the trouble from which on a number that the program has not taken back is intended. A
fault that ends by itself is shorter in all our benchmarks, at most 100 steps."""
MAX_ANCHORS = 3
"""Max number of anchors."""
MEDIAN_OF = 3
"""Past batches of a comparison while there is evidence. The median of their rises is steadier than
one of them, and bad batches in the sample do not rule it as they rule a mean."""
MIN_AGE = 0.5
"""Min age of a compared anchor, as a share of the run so far, up to one checkpoint interval."""
RESTART_POWER = 0.5
"""A pending verdict starts again with `threshold ** RESTART_POWER` of evidence: 100 of 10,000."""
ROUNDING = 1e-6
"""Relative difference up to which two float32 losses are equal."""
MAX_BATCH_BYTES = 16 << 20
"""Max bytes of the batches in a checkpoint. Others are not saved."""
_NUMBERS = ("the numbers of the optimizers",)
_BATCHES = ("the batches of comparisons",)


class _Comparison(NamedTuple):
    """One comparison of the current weights with an anchor's weights."""

    evaluations: int
    evidence: float = math.nan  # the smaller rise, or NaN without evidence
    rise: float = math.nan  # loss of the step's batch, current minus earlier weights
    rise_remembered: float = math.nan  # the same difference for a past batch, or NaN


class Comparisons:
    """Compares the current weights with earlier weights, and returns a verdict if those are better.

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
        self._history = StepHistory()
        self._credit = Credit(loss_fn_cost)
        self._wanted = False
        """Whether a step of the current dispatch gives a reason to compare."""
        if self.is_enabled:
            run.driver.watch_numbers()
        self._dispatch_losses: list[float] = []
        """Losses of the steps of the current dispatch."""
        self._expected: Verdict | None = None
        """The verdict whose rollback is about to begin, or None."""
        self._withholds = False
        """Whether the next update is withheld, see `Held.withheld`."""
        self._earlier_numbers: Mapping[str, NumberRange] = {}
        """Ranges of the numbers in earlier processes, since something was last held."""

    @property
    def is_enabled(self) -> bool:
        """Whether weights are compared, which requires a `loss_fn`."""
        return self.loss_function.function is not None

    @property
    def anchors(self) -> list[Anchor]:
        """The earlier weights, see `ComparisonState`."""
        return self.state.anchors

    @property
    def held(self) -> Held:
        """What is held in its healthy range."""
        return self.state.ranges.held

    @held.setter
    def held(self, held: Held) -> None:
        self.state.ranges.held = held

    @property
    def steps_needed(self) -> frozenset[int]:
        """Steps of the checkpoints that a rollback may need: of anchors, and from before a hold."""
        held = self.held.numbers.values()
        return frozenset([*(each.step for each in self.anchors), *(each.before for each in held)])

    @property
    def suspects(self) -> bool:
        """Whether an anchor has evidence, or a verdict is pending."""
        return self.state.verdict is not None or any(anchor.evidence > 1 for anchor in self.anchors)

    def forget_unsaved_anchor(self, step: int) -> None:
        """Drops the anchor of a step whose checkpoint could not be saved."""
        self.state.anchors = [anchor for anchor in self.anchors if anchor.step != step]

    def add_anchor(self, step: int, restorable: Container[int]) -> None:
        """Adds the current weights as an anchor, unless they are suspect.

        Drops anchors of steps that are not in `restorable`, the steps of the checkpoints.
        """
        if self.is_enabled and self._dispatch_losses and not self.loss_function.is_checked:
            self.loss_function.function = None
            self.anchors.clear()
            why = "no step had a batch for loss_fn: use healer.batches, or healer.loss(batch)"
            self.run.log.problem(step, f"{why} (in JAX healer.update(state, batch=batch))")
        if not self.is_enabled:
            self._release_all(step)
            return
        if self.suspects or step < self.state.silent_until:
            return
        if self._learn_ranges(step):
            return
        self.state.anchors = [anchor for anchor in self.anchors if anchor.step in restorable]
        if step not in restorable or self._anchor_of(step) is not None:
            return
        level = self._history.mean()
        spread = 0.0 if level is None else self._history.spread()
        new = Anchor(step, level=level, spread=spread, healthy=self.state.ranges.values)
        new.weights = self.run.driver.copy_weights()
        older = self.anchors[:-1]
        if len(self.anchors) == MAX_ANCHORS:
            older = [min(older, key=lambda anchor: (anchor.level_or_inf, -anchor.step))]
        self.state.anchors = [*older, *self.anchors[-1:], new]

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
        signs = self._history.add(step, loss, alarm=alarm, healthy=not self.suspects)
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
            wanted = index >= self.state.silent_until and (wanted or self.suspects)
        verdict = self._compare(step, sum(losses) / len(losses), best) if wanted else None
        if wanted and self._credit.is_regular(index) and not self.suspects:
            self._history.accept_level()
        if wanted and best is not None and best.evidence <= 1:
            self.state.mean_quiet_until = index + self.state.pause
            self.state.pause = min(REGULAR_INTERVAL, 2 * self.state.pause)
        elif best is None and index > self.state.mean_quiet_until:
            self.state.pause = FIRST_PAUSE
        if trained:
            for anchor in self.anchors:
                anchor.add(step, is_usual=not signs.high and not self.suspects)
        return verdict

    def _learn_first_step(self, step: TrainedStep, losses: Sequence[float]) -> None:
        """Checks the `loss_fn` on the first step with batches, and `losses` of its dispatch."""
        first = self._anchor_of(step.index)
        single = losses[0] if len(losses) == 1 else math.nan
        self.loss_function.learn_first_step(step, single, first and first.weights)
        if not self.is_enabled:
            self.anchors.clear()

    def pending_verdict(self, index: int) -> Verdict | None:
        """The verdict that waits for a recovery, at step `index`, or None if no verdict waits."""
        verdict = self.state.verdict
        return None if verdict is None else verdict._replace(index=index)

    def suspicion(self, index: int, *, at_end: bool = False) -> Verdict | None:
        """The pending verdict, or one about an anchor with `RESTART_POWER` of the threshold.

        For a run that cannot wait for more evidence: at the end of the data, or if no step is
        finite any more. A verdict costs the repeat of some steps, the wait would cost the result.
        With `at_end` any evidence is enough, for a question that `decide_at_end` answers.
        """
        if not self.is_enabled:
            return None
        if self.state.verdict is not None:
            return self.pending_verdict(index)
        if at_end:
            suspected = [anchor for anchor in self.anchors if anchor.evidence > 1]
        else:
            strong = self._threshold**RESTART_POWER
            suspected = [anchor for anchor in self.anchors if anchor.evidence >= strong]
        if not suspected or self._has_learnt_since(suspected[-1]):
            return None
        return self._verdict(index, suspected[-1], _Comparison(0))

    def decide_at_end(self, index: int) -> Verdict | None:
        """Decides about a suspicion at the end of the run, after which no step can be compared.

        Any evidence is enough for the question, because the batches kept of usual steps answer it
        at once. They count one by one: a bad batch among them would rule their mean.

        Returns:
            The verdict with `index`, if the anchor's loss is lower on most of the kept batches, and
            on all of them where `suspicion` alone has not enough evidence.
        """
        strong = self.suspicion(index)
        verdict = strong or self.suspicion(index, at_end=True)
        anchor = None if verdict is None else self._anchor_of(verdict.anchor)
        if verdict is None or anchor is None:
            return None
        losses = self._losses_of(anchor.usual or anchor.sample, anchor)
        if losses is None:
            return None
        better = [_rise(now, then) > 0 for now, then in zip(*losses, strict=True)]
        if strong is not None:
            return verdict if 2 * sum(better) > len(better) else None
        return verdict if better and all(better) else None

    def on_rollback(self, target: int) -> None:
        """Drops all evidence, and the anchors and samples from step `target` on."""
        self.state.repeated, self._expected = self._expected, None
        self.state.anchors = [anchor for anchor in self.anchors if anchor.step <= target]
        for anchor in self.anchors:
            anchor.rewind(target)
        ranges = self.state.ranges
        if self.anchors:
            ranges.values |= self.anchors[-1].healthy
        self._forget_trouble()
        self._history.forget(ranges.values.norms)
        self._history.norm_limits = self.held.norm_limits
        self._withholds = self.held.withholds(target)

    def pause_until(self, step: int) -> None:
        """Drops anchors and losses, and compares and copies no weights before `step`."""
        self.state.silent_until = max(self.state.silent_until, step)
        self.state.repeated = self._expected = None
        self.anchors.clear()
        self._forget_trouble()
        self._history.forget()

    def on_structure_change(self) -> None:
        """Drops all anchors and the evidence, because the program has changed its model.

        Parameters that are new, gone or resized cannot be compared. The rest alone is no measure:
        old layers work together with the old other layers only. The losses stay, so that damage
        soon after the change is a reason to compare. What was learnt about the numbers and rates of
        the optimizers stays too, because a new group has new names.
        """
        self.state.repeated = self._expected = None
        self.anchors.clear()
        self._forget_trouble()

    def expect_again(self, verdict: Verdict) -> None:
        """Call it before the rollback of a verdict, to recognise the trouble in the repeat."""
        self._expected = verdict._replace(recurred=False)

    def _recurred(self, index: int) -> Verdict | None:
        """The verdict of the last rollback, if the losses of its repeat are the same up to it."""
        repeated = self.state.repeated
        if repeated is None or index < repeated.found:
            return None
        self.state.repeated = None
        if index > repeated.found or self._history.digest(repeated.anchor) != repeated.losses:
            return None
        if self._anchor_of(repeated.anchor) is None:
            return None
        return repeated._replace(index=index, recurred=True)

    # -- what is held ---------------------------------------------------------------------------

    def _release_all(self, step: int) -> None:
        """Releases what is held if a `loss_fn` that failed has ended the comparisons.

        Nobody would release it later. Updates that are withheld end by themselves.
        """
        held = self.held
        left = Held(withheld=held.withheld, until=held.until)
        if held == left:
            return
        self._restore_start_rates(held.start_rates)
        self.hold(left, step)
        self.run.log.info(
            f"step {step}: what was held is released, because no weights are compared any more"
        )

    def _restore_start_rates(self, before: Mapping[str, Any]) -> None:
        """Ends a limit of the rate from the start of the run, if there is one."""
        if before:
            driver = self.run.driver
            driver.load(None, with_lr_states(driver.engines(), before))

    def _learn_ranges(self, step: int) -> bool:
        """Learns the rates and numbers at a healthy checkpoint, and releases what is back.

        Returns whether a number has turned out to be intended, see `take_intended`. Then neither
        older nor present weights are a measure any more.
        """
        ranges = self.state.ranges
        seen = broadcast(self.run.ranks, self._numbers())
        self._history.learn_doubtful_norms(step)
        # No step has been trained at the rates of the very first weights.
        rates = self._rates() if step > self.run.record.first_step else {}
        ranges.learn(self._history.healthy_rates(rates), seen, self._history.largest_norms())
        held = ranges.held
        released = ranges.release(step, seen)
        self.state.intended = ranges.lasting_numbers(step, seen, after=LASTING_STEPS)
        ranges.follow_norms(step, self._history.typical_norms())
        if before := ranges.release_start_rates(step):
            self._restore_start_rates(before)
            self.run.log.info(
                f"step {step}: the learning rate is the program's own again; its limit was for the "
                "first steps"
            )
        if ranges.held != held:
            self.hold(ranges.held, step)
        if released:
            self.run.log.info(
                f"step {step}: {', '.join(released)}: the program's own value is in its healthy "
                "range again, and is used"
            )
        return bool(self.state.intended)

    def take_intended(self) -> dict[str, float]:
        """Name -> value of each held number that has turned out to be intended. Once each."""
        intended, self.state.intended = self.state.intended, {}
        return intended

    def hold(self, held: Held, step: int) -> None:
        """Holds this from `step` on, which is the next step, and nothing else."""
        self._withholds = held.withholds(step)
        self.state.ranges.held = held
        self._history.norm_limits = held.norm_limits
        driver, engine = self.run.driver, self.run.policy.engine
        limits, withhold = held.norm_limits, self._withholds
        driver.load(None, limit_norms(engine, driver.engines(), limits, withhold=withhold))
        driver.hold_numbers(held.number_ranges)
        self._earlier_numbers = {}

    def withholding_changes(self, step: int) -> bool:
        """Whether `step` is the first step whose update is withheld, or the first after these."""
        return self.state.ranges.held.withholds(step) != self._withholds

    def before_step(self, step: int) -> None:
        """Withholds the update of `step`, which is trained next, or does not, see `Held.withheld`.

        Call it after all earlier steps have been read, because it replaces the engines' states, and
        also if a `loss_fn` that failed has ended the comparisons: otherwise the updates would be
        withheld to the end of the run.
        """
        self.hold(self.held, step)

    def outside_ranges(self, verdict: Verdict) -> Held:
        """What was outside of its healthy range at the trouble of a verdict."""
        suspects = self._suspects(verdict)
        found = self._healthy_at(verdict.anchor).outside(
            broadcast(self.run.ranks, self._numbers()),
            {} if suspects is None else suspects.largest_norms(),
            intervals=(verdict.onset - verdict.anchor) / self.run.schedule.every,
            before=verdict.anchor,
        )
        return replace(found, until=verdict.index + 1)

    def about_older_weights(self, verdict: Verdict) -> Iterator[Verdict]:
        """The same verdict about each older anchor that is better too, the newest first.

        The newest better weights may already have a part of the trouble, such as a number that the
        program has set before their checkpoint and that shows its effect after it.
        """
        strong = self._threshold**RESTART_POWER
        for anchor in reversed(self.anchors):
            if anchor.step < verdict.anchor and anchor.evidence >= strong:
                yield verdict._replace(anchor=anchor.step)

    def unusual_batches(self, verdict: Verdict) -> list[int]:
        """Steps since the onset whose batches the better weights find unusual.

        A batch is unusual if its loss under the better weights exceeds the largest loss of the
        usual batches of all anchors from before the onset by more than their range. Where a limit
        of the gradient norm has not helped, the batches of the steps with an unusual norm are
        unusual too: the cause may be the batch, and its norm only a symptom. Collective.
        """
        suspects, anchor = self._suspects(verdict), self._anchor_of(verdict.anchor)
        if suspects is None or anchor is None:
            return []
        before = suspects.start - STEPS_BEFORE_SIGN
        limited = self.held.norms
        healthy = self._healthy_at(verdict.anchor)
        unusual = {i for i in suspects.with_unusual_norm(limited, healthy) if i >= anchor.step}
        ordinary_steps = {
            step.index: step for each in self.anchors for step in each.usual if step.index < before
        }
        usual = [*ordinary_steps.values()]
        steps = [step for step in suspects.steps if step.batches and step.index >= anchor.step]
        if not usual or not steps:
            return sorted(unusual)
        both = [*usual, *steps]
        losses = self._losses_of(both, anchor, [math.nan] * len(both))
        if losses is None:
            return sorted(unusual)
        _, under_better = losses
        ordinary, rest = under_better[: len(usual)], under_better[len(usual) :]
        limit = max(ordinary) + (max(ordinary) - min(ordinary))
        unusual |= {step.index for step, loss in zip(steps, rest, strict=True) if not loss <= limit}
        return sorted(unusual)

    def _healthy_at(self, step: int) -> HealthyValues:
        """What was known as healthy at the anchor of `step`, and later where it was unknown then.

        What was learnt later may be a part of trouble that had not shown yet.
        """
        anchor, values = self._anchor_of(step), self.state.ranges.values
        return values if anchor is None else values | anchor.healthy

    def _suspects(self, verdict: Verdict) -> Suspects | None:
        return self._history.suspects(verdict.onset, verdict.found)

    # -- checkpoints and restarts ---------------------------------------------------------------

    def to_save(self) -> ComparisonState:
        """What a record holds. The batches of the steps are not in it, see `batches_to_save`."""
        return replace(
            self.state,
            anchors=[anchor.to_save() for anchor in self.anchors],
            gives_loss=self.loss_function.gives_loss,
            credit=self._credit.left,
            history=self._history.to_text(),
            numbers=values.dumps({n: tuple(e) for n, e in self._numbers().items()}, _NUMBERS),
        )

    def batches_to_save(self) -> PackedValues | None:
        """The batches of the steps that a later comparison may evaluate, by step, or None.

        Without batches of types that have no plain form, and without those for which no room is
        left: a checkpoint must not grow much beyond the state.
        """
        if not self.is_enabled:
            return None
        sampled = [step for each in self.anchors for step in (*each.sample, *each.usual)]
        packed = PackedValues(MAX_BATCH_BYTES)
        for step in (*sampled, *self._history.steps_with_batches()):
            if step.batches and step.index not in packed:
                parts = [(batch.content, batch.weight) for batch in step.batches]
                packed.add(step.index, parts, _BATCHES)
        return packed

    def _numbers(self) -> dict[str, NumberRange]:
        """`Driver.numbers`, with their ranges in earlier processes since something was held."""
        seen = dict(self.run.driver.numbers())
        for name, earlier in self._earlier_numbers.items():
            now = seen.get(name, earlier)
            low, high = min(now.low, earlier.low), max(now.high, earlier.high)
            seen[name] = NumberRange(low, high, now.last)
        return seen

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
        verdict = saved.verdict if saved.verdict and saved.verdict.anchor in weights else None
        anchors = [anchor for anchor in saved.anchors if anchor.step in weights]
        self.state = replace(saved, anchors=anchors, verdict=verdict)
        self._history.forget(self.state.ranges.values.norms)
        self._history.norm_limits = self.held.norm_limits
        observed = {
            index: tuple(ObservedBatch(*part) for part in parts)
            for index, parts in (batches or {}).items()
            if self.is_enabled
        }
        steps = {index: TrainedStep(index, each) for index, each in observed.items()}
        if saved.history:
            steps |= self._history.restore(saved.history, observed)
        for anchor in anchors:
            anchor.weights = weights[anchor.step]
            anchor.restore_samples({i: each for i, each in steps.items() if each.batches})
        self.loss_function.gives_loss |= saved.gives_loss
        if saved.credit is not None:
            self._credit.left = saved.credit
        if self.is_enabled:  # without a `loss_fn` nothing is held, nor released
            self.hold(self.held, step)
        if saved.numbers and self.run.driver.state_is_in_place:
            found = values.loads(saved.numbers, _NUMBERS)
            self._earlier_numbers = {name: NumberRange(*each) for name, each in found.items()}

    def _anchor_of(self, step: int) -> Anchor | None:
        return next((anchor for anchor in self.anchors if anchor.step == step), None)

    def _forget_trouble(self) -> None:
        self.state.verdict = None
        self.state.intended = {}
        self.state.rates.clear()
        self.state.bursts.clear()
        self._credit.refill()
        self._dispatch_losses.clear()

    def _rates(self) -> dict[str, float]:
        """The learning rates of the last step that are known and finite."""
        rates = self.run.monitor.rates_in_force().items()
        return {name: rate for name, rate in rates if rate is not None and math.isfinite(rate)}

    def _best_on_average(self, index: int) -> Anchor | None:
        """The anchor with the lowest mean loss, if the mean loss is more than its spread above it.

        None for some steps after such a comparison without evidence, see `FIRST_PAUSE`.
        """
        if index < self.state.mean_quiet_until or (mean := self._history.mean()) is None:
            return None
        best = min(self.anchors, key=lambda anchor: anchor.level_or_inf, default=None)
        if best is None or index - best.step < SAMPLE_SIZE:
            return None
        return best if mean > best.level_or_inf + best.spread else None

    def _eligible_anchors(self, index: int, best: Anchor | None = None) -> list[Anchor]:
        """Anchors to compare with: the newest old enough one, `best`, and old ones with evidence.

        Weights of a few steps ago differ too little, and are as damaged as the current weights.
        After `SAMPLE_SIZE` steps an anchor's sample is full. A pending verdict has its own anchor.
        """
        if self.state.verdict is not None:
            return [anchor for anchor in self.anchors if anchor.step == self.state.verdict.anchor]
        age = max(SAMPLE_SIZE, min(self.run.schedule.every, int(MIN_AGE * index)))
        old = [anchor for anchor in self.anchors if index + 1 - anchor.step >= age]
        return [
            anchor
            for anchor in self.anchors
            if anchor is best or (anchor in old and (anchor is old[-1] or anchor.evidence > 1))
        ]

    def _compare(self, step: TrainedStep, loss: float, best: Anchor | None) -> Verdict | None:
        """Compares with each eligible anchor. Returns a verdict if the run has to roll back now."""
        if not (self.steps_are_windows or self.run.driver.may_save(self.run.schedule.every)):
            return None  # within an accumulation: the weights have not changed since the last step
        evaluations = 0
        verdict = None
        loss_fn = self.loss_function
        known = [loss] if loss_fn.gives_loss and not (loss_fn.draws or math.isnan(loss)) else None
        for anchor in self._eligible_anchors(step.index, best):
            compared = self._compare_with(anchor, step, known)
            if compared is None:
                return None
            evaluations += compared.evaluations
            if not math.isnan(compared.evidence):
                verdict = self._weigh(step.index, anchor, compared) or verdict
        if verdict is not None and step.index < verdict.due and not self._has_waited(verdict):
            self._postpone(verdict)
            verdict = None
        if not self.suspects:
            self.state.rates.clear()
        elif rates := self._rates():
            self.state.rates.append(rates)
        self._credit.charge(evaluations)
        return verdict

    def _compare_with(
        self, anchor: Anchor, step: TrainedStep, known: list[float] | None
    ) -> _Comparison | None:
        """Compares with one anchor, on the step and on a past step; returns None without losses."""
        losses = self._losses_of([step], anchor, known)
        if losses is None:
            return None
        [now], [then] = losses
        rise = _rise(now, then)
        evaluations = 1 + (known is None)
        if not 0 < rise < math.inf:
            return _Comparison(evaluations, rise, now - then)
        past = anchor.draw(MEDIAN_OF if anchor.evidence > 1 else 1)
        if not past:  # no batch was trained on since the anchor
            return _Comparison(evaluations)
        losses = self._losses_of(past, anchor)
        if losses is None:
            return None
        pairs = sorted(zip(*losses, strict=True), key=lambda pair: _rise(*pair))
        now_past, then_past = pairs[len(pairs) // 2]  # the median of one or three
        rise_past = _rise(now_past, then_past)
        if math.isclose(then, then_past, rel_tol=ROUNDING, abs_tol=0.0):
            rise_past = math.nan  # on equal batches an oscillation of the loss looks like damage
        lower = rise if rise < rise_past else rise_past  # NaN if `rise_past` is NaN
        return _Comparison(evaluations + 2 * len(past), lower, now - then, now_past - then_past)

    def _weigh(self, index: int, anchor: Anchor, compared: _Comparison) -> Verdict | None:
        """Updates an anchor's evidence. Returns a verdict if the evidence is sufficient."""
        anchor.learn(index, compared.evidence, is_retest=self.state.verdict is not None)
        if anchor.evidence >= self._threshold and self._has_learnt_since(anchor):
            anchor.evidence, anchor.onset = 1.0, None
        if anchor.evidence >= self._threshold:
            return self._verdict(index, self._newest_better(anchor), compared)
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
        first, mean = self.state.first_losses, self._history.mean()
        if anchor.step > self.run.record.first_step or mean is None or not first:
            return False
        return mean < sum(first) / len(first)

    def _newest_better(self, anchor: Anchor) -> Anchor:
        """The newest anchor up to the onset with `RESTART_POWER` of the threshold, or `anchor`.

        A rollback to it repeats fewer steps.
        """
        onset = anchor.step if anchor.onset is None else anchor.onset
        strong = self._threshold**RESTART_POWER
        better = [e for e in self.anchors if anchor.step < e.step <= onset and e.evidence >= strong]
        if not better:
            return anchor
        better[-1].onset = anchor.onset
        return better[-1]

    def _has_waited(self, verdict: Verdict) -> bool:
        """Whether the run was rolled back for this trouble: it has had its time to recover."""
        return bool(self.run.ledger.same_trouble(verdict.onset))

    def _postpone(self, verdict: Verdict) -> None:
        """Keeps a verdict pending until its step `due`."""
        self.state.verdict = verdict
        for other in self.anchors:
            other.evidence, other.onset = 1.0, None
            if other.step == verdict.anchor:
                other.onset, other.evidence = verdict.onset, self._threshold**RESTART_POWER
        self.run.log.assessment(verdict.index, verdict.onset, "worse")
        self.run.log.warning(
            f"step {verdict.index}: the weights of step {verdict.anchor} are better on the same "
            f"batches, since step {verdict.onset}; unless the run recovers, it rolls back to them "
            f"at step {verdict.due}, or at the end of the data"
        )

    def _verdict(self, index: int, anchor: Anchor, compared: _Comparison) -> Verdict:
        rises = [each if math.isfinite(each) else None for each in compared[2:]]
        verdict = self.state.verdict
        if verdict is None:
            onset = index if anchor.onset is None else anchor.onset
            for first, last in reversed(self.state.bursts):
                if last >= onset - STEPS_AFTER_SIGN:
                    onset = min(onset, first)
            verdict = Verdict(
                index=index,
                found=self._history.newest,  # at the end of the data, `index` has no step
                anchor=anchor.step,
                onset=max(onset, anchor.step),
                evidence=1.0,
                rise=None,
                rise_remembered=None,
                healthy_rates=self._highest_rates(anchor),
                rates=tuple(self.state.rates),
                losses=self._history.digest(anchor.step),
            )
        return verdict._replace(
            index=index, evidence=anchor.evidence, rise=rises[0], rise_remembered=rises[1]
        )

    def _highest_rates(self, anchor: Anchor) -> dict[str, float]:
        """Engine name -> highest healthy learning rate up to the anchor, as far as it is known.

        A rate has no room above its range, also if the program raises it steadily: then the rise
        itself is a suspect.
        """
        known = self._healthy_at(anchor.step).rates
        return {name: rates.high for name, rates in known.items()}

    def _losses_of(
        self, steps: Sequence[TrainedStep], anchor: Anchor, known: list[float] | None = None
    ) -> tuple[list[float], list[float]] | None:
        """`LossFunction.losses` of the current weights and an anchor's weights, or None."""
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


def _rise(now: float, then: float) -> float:
    """The current loss minus the loss of the earlier weights; NaN and Inf count as highest.

    NaN if neither loss is finite: a bad batch is no evidence.
    """
    if math.isfinite(then):
        return now - then if math.isfinite(now) else math.inf
    return -math.inf if math.isfinite(now) else math.nan
