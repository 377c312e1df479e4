"""The optax transformations: `protect` wraps an optimizer; `heal` and `heal_zclip` precede it.

    protect(adamw)              gradients -> [ judge, clip | adamw | scale, skip ] -> updates
    chain(heal(), adamw)        gradients -> [ judge, clip ] -> adamw -> updates
    chain(heal(), adamw,
          scale_by_heal_lr())   gradients -> [ judge, clip ] -> adamw -> [ scale ] -> updates

Only `protect` can skip a step exactly, because only it decides whether the optimizer's new state is
kept. One step of it, from top to bottom (`Protection._step`). The host takes no part: each arrow is
in the compiled program.

    gradients, loss                                       old state of the optimizer
          |                                                         |
    which gradients are read, which numbers of                      |
    the optimizer are held, would it make NaN                       |
          |                                                         |
    make_signals -- Signals --> heal_state.step -- Decision         |
          |                                            |            |
    clip; zeros on a skip <----------------------------+            |
    the optimizer's step, or its old state <-----------+------------+
    scale the updates; -0.0 on a skip <----------------+            |
          |                                                         |
    updates for optax.apply_updates             new state, or the old one on a skip
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax

from healcore.core.array_namespace import shortest_decimal
from healcore.core.decision import Action, Decision
from healcore.core.engine import Engine, EngineConfig
from healcore.jax import gradients, heal_state, optax_states
from healcore.jax.compilation import in_one_call
from healcore.jax.gradients import (
    Axes,
    AxisName,
    checked,
    count_leaves,
    make_signals,
    split_keywords,
)
from healcore.jax.heal_state import (
    DEFAULT_RECORDS,
    HealState,
    ProtectState,
    ScaleByHealLrState,
    no_heal_state_error,
)
from healcore.jax.optax_states import (
    check_second_iterates,
    injected_rates,
    replicate_over_mesh,
    reset_moments,
)
from healcore.jax.optimizer_step import OptimizerStep
from healcore.jax.trees import PyTree, arrays_of, is_array, is_number, map_nodes, nodes, with_arrays
from healcore.policy import Overrides, PolicyLike, engine_of


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
        if name == "warmup_steps":
            dtype = jnp.int32
        else:
            dtype = jnp.float32
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
        TypeError: `inner` is not an optax transformation.
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
    state, decision, is_limited = heal_state.step(engine, state, signals, norms)
    if engine.mode == "observe" and "externally_skipped" not in given:
        return updates, state
    updates = clip(engine, decision, is_limited, updates, given, axes)
    return gradients.fill_where(updates, decision.skip, 0.0), state


def _check_records(records: int) -> None:
    """Raises ValueError unless `records` is a number of steps."""
    if not isinstance(records, int | np.integer) or records < 1:
        raise ValueError(f"records is a number of steps >= 1, as records=64, not {records!r}")


# -- what protect does in each step ----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Protection:
    """The transformation that `protect` returns: an optimizer with an engine.

    `init` and `update` are the methods of an `optax.GradientTransformation`.
    """

    inner: optax.GradientTransformationExtraArgs
    """The optimizer."""
    engine: Engine
    """The engine of the policy, without state."""
    axes: Axes
    """The mesh axes over which the signals are reduced."""
    records: int
    """Number of steps whose records the state holds."""

    @property
    def scales_lr(self) -> bool:
        """Whether the updates are multiplied by the policy's learning-rate multiplier."""
        return self.engine.mode != "observe" and self.engine.scales_lr

    @cached_property
    def _named(self) -> frozenset[str] | None:
        """The keywords that the optimizer names, as SAM's; None if it takes any."""
        parameters = inspect.signature(self.inner.update).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return None
        return frozenset(parameter.name for parameter in parameters)

    def init(self, params: optax.Params) -> ProtectState:
        """Makes the state of the optimizer and the healing state."""
        inner_state = self.inner.init(params)
        optax_states.remember_optimizer(self.inner.update, arrays_of(params), inner_state)
        if self.scales_lr:
            check_second_iterates(inner_state, "a cut of the learning rate")
        healing = heal_state.init(self.engine, count_leaves(params), self.records)
        healing = healing._replace(heal_numbers=optax_states.init_numbers(inner_state))
        resets = None
        if self.engine.resets_moments:
            resets = jnp.zeros((), jnp.bool_)
        return replicate_over_mesh(params, ProtectState(healing, resets, inner_state))

    def update(
        self,
        updates: optax.Updates,
        state: PyTree,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ProtectState]:
        """Judges a step, and takes or skips it."""
        if not isinstance(state, ProtectState):
            raise no_heal_state_error(state)
        heal_state.check(self.engine, state.heal)
        given, others = split_keywords(extra_args)
        keywords = {}
        for name, value in (given | others).items():
            if self._named is not None and name not in self._named:
                continue
            if is_number(value):
                keywords[name] = jnp.asarray(value)
            else:
                keywords[name] = value
        signals = checked(given, self.engine)
        return in_one_call(self._step, updates, state, params, signals, keywords)

    def _step(
        self,
        updates: PyTree,
        state: ProtectState,
        params: PyTree,
        given: dict[str, Any],
        keywords: dict[str, Any],
    ) -> tuple[PyTree, ProtectState]:
        """The whole step, of which every operation is traced.

        Args:
            updates: the gradients.
            state: the state before the step.
            params: the parameters, whose static leaves are constants.
            given: the signals for healcore, see `checked`.
            keywords: the keywords for the optimizer.
        """
        engine = self.engine
        heals = engine.mode != "observe"

        def inner_step(updates: PyTree, state: PyTree, arrays: PyTree) -> tuple[Any, Any]:
            return self.inner.update(updates, state, with_arrays(params, arrays), **keywords)

        old = state.inner_state
        arrays = arrays_of(params)
        traced = OptimizerStep(inner_step, updates, old, arrays)
        numbers = state.heal.heal_numbers
        given_state = old
        if numbers is not None:
            numbers, given_state = optax_states.follow_numbers(numbers, old)
        rates = injected_rates(old)
        if engine.limits_lr and "learning_rate" not in given and len(rates) == 1:
            rate = traced.rate(rates[0], updates, old, arrays)
            if rate is not None:
                given = {**given, "learning_rate": rate.astype(jnp.float32)}
        # No update depends on a gradient that is not read, so a NaN in it does no harm.
        read = _zeros_where(traced.unread(), updates)
        bad_update = None
        if heals:
            bad_update = traced.makes_nonfinite(read, given_state, arrays)
        else:
            given_state = old

        signals, leaf_norms = make_signals(engine, read, given, self.axes, bad_update)
        before = state.heal._replace(heal_numbers=None)
        healing, decision, is_limited = heal_state.step(engine, before, signals, leaf_norms)
        healing = healing._replace(heal_numbers=numbers)

        if not heals and "externally_skipped" not in given:
            updates, inner_state = inner_step(updates, old, arrays)
            return updates, ProtectState(healing, state.heal_reset_moments, inner_state)
        skip = decision.skip
        resets = state.heal_reset_moments
        if resets is not None:
            # At the start of the step after the cut, XLA fuses the reset into the optimizer's
            # kernel. At the end of the step that cuts, it would be a second pass over all moments.
            given_state = reset_moments(
                given_state, lambda leaf: jnp.where(resets, jnp.zeros_like(leaf), leaf)
            )
            resets = jnp.where(skip, resets, (decision.action & Action.CUT_LR) != 0)
        scales_updates = self.scales_lr
        if scales_updates and nodes(ScaleByHealLrState, old):
            scales_updates = False
            scale = ScaleByHealLrState(decision.lr_scale.astype(jnp.float32))
            given_state = map_nodes(ScaleByHealLrState, lambda _: scale, given_state)
        updates = clip(engine, decision, is_limited, read, given, self.axes)
        if traced.has_loop():
            # Bad gradients become zeros, so that a line search or Newton-Schulz ends.
            updates = gradients.fill_where(updates, skip, 0.0)
        if scales_updates:
            lr_scale = decision.lr_scale
        else:
            lr_scale = None
        updates, inner_state = traced.take_or_skip(
            skip, old, updates, given_state, arrays, lr_scale=lr_scale, fills=heals
        )
        if numbers is not None:
            inner_state = optax_states.with_program_numbers(inner_state, given_state, old)
        return updates, ProtectState(healing, resets, inner_state)


