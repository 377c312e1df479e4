"""Judges one step: detectors first, then rules, clipping and recovery orders.

Each part judges a value before it learns the value. The skip is decided before the clipping rule
learns the norm, and the budget is checked before an order is given.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from healcore.core import numerics
from healcore.core.array_namespace import Array, ArrayNamespace, Flag, Float, Int, Norms, Number
from healcore.core.clipping import EPSILON, Clip
from healcore.core.decision import NONFINITE, Action, Decision, DetectorResult, Telemetry
from healcore.core.engine.config import EngineConfig, RuleConfig
from healcore.core.engine.incidents import RecoveryOrders, RuleOrders, update_incidents
from healcore.core.engine.learning_rate import update_rate
from healcore.core.engine.state import EngineState, RuleState, Tally
from healcore.core.signals import CheckedSignals, Signals, check_signals

ORDERED_ONCE = int(Action.ALERT | Action.SAVE | Action.STOP)
"""Flags of the actions that a rule orders once, not at each step of the same trouble."""


class Scales(NamedTuple):
    """The factors on the gradients of one step."""

    grad_scale: Float
    """`Decision.grad_scale`: the factor on all gradients."""
    group_scale: Norms | None
    """`Decision.group_scale`: one factor per tensor, or None unless the policy clips per tensor."""
    clipped: Flag | None
    """Whether the step is clipped, or None if nothing can clip."""


class Firing(NamedTuple):
    """Whether a rule fires at one step.

    A skip needs the condition at each step (`fired`). An alert at each step of a long fault would
    be noise, so it needs the beginning only (`newly_fired`).
    """

    fired: Flag
    """The rule's condition holds."""
    newly_fired: Flag
    """The rule fires for the first time in `quiet_steps` steps. Alerts, saves and stops are ordered
    only then."""


def judge(
    config: EngineConfig,
    state: EngineState,
    signals: Signals,
    *,
    limits_norm: bool,
    xp: ArrayNamespace,
) -> tuple[EngineState, Decision]:
    """Judges one step.

        signals -> check -> detectors -> rules -> skip -> clipping rule -> factor -------.
                                             |                                           |
                                             '-> incidents, budget -> learning rate -> Decision

    Args:
        config: the policy.
        state: the state before the step.
        signals: the measured signals.
        limits_norm: whether `EngineState.norm_limit` has an effect. Static.
        xp: the array namespace.

    Returns:
        The new state, and the decision as the policy orders it, in any mode.
    """
    change_expected, grace = _grace_window(config, state, signals, xp=xp)
    clips = config.clip is not None
    seen = check_signals(signals, change_expected, state.last, clips=clips, xp=xp)

    detectors, results = _run_detectors(config, state.detectors, seen, grace <= 0, xp=xp)
    cause = xp.shared(_cause_flags(config, results, seen, xp=xp))
    no_flag = xp.never(cause)
    rule_states, fired = _run_rules(config, state, results, no_flag, xp=xp)

    finite_skip_streak, skip_by_rules = _skip_by_rules(
        config, state.finite_skip_streak, fired, seen, no_flag, xp=xp
    )
    skip = skip_by_rules
    if limits_norm:
        skip = skip | (state.norm_limit < 0)  # the host has frozen the step, see `FROZEN`
    clip_state, clip = _clip(config, state, seen, skip, xp=xp)

    wants = _wanted_orders(fired, no_flag)
    incidents, budget, orders = update_incidents(config, state, cause, skip_by_rules, wants, xp=xp)
    lr_state = update_rate(config.lr, state.lr, orders, incidents.open, seen.learning_rate, xp=xp)
    action = _ordered_actions(config, fired, orders, cause, xp=xp)
    rollback_depth = orders.depth
    if rollback_depth is None:
        # No rule rolls back: the depth of the last step, which is 0.
        rollback_depth = state.last.decision.rollback_depth
    norm_to_limit = signals.grad_norm if limits_norm else None
    scales = _scales(config, state, skip, clip, norm_to_limit, xp=xp)
    ordered = Decision(
        grad_scale=scales.grad_scale,
        skip=skip,
        lr_scale=lr_state.scale,
        action=action,
        cause=cause,
        rollback_depth=rollback_depth,
        group_scale=scales.group_scale,
    )
    tally = _counted(state.tally, skip, cause, scales.clipped, orders.cut)
    return EngineState(
        step=state.step + 1,
        change_expected=no_flag,
        grace=grace,
        clip=clip_state,
        detectors=detectors,
        rules=rule_states,
        finite_skip_streak=finite_skip_streak,
        incident=incidents,
        budget=budget,
        lr=lr_state,
        norm_limit=state.norm_limit,
        tally=tally,
        last=_telemetry(state.last, ordered, seen, clip, results, clips=clips, xp=xp),
    ), ordered


