"""`Dominance`: tests whether earlier weights are better than the current on the same batches.

A loss and a gradient norm do not distinguish a damaged model from different data. Two sets of
weights on the same batch do: a new term of the loss, another scale of the targets or a new task
changes both losses alike. So the current weights are compared with earlier weights (anchors) on the
batch of the step and on one batch trained on since the anchor. If the earlier weights are better on
both, at comparison after comparison, the run rolls back to them.

docs/how-it-decides.md has the theorem and the limits of the comparison.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from healcore.core.signals import SignalError, check_scalar
from healcore.core.verdict import Cause
from healcore.runtime.dominance.anchor import (
    SAMPLE,
    Anchor,
    TrainedStep,
    rise_of,
    same_data,
)
from healcore.runtime.dominance.exchange import exchange
from healcore.runtime.dominance.history import BEFORE, HEARTBEAT, History, Seen
from healcore.runtime.dominance.saved import SavedComparisons, SavedVerdict
from healcore.runtime.dominance.side_effects import undone
from healcore.runtime.driver import Driver, WeightsChanged
from healcore.runtime.faults import classify
from healcore.runtime.healthy_range import HealthyRange
from healcore.runtime.run_log import RunLog
from healcore.runtime.store.ranks import Ranks

MAX_ANCHORS = 3
"""Max number of anchors."""
MIN_AGE = 0.5
"""Min age of a compared anchor, as a share of the run so far, up to one checkpoint interval."""
RESTART_POWER = 0.5
"""While a verdict is pending, the evidence restarts at this power of the threshold."""
MAX_SHARE = 0.01
"""Max share of a healthy run's time that comparisons may cost."""
STEP_COST = 3.0
"""Cost of a training step in evaluations: a forward pass, and a backward pass of twice its cost."""
MAX_CREDIT = 30.0
"""Max credit of evaluations: the cost of 1,000 steps. A run starts with this credit, because a
learning rate that is too high shows in the first steps."""
MAX_DEBT = 40.0
"""Max debt of evaluations after a suspicion: ten comparisons, half of what a verdict needs."""
PRICED = 3
"""Last comparisons, of which the cheapest sets the price: the first ones compile."""
SAME_LOSS = 1e-3
"""Relative difference up to which two losses of one batch are equal, in half precision too."""


class Verdict(NamedTuple):
    """The finding that earlier weights are better than the current weights."""

    index: int
    """Step of the rollback."""
    found: int
    """First step with enough evidence."""
    anchor: int
    """Step of the earlier weights."""
    onset: int
    """First step of the trouble: its first alarm, or the first comparison that found it."""
    evidence: float
    """Lower bound on the mean number of comparisons until a healthy run has this evidence."""
    rise: float
    """Loss of the step's batch, current minus earlier weights."""
    rise_remembered: float
    """The same difference for a batch trained on since the anchor."""
    healthy_rate: float
    """Highest learning rate at which the run was healthy, or 0 if unknown."""
    rates: tuple[float, ...]
    """Learning rates in force at the comparisons that found the trouble; empty if unknown."""

    @property
    def due(self) -> int:
        """Step at which the run rolls back unless it has recovered.

        The run waits as many steps as the rollback repeats, those from the anchor to the onset. A
        run that recovers earlier loses fewer steps than by the rollback. A run that does not
        recover loses about twice as many (rent or buy: Karlin et al. 1988, "Competitive snoopy
        caching"). Thus a learning rate that is raised on purpose gets time to recover.
        """
        return self.onset + (self.onset - self.anchor)


