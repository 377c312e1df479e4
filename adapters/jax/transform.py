"""The optax transformations: `protect` wraps an optimizer, `heal` and `heal_zclip` precede one."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from healcore.core.engine import Engine
from healcore.core.verdict import Action, Decision
from healcore.jax import gradients, heal_state
from healcore.jax.commit import step_or_keep
from healcore.jax.heal_state import HealState
from healcore.jax.optax_states import (
    check_leaves,
    check_second_iterates,
    has_injected_schedule,
    has_lr_scale,
    injected_rates,
    on_mesh_of,
    reset_moments,
    with_lr_scale,
)
from healcore.jax.signals import Axes, AxisName, count_leaves, make_signals, split_keywords
from healcore.jax.state_layout import STEPS, check_records

if TYPE_CHECKING:
    from healcore.policy import Overrides, PolicyLike

OnSkip = Literal["zero", "nan"]
_ARRAYS_ONLY = "for an Equinox module write `tx.init(eqx.filter(model, eqx.is_array))`"


def heal(
    policy: PolicyLike = "default",
    *,
    on_skip: OnSkip = "zero",
    axis_name: AxisName = None,
    shard_axis_name: AxisName = None,
    records: int = STEPS,
    **overrides: Unpack[Overrides],
) -> optax.GradientTransformationExtraArgs:
    """Judges each step by a policy, and clips or replaces its gradients.

    A member of a chain cannot control the others. On a skip it passes on zeros, with which the
    optimizer after it still takes a step: moments decay, Adam and weight decay still move the
    parameters a little, counters count. Where a skip has to leave everything exactly as it was,
    use `protect`, or ``optax.chain(heal(policy, on_skip="nan"), optax.apply_if_finite(inner, 2**31
    - 1))``. The policy's LR multiplier is in the decision; `scale_by_heal_lr` applies it.

    Args:
        policy: a preset's name, the path of a TOML file, a `healcore.policy.Policy`, an Engine or
            an EngineConfig, whose numbers may be traced arrays.
        on_skip: what a skipped step's updates are: "zero", or "nan" as a signal to
            `optax.apply_if_finite` (NaN would ruin the state of any other optimizer).
        axis_name: mesh axes of a `shard_map` or `pmap` around the update along which the gradients
            are the same (averaged with `pmean`). Loss and norms are averaged over them, so that
            every device decides alike. Not needed under `jit` alone.
        shard_axis_name: mesh axes along which each device has its own part of the gradients; their
            norms are combined. With some leaves split and others whole pass `grad_norm` instead.
        records: see `protect`.
        **overrides: values to replace in the policy, ``clip={"max_norm": 1.0}``; see
            `healcore.policy.Overrides`.

    Raises:
        ValueError: the policy has `soft_step` or `update_clip`, which take `protect`; or `on_skip`
            is unknown.

    Returns:
        A transformation whose `update` takes, all optional and by keyword: `value` (loss, one
        floating number), `eval_loss` (NaN at steps without evaluation), `grad_norm` (when it has
        to be reduced over a mesh first), `update_norm`, `change_expected` and `externally_skipped`
        (bool each), and `learning_rate` (the schedule's, so that a limit on it is an absolute
        rate). Without `value` the detectors of the loss are inactive. Unknown keywords are ignored.
        `update` raises SignalError, while tracing, for a signal that is not one number of the right
        kind.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> tx = optax.chain(heal("zclip"), optax.sgd(0.1))
        >>> params = {"w": jnp.ones(3)}
        >>> state = tx.init(params)
        >>> grads = {"w": jnp.full(3, jnp.nan)}
        >>> updates, state = tx.update(grads, state, params, value=jnp.float32(2.0))
        >>> bool(jnp.all(updates["w"] == 0))
        True
    """
    from healcore.policy import engine_of  # here: `import healcore.jax` loads no pydantic
    from healcore.policy.loader import check_keywords

    _check_on_skip(on_skip)
    check_keywords(heal, overrides)
    axes = Axes.of(axis_name, shard_axis_name)
    engine = engine_of(policy, overrides)
    if (engine.softens or engine.clips_updates) and engine.mode != "observe":
        raise ValueError(
            "soft_step and [update_clip] scale this step's update, which heal() does not see, as "
            "it comes before the optimizer in a chain: write protect(optimizer, policy)"
        )
    return _transformation(engine, on_skip, axes, check_records(records))


def heal_zclip(
    z_threshold: chex.Numeric = 2.5,
    ema_decay: chex.Numeric = 0.97,
    warmup_steps: chex.Numeric = 25,
    target: Literal["reciprocal", "mean", "max"] = "reciprocal",
    max_norm: chex.Numeric | None = 1.0,
    on_skip: OnSkip = "zero",
    axis_name: AxisName = None,
    shard_axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """ZClip with its faults fixed; replaces `optax.clip_by_global_norm`.

    Clips a gradient norm that stands out from its recent history, replaces a non-finite gradient
    (see `heal` for what a skip is in a chain), and adapts its baseline after a real level shift,
    where the published rule would clip every later step. The policy is the preset "zclip" with
    these numbers: under a Healer write ``Healer("zclip")``.

    Args:
        z_threshold: z-score above which a norm is a spike.
        ema_decay: decay of the norm's mean and variance per step, in (0, 1).
        warmup_steps: finite norms averaged before the z-score is used, at least 1.
        target: what a spike is clipped to.
        max_norm: absolute limit in addition; None for no limit.
        on_skip: see `heal`.
        axis_name: see `heal`.
        shard_axis_name: see `heal`.

    Returns:
        A transformation; see `heal` for the keywords of its `update`. Numbers may be arrays, so
        that ``optax.inject_hyperparams(heal_zclip)`` can schedule them.

    Raises:
        healcore.policy.PolicyError: a number is out of range, or none; or `target` is unknown.
        ValueError: `on_skip` is unknown.

    References:
        Kumar et al., `ZClip: Adaptive Spike Mitigation for LLM Pre-Training
        <https://arxiv.org/abs/2504.02507>`_, 2025
    """
    from healcore.policy import engine_of  # here: `import healcore.jax` loads no pydantic

    _check_on_skip(on_skip)
    numbers = {
        "z_threshold": z_threshold,
        "ema_decay": ema_decay,
        "warmup_steps": warmup_steps,
        "max_norm": max_norm,
    }
    arrays = {k: each for k, each in numbers.items() if isinstance(each, jax.Array | np.ndarray)}
    plain = {
        name: each.item() if isinstance(each, np.generic) else each
        for name, each in numbers.items()
        if name not in arrays
    }
    engine = engine_of("zclip", {"clip": {**plain, "target": target}})
    if arrays:
        assert engine.config.clip is not None
        kinds = dict.fromkeys(numbers, jnp.float32) | {"warmup_steps": jnp.int32}
        given = {name: jnp.asarray(each).astype(kinds[name]) for name, each in arrays.items()}
        clip = engine.config.clip[1]._replace(**given)
        engine = Engine(engine.config._replace(clip=("zclip", clip)))
    return _transformation(engine, on_skip, Axes.of(axis_name, shard_axis_name))


class ProtectState(NamedTuple):
    """The healing state, and the state of the protected optimizer."""

    heal: HealState
    heal_update_norm: Any
    """float32 0-d: norm of the last update, 0 after a skip; None if the policy does not read it."""
    heal_bad_update: Any
    """bool 0-d: the optimizer made NaN or Inf of finite gradients at the last step. The update was
    not applied, and the next step reports it."""
    heal_reset_moments: Any
    """bool 0-d: the last step that was not skipped cut the learning rate, and the next one begins
    with moments of zero. None if the policy does not reset moments."""
    inner_state: Any
    """The state of the optimizer itself; bit-identical after a skipped step."""


def protect(
    inner: optax.GradientTransformation,
    policy: PolicyLike = "default",
    *,
    axis_name: AxisName = None,
    shard_axis_name: AxisName = None,
    records: int = STEPS,
    **overrides: Unpack[Overrides],
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer: clips its gradients, and skips a bad step exactly.

    On a skip every leaf of the inner state (moments, counters, schedules, accumulators, keys) is
    bit for bit what it was, and the updates are -0.0, which leaves every parameter bit-identical
    under ``optax.apply_updates``. The policy's LR multiplier is applied to the updates, weight
    decay included, in the same step. State outside the optimizer (BatchNorm) goes with `commit`.

    An optimizer can make NaN or Inf of finite gradients (Adam with ``eps=0``, a schedule that
    divides by 0). No such element reaches the parameters. In a tensor of up to 16,384 elements (a
    bias, a scale) it skips the whole update, and the next step counts as one with a bad gradient.
    Larger tensors are not checked, which would cost more than the step: there only the non-finite
    elements are left unchanged.

    With ``[lr] reset_moments`` (`default` has it) the next step after a cut of the rate, skipped
    steps aside, begins with moments and counts of their bias correction that are zero, in the
    states of optax whose moments begin there. The state keeps the old moments until that step.

    In observe mode every step is judged and recorded in the state, and nothing is changed. A step
    with ``externally_skipped=True`` (an fp16 overflow, say) is skipped in every mode, neither
    learnt nor counted.

    Args:
        inner: any optax transformation that keeps the structure, shapes and dtypes of its state.
            With an `optax.MultiSteps` inside, each micro-batch is judged on its own, and one that
            is skipped does not enter the accumulator.
        policy: see `heal`.
        axis_name: see `heal`.
        shard_axis_name: see `heal`.
        records: steps whose records the state keeps for a `Healer` to read: as many as one dispatch
            takes (`lax.scan` over steps). With fewer, lines of the metrics are lost, but no order.
        **overrides: see `heal`.

    Returns:
        A transformation that takes the keywords of `heal`'s update and passes them, and all
        others, to `inner` (`optax.contrib.sam` gets only the keywords that it names). A policy
        that reads the norm of the updates gets the norm of the step before, since a step is judged
        before the optimizer makes its update.

    Raises:
        TypeError: `inner` is not an optax transformation.
        HealStateError: from `init`, the policy cuts the learning rate and `inner` keeps a second
            iterate that the cut does not reach; see `scale_by_heal_lr`.
        healcore.policy.PolicyError: there is no such policy, or it is not a valid one.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> tx = protect(optax.adamw(1e-3), "zclip")
        >>> params = {"w": jnp.ones(3)}
        >>> state = tx.init(params)
        >>> grads = {"w": jnp.full(3, jnp.nan)}
        >>> updates, state = tx.update(grads, state, params, value=jnp.float32(2.0))
        >>> optax.apply_updates(params, updates)
        {'w': Array([1., 1., 1.], dtype=float32)}
        >>> int(optax.tree.get(state, "count"))
        0
    """
    from healcore.policy import engine_of  # here: `import healcore.jax` loads no pydantic
    from healcore.policy.loader import check_keywords

    _check_optimizer(inner)
    check_keywords(protect, overrides)
    axes = Axes.of(axis_name, shard_axis_name)
    engine, kept = engine_of(policy, overrides), check_records(records)
    inner = optax.with_extra_args_support(inner)
    taken = _keywords_of(inner.update)
    reads_update_norm = "update_norm" in engine.needs

    def init(params: optax.Params) -> ProtectState:
        check_leaves(params, "params", _ARRAYS_ONLY)
        inner_state = inner.init(params)
        if engine.mode != "observe":
            if engine.scales_lr:
                check_second_iterates(inner_state, "a cut of the learning rate")
            if engine.clips_updates:
                check_second_iterates(inner_state, "[update_clip]", reaches_base=False)
        state = ProtectState(
            heal=heal_state.init(engine, count_leaves(params), kept),
            heal_update_norm=jnp.zeros((), jnp.float32) if reads_update_norm else None,
            heal_bad_update=jnp.zeros((), jnp.bool_),
            heal_reset_moments=jnp.zeros((), jnp.bool_) if engine.resets_moments else None,
            inner_state=inner_state,
        )
        return on_mesh_of(params, state)

    def measured(updates: optax.Updates) -> tuple[chex.Array | None, chex.Array]:
        if not (reads_update_norm or engine.clips_updates):
            return None, axes.any(gradients.not_finite(updates))
        norm = axes.norm(updates)
        return norm, ~jnp.isfinite(norm)

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ProtectState]:
        if not isinstance(state, ProtectState):
            raise heal_state.no_heal_state_error(state)
        given, others = split_keywords(extra_args)
        last = 0.0 if state.heal_update_norm is None else state.heal_update_norm
        known: Any = {"update_norm": jnp.where(state.heal_bad_update, jnp.inf, last), **given}
        reads_rate = engine.limits_lr and "learning_rate" not in given
        rates = injected_rates(state.inner_state) if reads_rate else []
        if len(rates) == 1:
            known["learning_rate"] = rates[0]
        # A schedule inside sets the rate of this step only in the update.
        late = len(rates) == 1 and has_injected_schedule(state.inner_state)
        signals, norms = make_signals(engine, updates, known, axes)
        heal, decision = heal_state.step(engine, state.heal, signals, norms)
        pending, resets = None, state.heal_reset_moments
        cuts_inside = engine.scales_lr and has_lr_scale(state.inner_state)

        def inner_step(updates: Any, inner_state: Any, params: Any) -> tuple[Any, Any]:
            if resets is not None and (isinstance(resets, Tracer) or resets):
                # Before the step it is part of the optimizer's own kernel. After the step that has
                # cut it was a second pass over all moments, and XLA copied them for it.
                inner_state = reset_moments(
                    inner_state, lambda leaf: jnp.where(resets, jnp.zeros_like(leaf), leaf)
                )
            if cuts_inside and engine.mode != "observe":
                inner_state = with_lr_scale(inner_state, decision.lr_scale)
            keywords = {**given, **others}
            if taken is not None:
                keywords = {name: each for name, each in keywords.items() if name in taken}
            return inner.update(updates, inner_state, params, **keywords)

        if engine.mode == "observe" and "externally_skipped" not in given:
            updates, inner_state = inner_step(updates, state.inner_state, params)
            norm, bad = measured(updates)
            if norm is not None and engine.clips_updates:
                heal, _ = heal_state.clip_update(engine, heal, norm, decision.skip)
        else:
            # Zeros instead of the bad gradients: with them a loop in the optimizer (line search,
            # Newton-Schulz) terminates. It costs nothing: XLA fuses the select with the scaling.
            updates = gradients.fill_where(_enforce(engine, decision, updates), decision.skip, 0.0)
            updates, inner_state = step_or_keep(
                inner_step, decision.skip, updates, state.inner_state, params
            )
            if resets is not None:
                pending = jnp.where(decision.skip, resets, (decision.action & Action.CUT_LR) != 0)
            factor = jnp.ones_like(decision.lr_scale) if cuts_inside else decision.lr_scale
            if late:
                now = injected_rates(inner_state)[0] * decision.lr_scale
                factor = factor * _within_limit(engine, heal, now)
            norm = bad = None
            if engine.clips_updates:
                norm, bad = measured(updates)
                assert norm is not None
                heal, share = heal_state.clip_update(engine, heal, norm, decision.skip)
                norm, factor = norm * factor, factor * share
            if (engine.scales_lr and not cuts_inside) or engine.clips_updates or late:
                updates = gradients.scale(updates, factor)
            if bad is None:
                norm, bad = measured(updates)
            skipped, bad = decision.skip | bad, bad & ~decision.skip
            if engine.mode == "observe":  # only what the caller skips is withheld
                skipped = decision.skip
                updates = gradients.fill_where(updates, skipped, -0.0)
            else:
                updates = gradients.no_update_where(updates, skipped)
            norm = None if norm is None else jnp.where(skipped, 0.0, norm)
        norm = norm if reads_update_norm else None
        return updates, ProtectState(heal, norm, bad, pending, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _transformation(
    engine: Engine, on_skip: OnSkip, axes: Axes, kept: int = STEPS
) -> optax.GradientTransformationExtraArgs:
    filling = 0.0 if on_skip == "zero" else math.nan

    def init(params: optax.Params) -> HealState:
        check_leaves(params, "params", _ARRAYS_ONLY)
        return on_mesh_of(params, heal_state.init(engine, count_leaves(params), kept))

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, HealState]:
        del params
        given, _ = split_keywords(extra_args)
        signals, norms = make_signals(engine, updates, given, axes)
        state, decision = heal_state.step(engine, state, signals, norms)
        if engine.mode == "observe" and "externally_skipped" not in given:
            return updates, state
        updates = _enforce(engine, decision, updates)
        return gradients.fill_where(updates, decision.skip, filling), state

    return optax.GradientTransformationExtraArgs(init, update)