def _grace_window(
    config: EngineConfig, state: EngineState, signals: Signals, *, xp: ArrayNamespace
) -> tuple[Flag, Int]:
    """Whether a change is expected, and the steps left of the grace window that it opens."""
    change_expected = state.change_expected
    if signals.change_expected is not None:
        change_expected = change_expected | signals.change_expected
    grace = numerics.decremented(state.grace, xp=xp)
    return change_expected, xp.where(change_expected, config.grace_steps, grace)


def _run_detectors(
    config: EngineConfig,
    states: tuple[Any, ...],
    seen: CheckedSignals,
    may_alarm: Flag,
    *,
    xp: ArrayNamespace,
) -> tuple[tuple[Any, ...], dict[str, DetectorResult]]:
    """Runs the detectors that have their signals.

    Args:
        config: the policy.
        states: the state of each detector.
        seen: the checked signals.
        may_alarm: false in the grace window, where only NaN and Inf are alarms.
        xp: the array namespace.

    Returns:
        The new states, and the results of the detectors that ran, by name.
    """
    new, results = [], {}
    for (name, detector), state in zip(config.detectors, states, strict=True):
        if all(getattr(seen, field) is not None for field in detector.NEEDS):
            state, result = detector.update(state, seen, xp=xp)
            if not detector.CAUSE & NONFINITE:
                alarm = sustained = result.alarm & may_alarm
                if result.sustained is not result.alarm:
                    sustained = result.sustained & may_alarm
                result = result._replace(alarm=alarm, sustained=sustained)
            results[name] = result
        new.append(state)
    return tuple(new), results


def _cause_flags(
    config: EngineConfig,
    results: Mapping[str, DetectorResult],
    seen: CheckedSignals,
    *,
    xp: ArrayNamespace,
) -> Int:
    """`Cause` flags (int32) of this step's alarms, including sustained alarms."""
    causes = []
    for name, detector in config.detectors:
        if name in results:
            result = results[name]
            if result.cause is not None:
                causes.append(result.cause)
                continue
            alarm = result.alarm
            if result.sustained is not alarm:
                alarm = alarm | result.sustained
            causes.append(xp.flag(alarm, detector.CAUSE))
    if not causes:  # no detector has its signals
        return xp.astype(numerics.false_like(seen.finite), xp.int32)
    return functools.reduce(operator.or_, causes)


def _hits(
    config: EngineConfig, rule: RuleConfig, results: Mapping[str, DetectorResult]
) -> list[Flag]:
    """Whether each detector of the rule's causes has found its cause."""
    found = []
    for name, detector in config.detectors:
        if name in results and rule.causes & detector.CAUSE:
            result = results[name]
            if result.cause is not None and detector.CAUSE & ~rule.causes:
                # The rule names some causes of this detector only.
                found.append((result.cause & rule.causes) != 0)
            elif rule.sustained:
                found.append(result.sustained)
            else:
                found.append(result.alarm)
    return found


def _run_rules(
    config: EngineConfig,
    old: EngineState,
    results: Mapping[str, DetectorResult],
    no_flag: Flag,
    *,
    xp: ArrayNamespace,
) -> tuple[tuple[RuleState, ...], list[tuple[RuleConfig, Firing]]]:
    """Counts the hits of each rule. Returns the new states, and each rule with its `Firing`."""
    new, fired, hits = [], [], {}
    for rule, state in zip(config.rules, old.rules, strict=True):
        key = rule.sustained, rule.causes
        if key not in hits:
            found = _hits(config, rule, results)
            hits[key] = _any(found, no_flag)
            if len(found) > 1:
                hits[key] = xp.shared(hits[key])
        quiet = config.incident.quiet_steps
        counted, firing = update_rule(rule, state, hits[key], old.step, quiet, xp=xp)
        new.append(counted)
        fired.append((rule, firing))
    return tuple(new), fired