def clip(
    engine: Engine,
    decision: Decision,
    is_limited: Any,
    updates: PyTree,
    given: Mapping[str, Any],
    axes: Axes,
) -> Any:
    """Clips the gradients of one step, in the arithmetic that keeps the program's bits.

    A clip is a product of each gradient with one factor. Two exceptions exist because a healthy run
    has to end with the bits of a run without healcore. A fixed clip is computed as optax computes
    it, unless the caller has reduced the norm over devices, or the gradients are parts. And a
    factor of 1 leaves the gradients themselves where only a limit of the norm can scale, whose
    value is not known while tracing. A moving average (Adam, Lion) is a sum of two products. LLVM
    contracts one of the two, so its last bits differ from a run without healcore.

    Rejected: `lax.cond`, which keeps more bits, but writes all gradients once more (16 MB of
    gradients with adamw: 14.2 ms a step against 13.0 ms).

    Args:
        engine: the engine of the policy.
        decision: the decision of the step, with its factors.
        is_limited: whether a rollback has set a limit of the norm, bool 0-d.
        updates: the gradients.
        given: the keywords of `update` for healcore, such as `grad_norm`.
        axes: the mesh axes of the step.

    Returns:
        The clipped gradients. In observe mode, and for a policy that does not clip, `updates`.
    """
    if engine.mode == "observe" or not engine.scales_grads:
        return updates
    if decision.group_scale is not None:
        return gradients.scale_each(updates, decision.group_scale * decision.grad_scale)
    if engine.config.clip is None:
        return gradients.scale_to_limit(updates, decision.grad_scale, is_limited)
    if not engine.clips_at_fixed_norm or "grad_norm" in given or axes.split:
        return gradients.scale(updates, decision.grad_scale)
    max_norm = engine.config.clip.max_norm
    if isinstance(max_norm, int | float):
        max_norm = shortest_decimal(np.float32(max_norm))
    return gradients.clip_as_optax(updates, max_norm, decision.grad_scale, is_limited)


def _zeros_where(unread: list[bool], updates: PyTree) -> PyTree:
    """The gradients with zeros in the place of those that the optimizer does not read."""
    leaves, structure = jax.tree.flatten(updates)
    for place, leaf in enumerate(leaves):
        if unread[place] and gradients.is_gradient(leaf):
            leaves[place] = jnp.zeros_like(leaf)
    return structure.unflatten(leaves)
