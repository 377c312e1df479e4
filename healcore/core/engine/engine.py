"""`Engine`: a pure function from signals to one decision, the same source for every backend.

    signals -> check -> detectors -> rules -> skip -> clipping rule -> factor -------.
                                         |                                           |
                                         '-> incidents, budget -> learning rate -> Decision

Each part judges a value before it learns the value. The skip is decided before the clipping rule
learns the norm, and the budget is checked before an order is given.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from healcore.core.array_namespace import (
    FLOAT32_MAX,
    FLUSH,
    Flag,
    Float,
    Int,
    Norms,
    one_like,
    xp,
    zero_like,
)
from healcore.core.clipping import Clip, scale_to
from healcore.core.decision import NONFINITE, Action, Cause, Decision
from healcore.core.engine import rate as rates
from healcore.core.engine.config import (
    EngineConfig,
    may_limit_rate,
    table_differences,
    tables_of,
)
from healcore.core.engine.incident import update_incident
from healcore.core.engine.rule import RuleState, update_rule
from healcore.core.engine.state import FROZEN, EngineState, init
from healcore.core.signals import CheckedSignals, Signals, check_signals
from healcore.core.trees import StateError, from_json_data, select, to_json_data

SCHEMA = 12
"""Version of the saved form of a state."""
_MAX_GROUPS = 10_000_000
_NONFINITE = int(NONFINITE)
_ORDERED_ONCE = int(Action.ALERT | Action.SAVE | Action.STOP)
"""Flags of the actions that a rule orders once, not at each step of the same trouble."""


class Engine:
    """The state machine of one policy: `init`, then one `step` per training step.

    The engine holds no state. `step` is a pure function of (policy, state, signals). It can be
    jitted, scanned, vmapped, compiled and replayed. Arrays may have leading batch axes, and each
    lane is then an independent run.

    These attributes say what a run with the policy needs. They are fixed when the engine is made:

        attribute            True if                                        read by
        per_tensor           clipping is per tensor: `Signals.group_norms`  all packages
        clips_at_fixed_norm  the clipping rule is one fixed limit           adapters
        scales_grads         a step may clip, or limit the gradient norm    adapters
        limits_norm          `step` applies `EngineState.norm_limit`        adapters
        cuts_lr              a rule can cut the learning rate               this class only
        limits_lr            the rate may get a limit (`limit_lr`)          adapters, runtime
        scales_lr            `Decision.lr_scale` can differ from 1          adapters, runtime
        resets_moments       a cut of the rate resets the moments           adapters
        skips_bad_loss       a loss that is not finite skips the step       torch adapter
        tests_only_finite    a step can be judged after it was taken        torch adapter, CLI

    """

    def __init__(self, config: EngineConfig, *, limits_norm: bool = True) -> None:
        """Builds the engine of one policy, which is usually from `healcore.policy`.

        Args:
            config: the policy.
            limits_norm: whether `step` applies a limit that `limit_norm` has set. False for states
                that never get one: replays, and the engines of `specialised_for`.
        """
        rules, clip = config.rules, config.clip
        self.config, self.mode = config, config.mode
        self.per_tensor = clip is not None and clip.per_tensor
        self.clips_at_fixed_norm = clip is not None and clip.is_fixed
        self.limits_norm = limits_norm
        # Attributes, because Dynamo cannot trace the lock of Python 3.11's `cached_property`.
        self.cuts_lr = any(rule.action & Action.CUT_LR for rule in rules)
        self.limits_lr = may_limit_rate(config.lr)
        """A limit of the rate needs `Signals.learning_rate`."""
        self.scales_lr = self.cuts_lr or self.limits_lr
        self.tests_only_finite = self._tests_only_finite()
        """Whether each decision to enforce follows from the step alone: from a test for NaN and
        Inf, and from a fixed clip. Such a step can be judged after it was taken, because the state
        changes nothing in it. In observe mode no decision is enforced. False for a policy that
        clips per tensor, whose judge reads a norm of each tensor.
        """
        self.skips_bad_loss = any(r.skip and r.causes & Cause.NONFINITE_LOSS for r in rules)
        """A gradient that is not finite always skips the step."""
        self.resets_moments = config.lr.reset_moments and self.cuts_lr and self.mode != "observe"
        """False in observe mode, which enforces nothing."""
        self.scales_grads = clip is not None or limits_norm
        """If False, `Decision.grad_scale` and `group_scale` are always 1."""
        self._specialised: dict[tuple[bool, bool], Engine] = {}
        """Engines of `specialised_for`, by whether they limit the rate, and the gradient norm."""

    def _tests_only_finite(self) -> bool:
        if self.per_tensor:
            return False
        if self.mode == "observe":
            return True
        for rule in self.config.rules:
            is_immediate = type(rule.consecutive) is int and rule.consecutive == 1
            if rule.skip and (
                rule.causes & ~_NONFINITE or rule.sustained or rule.within or not is_immediate
            ):
                return False
        clips_by_state = self.config.clip is not None and not self.clips_at_fixed_norm
        return not (clips_by_state or self.scales_lr or self.limits_norm)

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits, equal for equal numbers within one release of healcore.

        Saved states and reports name the policy by it, whatever its file is called.
        """
        return hashlib.sha256(json.dumps(self._tables).encode()).hexdigest()[:16]

    @cached_property
    def _tables(self) -> dict[str, Any]:
        return tables_of(self.config)

    @cached_property
    def needs(self) -> frozenset[str]:
        """The `Signals` fields that the policy reads; a detector is inactive without its signal."""
        names = {"loss", "grad_norm"}  # each of them is tested for NaN and Inf
        if self.per_tensor:
            names.add("group_norms")
        for _, detector in self.config.detectors:
            names.update(detector.NEEDS)
        return frozenset(names)

    def init(self, *, groups: int = 0, batch: tuple[int, ...] = ()) -> EngineState:
        """The state before the first step, as NumPy arrays.

        Args:
            groups: number of tensors, for per-tensor clipping.
            batch: leading axes, to run many independent engines at once.
        """
        return init(self.config, groups=groups, batch=batch)

    def step(self, state: EngineState, signals: Signals) -> tuple[EngineState, Decision]:
        """Judges one step.

        Args:
            state: from `init` or the previous step.
            signals: at least a loss or a gradient norm.

        Returns:
            The new state, and the decision to enforce. In observe mode the decision is neutral, and
            `state.last.decision` holds the ordered decision.

        Raises:
            ValueError: the signals have neither a loss nor a gradient norm.

        Examples:
            >>> import numpy as np
            >>> from healcore.core.signals import Signals
            >>> from healcore.policy import engine_of
            >>> engine = engine_of("default")
            >>> signals = Signals(loss=np.float32(2.0), grad_norm=np.float32("nan"))
            >>> state, decision = engine.step(engine.init(), signals)
            >>> bool(decision.skip)
            True
        """
        if signals.loss is None and signals.grad_norm is None:
            raise ValueError(
                "a step needs a loss or a gradient norm, got neither: pass Signals(loss=...) or "
                "Signals(grad_norm=...)"
            )
        # NumPy warns of invalid values that `where` discards later.
        with np.errstate(all="ignore"):
            new, decision = self._judge(state, signals)
            skipped = signals.externally_skipped
            if skipped is not None:
                new = self._without_step(state, new, signals, skipped)
                neutral = _neutral(decision, state.lr.scale, decision.cause & 0)
                decision = select(skipped, neutral, decision)
            if self.mode == "observe":
                decision = _neutral(decision, one_like(decision.lr_scale), decision.cause)
        return new, decision

    def _judge(self, state: EngineState, signals: Signals) -> tuple[EngineState, Decision]:
        """The new state, and the decision as the policy orders it, in any mode."""
        config, last, clips = self.config, state.last, self.config.clip is not None
        # What the step shows, and what the detectors find in it.
        change_expected = state.change_expected
        if signals.change_expected is not None:
            change_expected = change_expected | signals.change_expected
        change_expected = xp.shared(change_expected)
        grace = xp.where(change_expected, config.grace_steps, xp.decremented(state.grace))
        seen = check_signals(signals, change_expected, last, clips=clips)
        detectors, alarms, lasting, z_loss = self._detect(state, seen, grace <= 0)
        cause: Int = alarms | lasting

        # What the rules ask for, and whether the step is skipped.
        rules, wants_skip, wants_rollback, wants_cut, action = self._ask(state, alarms, lasting)
        wants_skip, streak = self._limit_skips(state.finite_skip_streak, wants_skip, seen.bad)
        skip_by_rules = skip = xp.shared(wants_skip | seen.bad_grad)
        if self.limits_norm:
            skip = skip | (state.norm_limit == FROZEN)

        # The factors on the gradients. The clipping rule learns no norm of a skipped step.
        clip_state, clip = state.clip, None
        if self.per_tensor:
            norms = seen.group_norms
        else:
            norms = seen.grad_norm
        if clips and norms is not None and seen.grad_norm is not None:
            clip_state, clip = config.clip.update(state.clip, seen, seen.finite & ~skip)
        grad_scale, group_scale, clipped = self._scales(state, signals, skip, clip)

        # The recovery that the budget allows, and the learning rate.
        incident, budget, orders = update_incident(
            config, state, cause, skip_by_rules, wants_rollback, wants_cut
        )
        if self.mode == "observe":  # no host carries the rollback out, and subtracts it
            left = budget.recoveries - xp.as_int(orders.depth > 0)
            budget = budget._replace(recoveries=left)
        lr = rates.update_rate(
            config.lr, state.lr, orders, incident.open, signals.learning_rate, cuts=self.cuts_lr
        )

        ordered = Decision(
            grad_scale=grad_scale,
            skip=skip,
            lr_scale=lr.scale,
            action=action | orders.action,
            cause=cause,
            rollback_depth=orders.depth,
            group_scale=group_scale,
        )
        tally = state.tally._replace(
            clips=state.tally.clips + clipped,
            skips=state.tally.skips + skip,
            alarms=state.tally.alarms + (cause != 0),
            lr_cuts=state.tally.lr_cuts + orders.cut,
        )
        last = last._replace(decision=ordered, z_loss=z_loss)
        if seen.loss is not None:
            last = last._replace(loss=seen.loss)
        if seen.grad_norm is not None:
            norm = xp.where(seen.bad_grad, last.grad_norm, seen.grad_norm)
            last = last._replace(grad_norm=norm)
        if clip is not None and not self.per_tensor:
            last = last._replace(threshold=clip.threshold)
            if clip.z is not None:
                last = last._replace(z=xp.flush(clip.z))
        return EngineState(
            step=state.step + 1,
            change_expected=change_expected & False,
            grace=grace,
            clip=clip_state,
            detectors=detectors,
            rules=rules,
            finite_skip_streak=streak,
            incident=incident,
            budget=budget,
            lr=lr,
            norm_limit=state.norm_limit,
            tally=tally,
            last=last,
        ), ordered

    def _detect(
        self, state: EngineState, seen: CheckedSignals, may_alarm: Flag
    ) -> tuple[tuple[Any, ...], Int, Int, Float]:
        """Runs the detectors that have their signals.

        Args:
            state: the state before the step.
            seen: the checked signals.
            may_alarm: false in the grace window, where only NaN and Inf are alarms.

        Returns:
            The new states; the `Cause` flags of the alarms; those of the sustained alarms; and the
            score of the loss.
        """
        states: list[Any] = []
        alarms = lasting = state.step & 0
        z_loss = state.last.z_loss
        for (_, detector), old in zip(self.config.detectors, state.detectors, strict=True):
            if any(getattr(seen, signal) is None for signal in detector.NEEDS):
                states.append(old)
                continue
            new, result = detector.update(old, seen)
            states.append(new)
            flags = result.cause
            if flags is None:
                flags = xp.flag(result.alarm & may_alarm, detector.CAUSE)
            sustained = flags
            if result.sustained is not None:
                sustained = xp.flag(result.sustained & may_alarm, detector.CAUSE)
            alarms, lasting = alarms | flags, lasting | sustained
            if result.z is not None:
                z_loss = xp.flush(result.z)
        return tuple(states), xp.shared(alarms), xp.shared(lasting), z_loss

    def _ask(
        self, state: EngineState, alarms: Int, lasting: Int
    ) -> tuple[tuple[RuleState, ...], Flag, Flag, Flag, Int]:
        """Counts the step for each rule.

        Args:
            state: the state before the step.
            alarms: the `Cause` flags of the alarms.
            lasting: the `Cause` flags of the sustained alarms.

        Returns:
            The new states; whether a rule that fires skips, rolls back, and cuts the rate; and the
            `Action` flags that are ordered once.
        """
        states: list[RuleState] = []
        action, quiet_steps = alarms & 0, self.config.incident.quiet_steps
        skip = rollback = cut = action != 0
        for rule, old in zip(self.config.rules, state.rules, strict=True):
            hit = ((lasting if rule.sustained else alarms) & rule.causes) != 0
            new, fired, newly_fired = update_rule(rule, old, hit, state.step, quiet_steps)
            states.append(new)
            if rule.skip:
                skip = skip | fired
            if rule.action & Action.ROLLBACK:
                rollback = rollback | fired
            if rule.action & Action.CUT_LR:
                cut = cut | fired
            if rule.action & _ORDERED_ONCE:
                action = action | xp.flag(newly_fired, rule.action & _ORDERED_ONCE)
        return tuple(states), skip, rollback, cut, action

    def _limit_skips(self, streak: Int, wanted: Flag, bad: Flag) -> tuple[Flag, Int]:
        """Skips a finite step at most `max_skips` times in a row.

        If all batches look bad, the batches are not the cause. The spike is then sustained and
        recovery is ordered, so more skips would not help.

        Args:
            streak: finite steps skipped in a row.
            wanted: the rules skip the step.
            bad: the step is not finite. Such a step is always skipped, and does not count.

        Returns:
            Whether the step is skipped, and the new streak.
        """
        if not any(rule.skip and rule.causes & ~_NONFINITE for rule in self.config.rules):
            return wanted, streak
        granted = wanted & (bad | (streak < self.config.max_skips))
        return granted, xp.where(bad, streak, (streak + granted) * wanted)

    def _scales(
        self, state: EngineState, signals: Signals, skip: Flag, clip: Clip | None
    ) -> tuple[Float, Norms | None, Flag]:
        """The factors on the gradients, and whether the step is clipped.

        They are the clipping rule's, and at most the factor that scales the whole gradient to the
        host's limit. So the norm stays within the limit without a sum of the tensors' norms, which
        each backend would round differently. A skipped step is not clipped.
        """
        per_tensor, last = self.per_tensor, state.last.decision
        if per_tensor:
            skip_each = skip[..., None]
        else:
            skip_each = skip
        scale, clipped = one_like(last.group_scale if per_tensor else last.grad_scale), skip & False
        if clip is not None:
            scale, clipped = clip.scale, clip.clipped
            if per_tensor:
                clipped = xp.sum(xp.as_int(clipped), -1) > 0
        # The raw norm: in `CheckedSignals` it is limited, so it is too small above `SIGNAL_LIMIT`.
        norm, limit = signals.grad_norm, state.norm_limit
        if self.limits_norm and norm is not None:
            over = (limit > 0) & (norm > limit)
            clipped = clipped | over
            factor = scale_to(limit, norm, over)
            scale = xp.minimum(scale, factor[..., None] if per_tensor else factor)
        scale, clipped = xp.where(skip_each, 1.0, scale), clipped & ~skip
        if per_tensor:
            return one_like(last.grad_scale), scale, clipped
        return scale, None, clipped

    def _without_step(
        self, old: EngineState, new: EngineState, signals: Signals, skipped: Flag
    ) -> EngineState:
        """The old state if the caller skips the step, with the signals that come only once.

        The loss and the norms of a skipped step are dropped, because the next step has its own. An
        announced change and an evaluation are reported for one step only, so they would be lost.
        """
        kept = select(skipped, old, new)
        expected = old.change_expected
        if signals.change_expected is not None:
            expected = expected | signals.change_expected
        detectors = list(kept.detectors)
        for i, (_, detector) in enumerate(self.config.detectors):
            if "eval_loss" in detector.NEEDS:  # it learns no loss of such a step
                detectors[i] = new.detectors[i]
        return kept._replace(change_expected=skipped & expected, detectors=tuple(detectors))

    def expect_change(self, state: EngineState) -> EngineState:
        """Opens the grace window at the next step, because the LR, the batch or the data change.

        Baselines restart their warm-up. For `grace_steps` steps only non-finite values are alarms.

        Args:
            state: the state before the change.
        """
        return state._replace(change_expected=state.change_expected | True)

    def on_rollback(self, live: EngineState, restored: EngineState) -> EngineState:
        """Combines the restored detectors with the live budget and limits after a rollback.

        The LR multiplier and the limit of the gradient norm stay as they are in the live state,
        except that a lower LR limit of the checkpoint is in force again. Since the checkpoint,
        health has raised the limit, or a later cut began at a higher rate.

        This call subtracts the rollback from the budget, so a declined order costs nothing. It also
        resets the count of healthy steps, so that earlier health does not raise a new limit.

        Args:
            live: the state at the moment of the rollback.
            restored: the state in the checkpoint.
        """
        incident, budget, then = live.incident, live.budget, restored.lr
        closed = incident.open & False
        raised = (then.rate_at_cut > 0) & (then.rate_at_cut < live.lr.rate_at_cut)
        return restored._replace(
            incident=incident._replace(open=closed, only_skips=closed, quiet=incident.quiet & 0),
            budget=budget._replace(
                recoveries=xp.decremented(budget.recoveries), healthy_steps=budget.healthy_steps & 0
            ),
            lr=live.lr._replace(
                rate_at_cut=xp.where(raised, then.rate_at_cut, live.lr.rate_at_cut),
                rate_after_cut=xp.where(raised, then.rate_after_cut, live.lr.rate_after_cut),
            ),
            norm_limit=live.norm_limit,
            tally=live.tally._replace(rollbacks=live.tally.rollbacks + 1),
            last=live.last,
        )

    def specialised_for(self, state: EngineState) -> Engine:
        """The engine for the steps from `state` on, until the host changes the state.

        The host sets limits at a rollback: of the learning rate (a policy without cuts needs the
        schedule's rate only for this) and of the gradient norm. The returned engine decides the
        same, without the operations of a limit that `state` does not have. States with the same
        kinds of limits give the same object, so that a step is compiled once for it.

        Args:
            state: the state, in NumPy.
        """
        may_be_refunded = np.any(state.budget.lr_cuts < self.config.budget.lr_cuts)
        limits_rate = bool(self.cuts_lr or may_be_refunded or np.any(state.lr.rate_at_cut > 0))
        limits_norm = self.limits_norm and bool(np.any(state.norm_limit != 0))
        if limits_rate and limits_norm == self.limits_norm:
            return self
        key = limits_rate, limits_norm
        if key not in self._specialised:
            config = self.config
            if not limits_rate:
                config = config._replace(lr=config.lr._replace(ceiling=0.0))
            self._specialised[key] = Engine(config, limits_norm=limits_norm)
        return self._specialised[key]

    def limit_lr(self, state: EngineState, limit: Float, rate: Float | None) -> EngineState:
        """Sets a limit on the learning rate for the host; no effect if no cuts are left.

        Args:
            state: the live state.
            limit: upper limit of the learning rate, float32 array. 0 or less limits the rate to the
                schedule's current rate.
            rate: the schedule's current learning rate, float32 array, or None for a constant rate
                of 1.
        """
        limited = rates.limited_rate(self.config.lr, state.lr, limit, rate, cuts=self.cuts_lr)
        allowed = state.budget.lr_cuts > 0
        spent = xp.as_int(allowed)
        return state._replace(
            lr=select(allowed, limited, state.lr),
            budget=state.budget._replace(lr_cuts=state.budget.lr_cuts - spent),
            tally=state.tally._replace(lr_cuts=state.tally.lr_cuts + spent),
        )

    def limit_norm(self, state: EngineState, limit: Float | None) -> EngineState:
        """Sets or releases a limit on the gradient norm for the host; this costs no budget.

        From the next step on, a finite gradient whose norm is above the limit is scaled down to it,
        as by `torch.nn.utils.clip_grad_norm_`, also under a policy without clipping. The limit
        stays until this method changes it, also over a rollback.

        Args:
            state: the live state.
            limit: largest norm of the gradients, float32 array, 0-d or of the state's batch shape.
                0, None or a number that cannot be a limit (negative, NaN, Inf) releases the limit.
        """
        none = zero_like(state.norm_limit)
        if limit is None:
            given = none
        else:
            given = limit
        is_limit = (given > FLUSH) & (given <= FLOAT32_MAX)
        return state._replace(norm_limit=xp.where(is_limit, given, none))

    def freeze(self, state: EngineState) -> EngineState:
        """Makes the engine skip all steps from the next one on, until the host calls `limit_norm`.

        A frozen step changes neither weights nor moments. It is a skip without a cause: it opens
        no incident and costs no budget.

        Args:
            state: the state before the first frozen step.
        """
        frozen = zero_like(state.norm_limit) + FROZEN
        return state._replace(norm_limit=frozen)

    def apply_rate(self, state: EngineState, rate: Float) -> EngineState:
        """Recomputes the multiplier for another learning rate of the schedule; hold and ramp stay.

        A rollback restores the schedule, and a cut limits the rate in absolute terms. At a lower
        rate of the schedule the multiplier is therefore higher.

        Args:
            state: a state without an open incident.
            rate: the schedule's learning rate, float32 array.
        """
        return state._replace(lr=rates.rescaled(self.config.lr, state.lr, rate, cuts=self.cuts_lr))

    def to_dict(self, state: EngineState) -> dict[str, Any]:
        """Converts the state of any backend to JSON-safe Python data; this syncs the device.

        Args:
            state: a state without batch axes.

        Returns:
            `{"schema": SCHEMA, "policy": {...}, "groups": n, "state": {...}}`, from which
            `from_dict` restores the state on any machine.
        """
        scale = state.last.decision.group_scale
        return {
            "schema": SCHEMA,
            "policy": self._tables,
            "groups": 0 if scale is None else int(np.asarray(scale).shape[-1]),
            "state": to_json_data(state),
        }

    def from_dict(self, data: Mapping[str, Any]) -> EngineState:
        """Restores a saved state.

        Args:
            data: the result of `to_dict`, perhaps read from a file.

        Returns:
            The state as NumPy arrays.

        Raises:
            StateError: the data are damaged, of another policy, or of another release's schema.
        """
        if not isinstance(data, Mapping):
            raise StateError(f"a saved state must be a mapping, got {type(data).__name__}")
        if data.get("schema") != SCHEMA:
            raise StateError(
                f"the saved state has schema {data.get('schema')!r}, but this version reads "
                f"{SCHEMA}: start from a fresh state, or use the version that wrote it"
            )
        differences = table_differences(data.get("policy"), self._tables)
        if differences:
            raise StateError(
                f"the saved state belongs to another policy ({'; '.join(differences):.300}): load "
                "the state with its own policy, or start from a fresh state, whose detectors warm "
                "up again"
            )
        count = data.get("groups")
        if not isinstance(count, int) or not 0 <= count <= _MAX_GROUPS:
            raise StateError(f"groups must be a whole number up to {_MAX_GROUPS}, got {count!r}")
        return from_json_data(self.init(groups=count), data.get("state"), "state")


def _neutral(decision: Decision, lr_scale: Float, cause: Int) -> Decision:
    """A decision in the same arrays that changes neither the gradients nor the weights."""
    group_scale = decision.group_scale
    if group_scale is not None:
        group_scale = one_like(group_scale)
    return Decision(
        grad_scale=one_like(decision.grad_scale),
        skip=decision.skip & False,
        lr_scale=lr_scale,
        action=decision.action & 0,
        cause=cause,
        rollback_depth=decision.rollback_depth & 0,
        group_scale=group_scale,
    )