def update_rule(
    config: RuleConfig,
    state: RuleState,
    hit: Flag,
    step: Int,
    quiet_steps: Number,
    *,
    xp: ArrayNamespace,
) -> tuple[RuleState, Firing]:
    """Counts one step for a rule, and decides whether the rule fires.

    A rule fires at once, after n hits in a row, or after several hits within a window. The window
    is needed because a run in which every other step is NaN never has ten hits in a row.

    Args:
        config: the rule.
        state: earlier hits.
        hit: whether a cause of the rule is present.
        step: number of the step, which gives its slot in the window.
        quiet_steps: steps without firing after which the next firing counts as newly fired.
        xp: the array namespace.
    """
    streak, window, age = state
    fired = newly_fired = hit
    if not (isinstance(config.consecutive, int) and config.consecutive == 1):
        streak = (streak + 1) * hit
        fired = newly_fired = hit & (streak >= config.consecutive)
    if config.within:
        slot, value = step % config.within, xp.astype(hit, xp.int32)
        window = xp.with_slot(window, slot, value)
        fired = newly_fired = fired & (xp.sum(window, axis=-1) >= config.count)
    if config.action & ORDERED_ONCE:
        newly_fired = fired & (age >= quiet_steps)
        age = xp.where(fired, 0, age + 1)
    return RuleState(streak, window, age), Firing(fired, newly_fired)


def _wanted_orders(fired: list[tuple[RuleConfig, Firing]], no_flag: Flag) -> RuleOrders:
    """Joins the rollbacks and the cuts that the fired rules ask for."""
    rollbacks = [firing.fired for rule, firing in fired if rule.action & Action.ROLLBACK]
    cuts = [firing.fired for rule, firing in fired if rule.action & Action.CUT_LR]
    return RuleOrders(rollback=_any(rollbacks, no_flag), cut=_any(cuts, None))


def _ordered_actions(
    config: EngineConfig,
    fired: list[tuple[RuleConfig, Firing]],
    orders: RecoveryOrders,
    cause: Int,
    *,
    xp: ArrayNamespace,
) -> Int:
    """The `Action` flags of the step: of the recovery, and the flags of `ORDERED_ONCE`."""
    actions = []
    if orders.action is not None:
        actions.append(orders.action)
    # One int32 for each set of flags, and not for each rule.
    for flags in dict.fromkeys(rule.action & ORDERED_ONCE for rule in config.rules):
        if flags:
            newly_fired = []
            for rule, firing in fired:
                if rule.action & ORDERED_ONCE == flags:
                    newly_fired.append(firing.newly_fired)
            actions.append(xp.flag(_any(newly_fired, None), flags))
    if not actions:
        return cause & 0
    return _any(actions, None)


def _skip_by_rules(
    config: EngineConfig,
    streak: Int,
    fired: Sequence[tuple[RuleConfig, Firing]],
    seen: CheckedSignals,
    no_flag: Flag,
    *,
    xp: ArrayNamespace,
) -> tuple[Int, Flag]:
    """Whether the fired rules skip the step; returns the new `streak` of finite skips first."""
    wanted = _any([each.fired for rule, each in fired if rule.skip], no_flag)
    streak, skip = _limit_skips(config, streak, wanted, seen, xp=xp)
    if skip is not seen.bad:
        skip = xp.shared(skip)
    return streak, skip


def _limit_skips(
    config: EngineConfig, streak: Int, wanted: Flag, seen: CheckedSignals, *, xp: ArrayNamespace
) -> tuple[Int, Flag]:
    """Decides which steps are skipped; returns the new `streak` of finite skips, and the skip.

    Steps with non-finite gradients are always skipped, other steps at most `max_skips` times in a
    row. If all batches look bad, the batches are not the cause. The spike is then sustained and
    recovery is ordered, so more skips would not help.
    """
    granted = wanted
    if any(rule.skip and rule.causes & ~int(NONFINITE) for rule in config.rules):
        order = wanted & seen.finite
        allowed = streak < config.max_skips
        granted = wanted & (~seen.finite | allowed)
        streak = xp.where(seen.finite, (streak + (order & allowed)) * order, streak)
    if seen.bad_grad is not None and granted is not seen.bad:
        granted = granted | seen.bad_grad  # NaN in a gradient is skipped under every policy
    return streak, granted


def _clip(
    config: EngineConfig,
    state: EngineState,
    seen: CheckedSignals,
    skip: Flag,
    *,
    xp: ArrayNamespace,
) -> tuple[Any, Clip | None]:
    """Runs the clipping rule if the policy has one and the signals have its norms."""
    rule = config.clip
    if rule is None:
        return None, None
    if seen.grad_norm is None or (rule.per_tensor and seen.group_norms is None):
        return state.clip, None
    return rule.update(state.clip, seen, numerics.and_not(seen.finite, skip), xp=xp)