@dataclass(eq=False, kw_only=True)
class Dominance:
    """Compares the current weights with earlier weights, and returns a verdict if these are better.

    Several ranks call the same methods with the same steps, compare their own batches and decide
    by the mean. Comparisons are collective, so they depend only on values that are equal on all
    ranks: reduced losses, alarms and the price. A `loss_fn` that raises is not called again: it
    must not end the run that it protects. Exception: see `exchange`.
    """

    driver: Driver
    loss_fn: Callable[..., Any] | None
    ranks: Ranks
    threshold: float
    """Evidence for a rollback: `[rollback] evidence` of the policy."""
    interval: int
    """Steps between two checkpoints."""
    warn: Callable[[str], object]
    log: RunLog
    learning_rate: Callable[[], float | None]
    """The learning rate in force, or None if it is unknown."""
    numbers: Callable[[], Mapping[str, float]] = dict
    """Other numbers of the optimizers in force, by name."""
    anchors: list[Anchor] = field(default_factory=list, init=False)
    """At most `MAX_ANCHORS`, oldest first: the weights with the lowest mean loss when they were
    copied, and those at the last two checkpoints. The first weights of a process have no mean: they
    stay for two checkpoints, and for as long as they have evidence."""
    silent_until: int = field(default=0, init=False)
    """Step before which weights are neither compared nor copied."""
    gives_loss: bool = field(default=False, init=False)
    """Whether the training loss is the result of `loss_fn`. Comparisons then do not evaluate the
    current weights again. True if the loop calls `Healer.loss`, or if the first training loss is
    equal to `loss_fn` of its batch."""
    draws: bool = field(default=False, init=False)
    """Whether `loss_fn` draws random numbers. The training loss had other numbers than a comparison
    has, so both weights are evaluated."""

    def __post_init__(self) -> None:
        self._checked = False
        self._expected: float | None = None
        """Result of `loss_fn` for the first batch before the first step, or None."""
        self.history = History()
        self._healthy_rate = 0.0
        self._rates: list[float] = []
        """Learning rates in force at the comparisons of the current suspicion."""
        self._numbers: dict[str, HealthyRange] = {}
        """Values of the optimizers' numbers since the suspicion began, or in repeated steps."""
        self._alarms = (-1, -1)
        """First and last step of the latest alarms, with gaps of at most `SAMPLE` steps."""
        self._wanted = False
        self._mean_quiet_until = 0
        """Step before which a high mean loss is no reason to compare: it was compared."""
        self._pending_verdict: Verdict | None = None
        """The pending verdict, until the run rolls back or recovers, or None."""
        self._dispatch_losses: list[float] = []
        """Losses of the steps of the current dispatch."""
        self._credit = MAX_CREDIT
        self._price = 1
        self._prices: deque[int] = deque([1] * PRICED, maxlen=PRICED)
        self._step_s = 0.0
        self._last_time: float | None = None

    # -- what the loop calls --------------------------------------------------------------------

    @property
    def is_enabled(self) -> bool:
        """Whether weights are compared, which requires a `loss_fn`."""
        return self.loss_fn is not None

    @property
    def suspects(self) -> bool:
        """Whether an anchor has evidence, or a verdict is pending."""
        return self._pending_verdict is not None or any(each.evidence > 1 for each in self.anchors)

    def check_loss_fn(self, batch: Any) -> None:
        """Calls `loss_fn` on the first batch.

        With several ranks, and after another mistake, `observe` makes this call at the first step,
        because the loop may skip the first batch.

        Raises:
            SignalError: `loss_fn` changes its batch.
        """
        if self.loss_fn is None or self._checked or self.ranks.world > 1:
            return  # with several ranks, one rank may evaluate alone before the first step
        self._check(batch, trained=False)

    def keep(self, step: int, restorable: Container[int]) -> None:
        """Adds the current weights as an anchor, unless they are suspect.

        Drops anchors of steps that are not in `restorable`, the steps of the checkpoints.
        """
        if not self.is_enabled or self.suspects or step < self.silent_until:
            return
        rate = self._rate()
        self._healthy_rate = max(self._healthy_rate, rate or 0.0)
        self.anchors = [each for each in self.anchors if each.step in restorable]
        if step not in restorable or any(each.step == step for each in self.anchors):
            return
        new = Anchor(step, self.driver.copy_weights(), rate)
        new.level, new.spread = self.history.level() or (math.inf, 0.0)
        new.numbers = self._with_numbers(self.anchors[-1].numbers if self.anchors else {})
        older = self.anchors[:-1]
        if len(self.anchors) == MAX_ANCHORS:
            older = [min(older, key=lambda each: (each.level, -each.step))]
        self.anchors = [*older, *self.anchors[-1:], new]

    def observe(
        self,
        step: TrainedStep,
        loss: float,
        *,
        alarm: bool,
        trained: bool,
        norm: float = math.nan,
        repeated: bool = False,
    ) -> Verdict | None:
        """Compares weights after a step if there is a reason.

        The reasons: an alarm, a loss above the last hundred, a mean loss above the best copy's mean
        by more than its spread, and the regular distance.

        Args:
            step: the step and its batches. In a dispatch of several steps the last step has the
                batches of all steps, and the others have none.
            loss: the step's training loss, the mean over its batches and over all ranks; or NaN.
            alarm: whether a detector has raised an alarm.
            trained: whether the step was not skipped.
            norm: the step's gradient norm, or NaN.
            repeated: whether a trial repeats the step.

        Returns:
            A verdict if the run has to roll back, or None.
        """
        if not self.is_enabled:
            return None
        self._credit = min(MAX_CREDIT, self._credit + MAX_SHARE * STEP_COST)
        self._update_step_time()
        self._numbers = self._with_numbers(self._numbers) if repeated or self.suspects else {}
        if alarm:
            first, last = self._alarms
            self._alarms = (first if step.index - last <= SAMPLE else step.index, step.index)
        sign = alarm or self.history.is_high(loss)
        is_first = self.history.add(Seen(step, loss, norm), sign=sign, healthy=not self.suspects)
        if is_first and alarm:  # an alarm after a quiet time is compared even on debt
            self._credit = max(self._credit, 1.0)
        heartbeat = step.index % (HEARTBEAT * self._price) == HEARTBEAT - 1
        best = self._best_below(step.index)
        self._wanted |= sign or heartbeat or best is not None
        self._dispatch_losses.append(loss)
        if not step.batches:
            return None
        if not self._checked:
            self._check(step.batches[0].content, trained=True)
            self._expected = self._predict_loss(step)
        if self._expected is not None:  # the first step after the check, on the same batch
            same = len(step.batches) == 1 and math.isclose(loss, self._expected, rel_tol=SAME_LOSS)
            self.gives_loss |= same and len(self._dispatch_losses) == 1
        self._expected = None
        wanted, self._wanted = self._wanted and self._credit > 0, False
        loss = sum(self._dispatch_losses) / len(self._dispatch_losses)
        self._dispatch_losses.clear()
        verdict = None
        if self._pending_verdict is not None:
            if step.index >= self._pending_verdict.due:
                verdict = self._compare(step, loss)
        elif step.index >= self.silent_until and (wanted or self.suspects):
            verdict = self._compare(step, loss, best)
            if best is not None and best.evidence <= 1:
                self._mean_quiet_until = step.index + HEARTBEAT
        if trained:
            for each in self.anchors:
                each.add(step)
        return verdict

    def pending(self, index: int) -> Verdict | None:
        """The verdict that waits for a recovery, at step `index`, or None if no verdict waits."""
        verdict = self._pending_verdict
        return None if verdict is None else verdict._replace(index=index)

    def at_end(self, index: int) -> Verdict | None:
        """Decides about a pending verdict at the end of the run, after which no step can recover.

        Returns:
            The verdict with `index`, if the anchor's mean loss on its sampled batches is lower.
        """
        if self._pending_verdict is None or not self.is_enabled:
            return None
        [anchor] = self._eligible_anchors(index)
        losses = self._losses_of(anchor.sample, anchor)
        is_better = losses is not None and rise_of(*map(sum, losses)) > 0
        return self._pending_verdict._replace(index=index) if is_better else None

    def on_rollback(self, target: int) -> None:
        """Drops all evidence, and the anchors and samples from step `target` on."""
        self.anchors = [each for each in self.anchors if each.step <= target]
        for each in self.anchors:
            each.forget()
            each.sample = [one for one in each.sample if one.index < target]
            each.trained = max(target - each.step, len(each.sample))
        self._forget_trouble()
        self.history.forget()

    def accept(self, until: int) -> None:
        """Drops copies and losses, and compares and copies no weights before step `until`."""
        self.silent_until = max(self.silent_until, until)
        self.anchors.clear()
        self._forget_trouble()
        self.history.forget()

    def unusual(self, verdict: Verdict) -> list[int]:
        """Steps at the onset that are unusual: batches for the better weights, or gradient norms.

        A batch is unusual if its loss exceeds the largest loss of ordinary batches, a sample from
        before the onset, by more than their range. Collective.
        """
        window = self.history.window(verdict.onset, verdict.found)
        anchor = next((each for each in self.anchors if each.step == verdict.anchor), None)
        if window is None or anchor is None:
            return []
        found = window.norms_above()
        usual = [each for each in anchor.sample if each.index < window.start - BEFORE]
        steps = [each.step for each in window.steps if each.step.batches]
        steps = [each for each in steps if each.index >= anchor.step]
        both = [*usual, *steps]
        losses = self._losses_of(both, anchor, [math.nan] * len(both)) if usual and steps else None
        if losses is not None:
            ordinary, rest = losses[1][: len(usual)], losses[1][len(usual) :]
            limit = max(ordinary) + (max(ordinary) - min(ordinary))
            pairs = zip(steps, rest, strict=True)
            found |= {each.index for each, loss in pairs if not loss <= limit}
        return sorted(found)

    def unusual_numbers(self, verdict: Verdict) -> dict[str, HealthyRange]:
        """Healthy values of the numbers that had other values in the steps of the trouble."""
        anchor = next((each for each in self.anchors if each.step == verdict.anchor), None)
        healthy = {} if anchor is None else anchor.numbers
        return {
            name: healthy[name]
            for name, seen in self._numbers.items()
            if name in healthy and not all(map(healthy[name].contains, seen))
        }

    # -- saving ---------------------------------------------------------------------------------

    def saved(self) -> SavedComparisons:
        """What a restart needs to continue."""
        verdict = self._pending_verdict
        return SavedComparisons(
            copies=[each.saved() for each in self.anchors],
            healthy_rate=self._healthy_rate,
            rates=list(self._rates),
            alarms=self._alarms,
            verdict=verdict
            and SavedVerdict(
                verdict.found, verdict.anchor, verdict.onset, verdict.evidence, list(verdict.rates)
            ),
            numbers=self._numbers,
        )

    def continue_from(self, saved: SavedComparisons, weights: Mapping[int, Any]) -> None:
        """Continues an earlier process; `weights` are copies by the step of their checkpoint.

        A copy without weights is dropped, and with it a verdict about it.
        """
        self.anchors = [
            Anchor.of(each, weights[each.step]) for each in saved.copies if each.step in weights
        ]
        self._healthy_rate, self._rates = saved.healthy_rate, list(saved.rates)
        self._alarms, self._numbers = saved.alarms, saved.numbers
        verdict = saved.verdict
        if verdict is not None and verdict.anchor in weights:
            self._pending_verdict = Verdict(
                index=verdict.found,
                found=verdict.found,
                anchor=verdict.anchor,
                onset=verdict.onset,
                evidence=verdict.evidence,
                rise=math.nan,
                rise_remembered=math.nan,
                healthy_rate=saved.healthy_rate,
                rates=tuple(verdict.rates),
            )

    # -- within ---------------------------------------------------------------------------------

    def _check(self, batch: Any, *, trained: bool) -> None:
        """Calls `loss_fn` twice with the same random numbers, and once with others.

        `trained` says whether the loop has trained on the batch.

        Raises:
            SignalError: `loss_fn` changes the batch. If trained: it raises, or does not return one
                number. An exception about memory, data or the network is only a warning.
        """
        assert self.loss_fn is not None
        losses, mistake, problem, failure, state, draws = [], None, None, None, None, False
        try:
            attempt = undone()(self.driver.try_loss_fn)
            with undone(self.loss_fn):
                for redraw in (False, False, True):
                    losses.append(attempt(self.loss_fn, batch, redraw=redraw))
            first, second, third = (float(check_scalar("loss_fn(batch)", each)) for each in losses)
            self._expected, draws = first, first != third
            if abs(first - second) > SAME_LOSS * max(abs(first), SAME_LOSS):  # False for NaN
                state = (
                    f"loss_fn gives {first:.6g} and then {second:.6g} for the same batch, because "
                    "it keeps state or draws from a generator of its own: no weights are compared. "
                    "Change such state in the loop, and draw from the global generators"
                )
        except SignalError as error:
            mistake, failure = str(error), error
            trained |= not losses  # the function changes its batch
        except Exception as error:
            failure = error
            problem = f"loss_fn raised {type(error).__name__} on the first batch: {error}"
            if classify(error).cause is Cause.UNKNOWN:
                how = "loss_fn(batch), or in JAX with a pytree as state loss_fn(state, batch)"
                mistake = (
                    f"{problem}\nThe Healer calls {how}, with a batch of healer.batches(), and "
                    "expects one number: correct the function, or pass no loss_fn"
                )
        if mistake and not trained:
            return
        self._checked = True
        everyone = exchange(self.ranks, (mistake, problem, state, draws), failure)
        mistakes, problems, states, drawing = (
            [*filter(None, each)] for each in zip(*everyone, strict=True)
        )
        self.draws = bool(drawing)
        if mistakes:
            raise SignalError(mistakes[0]) from failure
        if problems or states:
            self._expected = None
            self.warn((states or problems)[0])
        if states:
            self.loss_fn = None
            self.anchors.clear()

    def _predict_loss(self, first: TrainedStep) -> float | None:
        """Result of `loss_fn` for the first step, with several ranks; None with one rank."""
        start = next((each for each in self.anchors if each.step == first.index), None)
        if self.ranks.world == 1 or self._expected is None or start is None:
            return None
        losses = self._losses_of([first], start, [math.nan])
        return None if losses is None else losses[1][0]

    def _forget_trouble(self) -> None:
        self._pending_verdict = None
        self._rates.clear()
        self._numbers = {}
        self._credit = MAX_CREDIT
        self._dispatch_losses.clear()
        self._alarms = (-1, -1)

    def _rate(self) -> float | None:
        """The learning rate in force, or None if it is unknown or not finite."""
        rate = self.learning_rate()
        return rate if rate is not None and math.isfinite(rate) else None

    def _with_numbers(self, before: Mapping[str, HealthyRange]) -> dict[str, HealthyRange]:
        """The ranges `before`, extended by the values in force."""
        now = self.numbers().items()
        return {**before, **{name: HealthyRange.of(each, before.get(name)) for name, each in now}}

    def _best_below(self, index: int) -> Anchor | None:
        """The copy with the lowest mean loss, if the mean loss is above it by more than its spread.

        None within `HEARTBEAT` steps after such a comparison without evidence.
        """
        level = self.history.level()
        if level is None or index < self._mean_quiet_until:
            return None
        best = min(self.anchors, key=lambda each: each.level, default=None)
        if best is None or index - best.step < SAMPLE:
            return None
        return best if level[0] > best.level + best.spread else None

    def _eligible_anchors(self, index: int, best: Anchor | None = None) -> list[Anchor]:
        """The anchors to compare with: the newest that is old enough, `best`, and with evidence.

        Weights of a few steps ago differ too little, and are as damaged as the current weights.
        After `SAMPLE` steps the sample of an anchor is full. A pending verdict has its own anchor.
        """
        if self._pending_verdict is not None:
            return [each for each in self.anchors if each.step == self._pending_verdict.anchor]
        age = max(SAMPLE, min(self.interval, int(MIN_AGE * index)))
        old = [each for each in self.anchors if index - each.step >= age]
        return [
            each
            for each in self.anchors
            if each is best or (each in old and (each is old[-1] or each.evidence > 1))
        ]

    def _compare(
        self, step: TrainedStep, loss: float, best: Anchor | None = None
    ) -> Verdict | None:
        """Compares with each eligible anchor. Returns a verdict if the run has to roll back now."""
        if not self.driver.may_save():
            return None  # within an accumulation: the weights have not changed since the last step
        began, evaluations = time.monotonic(), 0
        verdict = None
        for anchor in self._eligible_anchors(step.index, best):
            gives_loss = self.gives_loss and not (self.draws or math.isnan(loss))
            known = [loss] if gives_loss else None
            losses = self._losses_of([step], anchor, known)
            if losses is None:
                return None
            [now], [then] = losses
            evaluations += 1 + (known is None)
            if not math.isfinite(now) and not math.isfinite(then):
                continue  # a bad batch is no evidence
            rise, remembered = rise_of(now, then), math.nan
            past = anchor.draw() if 0 < rise < math.inf else None
            if past is not None:
                losses = self._losses_of([past], anchor)
                if losses is None:
                    return None
                [now_past], [then_past] = losses
                evaluations += 2
                if not math.isfinite(now_past) and not math.isfinite(then_past):
                    continue  # a bad batch is no evidence
                if same_data(then, then_past):
                    continue  # on equal batches an oscillation of the loss looks like damage
                rise, remembered = min(rise, rise_of(now_past, then_past)), now_past - then_past
            elif 0 < rise < math.inf:
                continue  # no batch was trained on since the anchor
            anchor.learn(step.index, rise)
            if anchor.evidence >= self.threshold:
                newest = self._newest_better(anchor)
                verdict = self._verdict(step.index, newest, now - then, remembered)
            elif self._pending_verdict is not None and anchor.evidence <= 1:
                self._report_recovery(step.index)
        if verdict is not None and step.index < verdict.due:
            self._postpone(verdict)
            verdict = None
        if not self.suspects:
            self._rates.clear()
        elif (rate := self._rate()) is not None:
            self._rates.append(rate)
        self._charge(evaluations, time.monotonic() - began)
        return verdict

    def _newest_better(self, anchor: Anchor) -> Anchor:
        """The newest copy from before the trouble with half of a verdict's wins, or `anchor`.

        A rollback to it repeats fewer steps.
        """
        onset = anchor.onset or anchor.step
        strong = self.threshold**RESTART_POWER
        better = [e for e in self.anchors if anchor.step < e.step <= onset and e.evidence >= strong]
        if not better:
            return anchor
        better[-1].onset = anchor.onset
        return better[-1]

    def _postpone(self, verdict: Verdict) -> None:
        """Keeps a verdict pending until its step `due`."""
        self._pending_verdict = verdict
        for each in self.anchors:
            each.forget()
            if each.step == verdict.anchor:
                each.onset, each.evidence = verdict.onset, self.threshold**RESTART_POWER
        self._log(verdict.index, "worse", verdict.onset)
        self.log.warning(
            f"step {verdict.index}: the weights of step {verdict.anchor} are better on the same "
            f"batches, since step {verdict.onset}; unless the run recovers, it rolls back to them "
            f"at step {verdict.due}, or at the end of the data"
        )

    def _report_recovery(self, index: int) -> None:
        assert self._pending_verdict is not None
        self._log(index, "recovered", self._pending_verdict.onset)
        self.log.info(
            f"step {index}: the run has recovered from the damage of step "
            f"{self._pending_verdict.onset}"
        )
        self._forget_trouble()

    def _log(self, index: int, verdict: str, onset: int) -> None:
        self.log.event(
            "assessment", step=index, onset=onset, cause=[], verdict=verdict, by="earlier_weights"
        )

    def _verdict(self, index: int, anchor: Anchor, rise: float, remembered: float) -> Verdict:
        if self._pending_verdict is not None:
            return self._pending_verdict._replace(
                index=index, evidence=anchor.evidence, rise=rise, rise_remembered=remembered
            )
        onset = index if anchor.onset is None else anchor.onset
        first, last = self._alarms
        if last >= onset - SAMPLE:
            onset = min(onset, first)
        onset = max(onset, anchor.step)
        return Verdict(
            index=index,
            found=index,
            anchor=anchor.step,
            onset=onset,
            evidence=anchor.evidence,
            rise=rise,
            rise_remembered=remembered,
            healthy_rate=max(self._healthy_rate, anchor.learning_rate or 0.0),
            rates=tuple(self._rates),
        )

    def _losses_of(
        self, steps: Sequence[TrainedStep], anchor: Anchor, known: list[float] | None = None
    ) -> tuple[list[float], list[float]] | None:
        """Evaluates steps with the current weights and with the weights of an anchor.

        Args:
            steps: the steps, with their batches.
            anchor: the earlier weights.
            known: losses of the steps with the current weights, or None to evaluate these.

        Returns:
            Two lists with one loss per step, current and earlier weights, each the mean over all
            ranks; or None if the `loss_fn` raises on some rank. None too if the parameters have
            changed since the anchor, which is dropped: the next checkpoint makes a new anchor.
        """
        assert self.loss_fn is not None
        batches = [each.content for step in steps for each in step.batches]
        mine: tuple[list[float], list[float]] | str | None
        failure = None
        try:
            now = known or _mean_losses(self._evaluated(batches, None), steps)
            mine = (now, _mean_losses(self._evaluated(batches, anchor.weights), steps))
        except WeightsChanged:
            mine = None
        except Exception as error:
            mine, failure = f"{type(error).__name__}: {error}", error
        everyone = exchange(self.ranks, mine, failure)
        if None in everyone:
            self.anchors.remove(anchor)
            if self._pending_verdict is not None:
                self._forget_trouble()
            return None
        failed = [each for each in everyone if isinstance(each, str)]
        if failed:
            self.loss_fn = None
            self.anchors.clear()
            self.warn(f"loss_fn raised {failed[0]}; it is not called again")
            return None
        now, then = (
            [float(sum(each)) / len(everyone) for each in zip(*part, strict=True)]
            for part in zip(*everyone, strict=True)
        )
        return now, then

    def _evaluated(self, batches: Sequence[Any], weights: Any) -> list[float]:
        assert self.loss_fn is not None
        with undone():
            losses = self.driver.losses_of(self.loss_fn, batches, weights)
        return [float(check_scalar("loss_fn(batch)", loss)) for loss in losses]

    # -- the budget -----------------------------------------------------------------------------

    def _update_step_time(self) -> None:
        """Updates the time of a step without comparison, a moving average over a heartbeat."""
        now = time.monotonic()
        if self._last_time is not None:
            taken = now - self._last_time
            self._step_s += (taken - self._step_s) * (1 / HEARTBEAT if self._step_s else 1.0)
        self._last_time = now

    def _charge(self, evaluations: int, seconds: float) -> None:
        """Subtracts evaluations from the credit, and measures the price of an evaluation.

        The price only lengthens the regular distance: comparisons at alarms do not depend on the
        clock, so that a repeated run makes the same comparisons.
        """
        self._credit = max(-MAX_DEBT, self._credit - evaluations)
        self._last_time = None
        if not evaluations:
            return
        share = STEP_COST * seconds / evaluations / self._step_s if self._step_s else 1.0
        price = 1 << max(0, round(math.log2(max(share, 1.0))))
        self._prices.append(max(self.ranks.gather(price)))  # times differ between ranks
        self._price = min(self._prices)


def _mean_losses(losses: Sequence[float], steps: Sequence[TrainedStep]) -> list[float]:
    """The mean loss of each step, from the losses of all their batches in order."""
    remaining, means = iter(losses), []
    for step in steps:
        total = sum(each.weight * loss for each, loss in zip(step.batches, remaining, strict=False))
        means.append(total / sum(each.weight for each in step.batches))
    return means
