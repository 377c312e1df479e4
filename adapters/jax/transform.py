"""The optax transformations: `protect` wraps an optimizer; `heal` and `heal_zclip` precede it.

    protect(adamw)              gradients -> [ judge, clip | adamw | scale, skip ] -> updates
    chain(heal(), adamw)        gradients -> [ judge, clip ] -> adamw -> updates
    chain(heal(), adamw,
          scale_by_heal_lr())   gradients -> [ judge, clip ] -> adamw -> [ scale ] -> updates

Only `protect` can skip a step exactly, because only it decides whether the optimizer's new state is
kept. `protection.py` is what it does in each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax

from healcore.core.engine import Engine, EngineConfig
from healcore.jax import gradients, heal_state
from healcore.jax.compilation import in_one_call
from healcore.jax.heal_state import DEFAULT_RECORDS, HealState, ScaleByHealLrState
from healcore.jax.optax_states import replicate_over_mesh
from healcore.jax.protection import Protection, clip
from healcore.jax.signals import (
    Axes,
    AxisName,
    checked,
    count_leaves,
    make_signals,
    split_keywords,
)
from healcore.jax.trees import PyTree, is_array
from healcore.policy import Overrides, PolicyLike, engine_of
from healcore.policy.overrides import check_spelling


def heal(
    policy: PolicyLike = "default",
    *,
    axis_name: AxisName = None,
    shard_axis_name: AxisName = None,
    records: int = DEFAULT_RECORDS,
    **overrides: Unpack[Overrides],
) -> optax.GradientTransformationExtraArgs:
    """Judges each step by a policy, and clips or replaces its gradients.

        tx = optax.chain(heal("default"), optax.adamw(schedule), scale_by_heal_lr())
        updates, state = tx.update(grads, state, params, value=loss)

    On a skip, `heal` passes zeros to the optimizer that follows it in the chain. The optimizer
    still takes a step: moments decay, counters count, and Adam and weight decay still move the
    parameters a little. For a skip that changes nothing, use `protect`. The policy's LR multiplier
    is in the decision; `scale_by_heal_lr` applies it. Every gradient is judged. If later members of
    the chain freeze parameters, use `protect`.

    Args:
        policy: a preset's name, the path of a TOML file, a `healcore.policy.Policy`, an Engine or
            an EngineConfig, whose numbers may be traced arrays.
        axis_name: mesh axes of a `shard_map` or `pmap` around the update along which gradients are
            equal (averaged with `pmean`). Loss and norms are averaged over these axes, so that
            every device makes the same decision. It is not needed under `jit` alone.
        shard_axis_name: mesh axes along which each device has its own part of the gradients. Norms
            are combined over these axes. If only some leaves are split, pass `grad_norm` instead.
        records: see `protect`.
        **overrides: values to replace in the policy, ``clip={"max_norm": 1.0}``; see
            `healcore.policy.Overrides`.

    Returns:
        A transformation whose `update` takes these optional keywords, each a 0-d number or bool.
        `value` is the loss; without it the detectors of the loss are inactive. `learning_rate` is
        the rate of this step, for a policy with an absolute limit. `grad_norm` is the norm, if it
        has to be reduced over a mesh. `eval_loss` is NaN at steps without evaluation.
        `change_expected` and `externally_skipped` are bools. Unknown keywords are ignored. `update`
        raises SignalError, while tracing, for a signal that is not a 0-d number or bool.

    Raises:
        ValueError: `records` is not a whole number >= 1.
        healcore.policy.PolicyError: the policy does not exist or is invalid.
        TypeError: an unknown keyword resembles the name of an argument.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> tx = optax.chain(heal("zclip"), optax.sgd(0.1))
        >>> params = {"w": jnp.ones(3)}
        >>> state = tx.init(params)
        >>> grads = {"w": jnp.full(3, jnp.nan)}
        >>> updates, state = tx.update(grads, state, params, value=jnp.float32(2.0))
        >>> bool(jnp.all(updates["w"] == 0))
        True
    """
    check_spelling(overrides, heal)
    _check_records(records)
    axes = Axes.of(axis_name, shard_axis_name)
    return _transformation(engine_of(policy, overrides), axes, records)


def heal_zclip(
    z_threshold: jax.typing.ArrayLike = 2.5,
    ema_decay: jax.typing.ArrayLike = 0.97,
    warmup_steps: jax.typing.ArrayLike = 25,
    target: Literal["reciprocal", "mean", "max"] = "reciprocal",
    max_norm: jax.typing.ArrayLike | None = 1.0,
    axis_name: AxisName = None,
    shard_axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """ZClip with corrections; replaces `optax.clip_by_global_norm`.

        tx = optax.chain(heal_zclip(), optax.adamw(1e-3))

    Clips a gradient norm that is unusual in its recent history, and skips a step with a non-finite
    gradient (see `heal`). After a real level shift the baseline adapts; the published rule would
    clip every later step. The policy is the preset "zclip" with these numbers, so pass the preset
    to a Healer: ``Healer("zclip")``.

    Args:
        z_threshold: z-score above which a norm is a spike.
        ema_decay: decay of the norm's mean and variance per step, in (0, 1).
        warmup_steps: number of finite norms that are averaged before z-scores apply, at least 1.
        target: norm to which a spike is clipped, with the mean m, the standard deviation s, the
            z-score z and the threshold k: "reciprocal" m + k² s / z, "mean" m, "max" m + k s.
        max_norm: additional absolute limit, or None for no limit.
        axis_name: see `heal`.
        shard_axis_name: see `heal`.

    Returns:
        A transformation; see `heal` for the keywords of its `update`. The numbers may be arrays, so
        that ``optax.inject_hyperparams(heal_zclip)`` can schedule them; their values are not
        checked.

    Raises:
        healcore.policy.PolicyError: a Python number is out of range, an argument is not a number,
            or `target` is unknown.

    References:
        Kumar et al., `ZClip: Adaptive Spike Mitigation for LLM Pre-Training
        <https://arxiv.org/abs/2504.02507>`_, 2025
    """
    plain: dict[str, Any] = {
        "z_threshold": z_threshold,
        "ema_decay": ema_decay,
        "warmup_steps": warmup_steps,
        "max_norm": max_norm,
        "target": target,
    }
    arrays = {name: plain.pop(name) for name in [*plain] if is_array(plain[name])}
    for name, array in arrays.items():
        dtype = jnp.int32 if name == "warmup_steps" else jnp.float32
        arrays[name] = jnp.asarray(array).astype(dtype)
    engine = engine_of("zclip", {"clip": plain})
    if arrays:
        rule = engine.config.clip._replace(**arrays)
        engine = Engine(engine.config._replace(clip=rule))
    return _transformation(engine, Axes.of(axis_name, shard_axis_name))


def protect(
    inner: optax.GradientTransformation,
    policy: PolicyLike = "default",
    *,
    axis_name: AxisName = None,
    shard_axis_name: AxisName = None,
    records: int = DEFAULT_RECORDS,
    **overrides: Unpack[Overrides],
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer: clips its gradients, and skips a bad step exactly.

        tx = protect(optax.adamw(1e-3), "default")
        updates, state = tx.update(grads, state, params, value=loss)

    On a skip, every leaf of the inner state (moments, counters, schedules, accumulators, keys)
    stays bit-identical. The updates are -0.0, so that ``optax.apply_updates`` keeps every parameter
    bit-identical too. Use `commit` for state outside the optimizer (BatchNorm). The policy's LR
    multiplier is applied to the updates in the same step, including weight decay.

    A gradient that the optimizer does not read is not judged: its norm counts as 0. These are the
    frozen parameters of `optax.partition` or `optax.masked` with `optax.set_to_zero`. A parameter
    with a learning rate of 0 is not frozen. If you pass `grad_norm`, omit the frozen parameters.

    With ``[lr] reset_moments`` (as in `pretraining`), the next step after a cut of the learning
    rate starts with zero moments, and with zero counts of their bias correction. Skipped steps do
    not count. Only optax states whose moments are initially zero are reset. The state keeps the old
    moments until that step.

    In observe mode, every step is judged and recorded in the state, and nothing is changed. A step
    with ``externally_skipped=True`` (for instance an fp16 overflow) is skipped in every mode, and
    neither learnt nor counted.

    Do not wrap the result in `optax.apply_if_finite`: it would hide the steps that `protect` skips,
    with their `change_expected` and `eval_loss`.

    Args:
        inner: any optax transformation that keeps the structure, shapes and dtypes of its state.
            With an `optax.MultiSteps` inside, each micro-batch is judged separately, and a skipped
            micro-batch does not enter the accumulator.
        policy: a preset's name, the path of a TOML file, a `healcore.policy.Policy`, an Engine or
            an EngineConfig, whose numbers may be traced arrays.
        axis_name: mesh axes of a `shard_map` or `pmap` around the update along which gradients are
            equal (averaged with `pmean`): a name, a tuple of names, or None. Loss and norms are
            averaged over these axes, so that every device makes the same decision. It is not needed
            under `jit` alone.
        shard_axis_name: mesh axes along which each device has its own part of the gradients: a
            name, a tuple of names, or None. Norms are combined over these axes. If only some leaves
            are split, pass `grad_norm` to `update` instead.
        records: number of steps whose records the state holds for a `Healer`, at least the steps of
            one dispatch (`lax.scan` over steps).
        **overrides: values to replace in the policy, ``clip={"max_norm": 1.0}``; see
            `healcore.policy.Overrides`.

    Returns:
        A transformation whose `update` takes these optional keywords, each a 0-d number or bool.
        `value` is the loss; without it the detectors of the loss are inactive. `learning_rate` is
        the rate of this step, with which a rollback can limit the rate to the last healthy rate.
        `grad_norm` is the norm, if it has to be reduced over a mesh. `eval_loss` is NaN at steps
        without evaluation. `change_expected` announces a planned change, and `externally_skipped`
        marks a step that the program itself skips (both bools). `update` passes these and all other
        keywords to `inner` (only keywords that `inner` names, if it takes no others). It raises
        SignalError, while tracing, for a signal that is not a 0-d number or bool.

    Raises:
        TypeError: `inner` is not an optax transformation, or an unknown keyword resembles the name
            of an argument.
        ValueError: `records` is not a whole number >= 1.
        HealStateError: from `init`, the policy cuts the learning rate and `inner` keeps a second
            iterate that the cut does not reach; see `scale_by_heal_lr`.
        healcore.policy.PolicyError: the policy does not exist or is invalid.

    Examples:
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
    check_spelling(overrides, protect)
    # optax.MultiSteps is no GradientTransformation, and has these methods.
    if isinstance(inner, type) or not hasattr(inner, "init") or not hasattr(inner, "update"):
        name = getattr(inner, "__name__", f"a {type(inner).__name__}")
        raise TypeError(
            f"protect takes an optax transformation, got {name}: write "
            "protect(optax.adamw(1e-3), policy), and tx=protect(...) in a TrainState or "
            "nnx.Optimizer"
        )
    _check_records(records)
    axes = Axes.of(axis_name, shard_axis_name)
    engine = engine_of(policy, overrides)
    inner = optax.with_extra_args_support(inner)
    protection = Protection(inner, engine, axes, records)
    return optax.GradientTransformationExtraArgs(protection.init, protection.update)


def scale_by_heal_lr() -> optax.GradientTransformationExtraArgs:
    """Multiplies the updates by `heal_lr_scale` in the state, initially 1.0.

        tx = optax.chain(heal("default"), optax.adamw(schedule), scale_by_heal_lr())
        ...
        decision = last_decision(opt_state)
        # from the next step on
        opt_state = optax.tree.set(opt_state, heal_lr_scale=decision.lr_scale)

    `heal` precedes the optimizer in a chain, and therefore cannot scale the optimizer's updates.
    This transformation does, at the end of the chain.

    `protect` applies the multiplier itself, in the same step. It needs this transformation only
    within an optimizer that keeps a second iterate, such as `optax.contrib.schedule_free`:

        base = optax.chain(optax.sgd(rate), scale_by_heal_lr())
        tx = protect(optax.contrib.schedule_free(base, rate))

    Returns:
        A transformation whose state is one float32.
    """

    def init(params: optax.Params) -> ScaleByHealLrState:
        return replicate_over_mesh(params, ScaleByHealLrState(jnp.ones((), jnp.float32)))

    def update(
        updates: optax.Updates, state: PyTree, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, ScaleByHealLrState]:
        del params, extra_args
        return in_one_call(gradients.scale, updates, state.heal_lr_scale), state

    return optax.GradientTransformationExtraArgs(init, update)


def _transformation(
    engine: Engine, axes: Axes, records: int = DEFAULT_RECORDS
) -> optax.GradientTransformationExtraArgs:
    """The transformation of `heal` and `heal_zclip` for an engine."""

    def init(params: optax.Params) -> HealState:
        return replicate_over_mesh(params, heal_state.init(engine, count_leaves(params), records))

    def update(
        updates: optax.Updates, state: PyTree, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, HealState]:
        del params
        heal_state.check(engine, state)
        given = checked(split_keywords(extra_args)[0], engine)
        return in_one_call(
            _judge_and_clip, engine.config, engine.limits_norm, axes, updates, state, given
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _judge_and_clip(
    config: EngineConfig,
    limits_norm: bool,
    axes: Axes,
    updates: PyTree,
    state: HealState,
    given: Mapping[str, Any],
) -> tuple[PyTree, HealState]:
    """One step of `heal`. The engine is taken apart, because its numbers may be traced arrays."""
    engine = Engine(config, limits_norm=limits_norm)
    signals, norms = make_signals(engine, updates, given, axes)
    state, decision = heal_state.step(engine, state, signals, norms)
    if engine.mode == "observe" and "externally_skipped" not in given:
        return updates, state
    updates = clip(engine, decision, state, updates, given, axes)
    return gradients.fill_where(updates, decision.skip, 0.0), state


def _check_records(records: int) -> None:
    """Raises ValueError unless `records` is a number of steps."""
    if not isinstance(records, int | np.integer) or records < 1:
        raise ValueError(f"records is a number of steps >= 1, as records=64, not {records!r}")