def _scales(
    config: EngineConfig,
    state: EngineState,
    skip: Flag,
    clip: Clip | None,
    norm_to_limit: Float | None,
    *,
    xp: ArrayNamespace,
) -> Scales:
    """The factors on the gradients, by the clipping rule and by the host's limit.

    `norm_to_limit` is the raw gradient norm, or None if the host never limits it.
    """
    # Without clipping and without a limit the last factor is 1. A leaf that is the same object is
    # not written.
    unit_scale = state.last.decision.grad_scale
    if config.clip is not None:
        unit_scale = numerics.one_like(unit_scale)
    scales = _clip_scales(clip, skip, unit_scale, xp=xp)
    if norm_to_limit is None:
        return scales
    return _limit_norm(state.norm_limit, norm_to_limit, skip, scales, clip, xp=xp)


def _clip_scales(clip: Clip | None, skip: Flag, one: Float, *, xp: ArrayNamespace) -> Scales:
    """The factors of the clipping rule; a skipped step is not clipped. `one` is a factor of 1."""
    if clip is None:
        return Scales(one, None, None)
    if clip.scale.ndim == skip.ndim:
        return Scales(xp.where(skip, 1.0, clip.scale), None, clip.clipped & ~skip)
    clipped = xp.sum(xp.astype(clip.clipped, xp.int32), axis=-1) > 0
    return Scales(one, xp.where(skip[..., None], 1.0, clip.scale), clipped & ~skip)


def _limit_norm(
    limit: Float, norm: Float, skip: Flag, scales: Scales, clip: Clip | None, *, xp: ArrayNamespace
) -> Scales:
    """The result of `_clip_scales` with the host's limit, 0 or the largest norm after scaling.

    `norm` is the raw norm. The norm in `CheckedSignals` is limited, so it is too small above
    `SIGNAL_LIMIT`. A norm that is NaN or Inf belongs to a skipped step. Per-tensor
    factors are at most the factor that scales the whole gradient to the limit. So the norm stays
    within the limit without a sum of norms, which each backend would round differently.
    """
    over = (limit > 0) & (norm > limit)
    over = numerics.and_not(over, skip)
    to_limit = xp.quotient(limit, norm + EPSILON)
    factor = numerics.flush(xp.where(over, to_limit, 1.0), xp=xp)
    grad_scale, group_scale, clipped = scales
    clipped = over if clipped is None else clipped | over
    if group_scale is not None:
        return Scales(grad_scale, xp.minimum(group_scale, factor[..., None]), clipped)
    if clip is None:
        return Scales(factor, None, clipped)
    return Scales(xp.minimum(grad_scale, factor), None, clipped)


def _counted(tally: Tally, skip: Flag, cause: Int, clipped: Flag | None, cut: Flag | None) -> Tally:
    """The tally with this step. `clipped` and `cut` are None if the policy never does it."""
    tally = tally._replace(skips=tally.skips + skip, alarms=tally.alarms + (cause != 0))
    if clipped is not None:
        tally = tally._replace(clips=tally.clips + clipped)
    if cut is not None:
        tally = tally._replace(lr_cuts=tally.lr_cuts + cut)
    return tally


def _telemetry(
    last: Telemetry,
    ordered: Decision,
    seen: CheckedSignals,
    clip: Clip | None,
    results: Mapping[str, DetectorResult],
    *,
    clips: bool,
    xp: ArrayNamespace,
) -> Telemetry:
    """Numbers for loggers; a non-finite value leaves the last finite one in place."""
    loss, norm, threshold, z, z_loss = last[1:]
    if seen.loss is not None:
        loss = seen.loss  # the last finite one, if this one is not finite
    if seen.grad_norm is not None:
        norm = seen.grad_norm
        if clips:  # then a bad norm was replaced by 0
            norm = xp.where(seen.bad_grad, last.grad_norm, seen.grad_norm)
    if clip is not None and ordered.group_scale is None:
        threshold, z = clip.threshold, numerics.flush(clip.z, xp=xp)
    for result in results.values():
        if result.z is not None:
            z_loss = numerics.flush(result.z, xp=xp)
    if ordered.group_scale is None and last.decision.group_scale is not None:
        ordered = ordered._replace(group_scale=last.decision.group_scale)
    return Telemetry(ordered, loss, norm, threshold, z, z_loss)


def _any(flags: list[Array], no_flag: Array | None) -> Array | None:
    """Logical or; `no_flag` if there are no flags."""
    if not flags:
        return no_flag
    return functools.reduce(operator.or_, flags)