def _within_limit(engine: Engine, heal: HealState, rate: chex.Array) -> chex.Array:
    """Factor from a rate, multiplier included, to the limit that a cut has set; at most 1."""
    lr = heal_state.engine_state(engine, heal).lr
    limit = jnp.asarray(engine.config.lr.ceiling, jnp.float32) * lr.broken
    above = (limit > 0) & (rate > limit)
    return jnp.where(above, limit / jnp.where(above, rate, 1.0), 1.0)


def _enforce(engine: Engine, decision: Decision, updates: optax.Updates) -> optax.Updates:
    """Scales the gradients as decided. In observe mode they are not touched at all."""
    if engine.mode == "observe":
        return updates
    if decision.group_scale is not None:
        return gradients.scale_each(updates, decision.group_scale * decision.grad_scale)
    if engine.config.clip is None:
        return updates
    return gradients.scale(updates, decision.grad_scale)


def _check_on_skip(on_skip: str) -> None:
    if on_skip not in ("zero", "nan"):
        raise ValueError(
            f"on_skip must be 'zero' or 'nan', got {on_skip!r}: 'nan' is for a chain with "
            "optax.apply_if_finite after heal, 'zero' for any other"
        )


def _keywords_of(update: Any) -> frozenset[str] | None:
    """The keywords that an `update` names, or None if it takes all keywords."""
    parameters = inspect.signature(update).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    return frozenset(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)


def _check_optimizer(inner: Any) -> None:
    """Raises TypeError unless `inner` has what optax calls: `init` and `update`."""
    is_made = not isinstance(inner, type)
    if is_made and all(callable(getattr(inner, name, None)) for name in ("init", "update")):
        return  # optax.MultiSteps is not a GradientTransformation, and works
    raise TypeError(
        "protect takes an optax transformation, which has init and update, got "
        f"{getattr(inner, '__name__', f'a {type(inner).__name__}')}: write "
        "protect(optax.adamw(1e-3), policy), with the optimizer called and the policy second; in a "
        "TrainState or an nnx.Optimizer write tx=protect(...)"
    )
