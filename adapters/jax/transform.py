"""The optax transformations: `protect` wraps an optimizer; `heal` and `heal_zclip` precede it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_leaves_with_path

from healcore.core import numerics
from healcore.core.decision import Action, Decision
from healcore.core.engine import Engine
from healcore.jax import (
    gradients,
    heal_state,
    optimizer_constants,
    optimizer_numbers,
    update_check,
)
from healcore.jax.array_leaves import PyTree, arrays_of, with_arrays
from healcore.jax.commit import Step, step_or_keep
from healcore.jax.heal_state import RECORDS, HealState, ScaleByHealLrState
from healcore.jax.optax_states import check_second_iterates, replicate_over_mesh, reset_moments
from healcore.jax.signals import Axes, AxisName, count_leaves, make_signals, split_keywords
from healcore.jax.tree_nodes import map_nodes, nodes
from healcore.policy import Overrides, PolicyLike, engine_of
from healcore.policy.overrides import check_spelling


def heal(
    policy: PolicyLike = "default",
    *,
    axis_name: AxisName = None,
    shard_axis_name: AxisName = None,
    records: int = RECORDS,
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
        A transformation. Its `update` takes these optional keywords: `value` (loss, 0-d floating),
        `eval_loss` (NaN at steps without evaluation), `grad_norm` (if it has to be reduced over a
        mesh), `change_expected` and `externally_skipped` (bool), and `learning_rate` (of the
        schedule, for a policy with an absolute limit). Without `value` the detectors of the loss
        are inactive. Unknown keywords are ignored. `update` raises SignalError, while tracing, for
        a signal that is not a 0-d number or bool.

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
        target: rule for the norm to which a spike is clipped.
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
    numbers: dict[str, Any] = {
        "z_threshold": z_threshold,
        "ema_decay": ema_decay,
        "warmup_steps": warmup_steps,
        "max_norm": max_norm,
    }
    arrays: dict[str, jax.Array] = {}
    plain: dict[str, Any] = {}
    for name, value in numbers.items():
        if not isinstance(value, jax.Array | np.ndarray):
            plain[name] = value
        elif name == "warmup_steps":
            arrays[name] = jnp.asarray(value).astype(jnp.int32)
        else:
            arrays[name] = jnp.asarray(value).astype(jnp.float32)
    engine = engine_of("zclip", {"clip": {**plain, "target": target}})
    if arrays and engine.config.clip:
        kind, clip = engine.config.clip
        engine = Engine(engine.config._replace(clip=(kind, clip._replace(**arrays))))
    return _transformation(engine, Axes.of(axis_name, shard_axis_name))


class ProtectState(NamedTuple):
    """The state of `protect`: the healing state, and the state of the protected optimizer.

    `without_heal_state` takes the inner state out, and `with_heal_state` puts one in.
    """

    heal: HealState
    """What the engine knows of the run, and the decision of the last step."""
    heal_reset_moments: Any
    """bool 0-d: whether the last step that was not skipped cut the learning rate. The next step
    then resets the moments to zero. None if the policy does not reset moments."""
    inner_state: PyTree
    """The state of the optimizer, bit-identical after a skipped step."""


def protect(
    inner: optax.GradientTransformation,
    policy: PolicyLike = "default",
    *,
    axis_name: AxisName = None,
    shard_axis_name: AxisName = None,
    records: int = RECORDS,
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
        policy: see `heal`.
        axis_name: see `heal`.
        shard_axis_name: see `heal`.
        records: number of steps whose records the state holds for a `Healer`, at least the steps of
            one dispatch (`lax.scan` over steps).
        **overrides: see `heal`.

    Returns:
        A transformation that takes the keywords of `heal`'s update. It passes these and all other
        keywords to `inner` (only keywords that `inner` names, if it takes no others).

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
    _check_optimizer(inner)
    _check_records(records)
    axes = Axes.of(axis_name, shard_axis_name)
    engine = engine_of(policy, overrides)
    inner = optax.with_extra_args_support(inner)
    protection = _Protection(inner, engine, axes, records, _keywords_of(inner.update))
    return optax.GradientTransformationExtraArgs(protection.init, protection.update)


class _Call(NamedTuple):
    """The arguments of one call of `update`, as the optimizer and the engine need them."""

    step: Step
    """The optimizer's own step, with the keywords of the call."""
    updates: PyTree
    """The gradients."""
    state: ProtectState
    params: PyTree
    """The arrays of the parameters, without functions and other static leaves."""
    has_static: bool
    """Whether the program's parameters have static leaves, as an Equinox module has."""
    given: dict[str, Any]
    """The keywords for healcore, such as `value`."""
    keywords: dict[str, Any]
    """The keywords for the optimizer."""

    @property
    def inputs(self) -> tuple[PyTree, PyTree, PyTree]:
        """The arguments of `step`."""
        return self.updates, self.state.inner_state, self.params


class _Measured(NamedTuple):
    """What `_Protection` measures before the engine judges a step."""

    unread: list[bool]
    """Whether the optimizer ignores each gradient, as the gradient of a frozen parameter."""
    read: PyTree
    """The gradients that the optimizer does not ignore."""
    numbers: Any
    """`HealState.heal_numbers` after this step."""
    held: optimizer_numbers.HeldNumbers | None
    """The numbers of the optimizer that this step replaces, or None for no replacement."""
    bad_update: Any
    """Whether the optimizer would make NaN of finite gradients, bool 0-d, or None if unknown."""


@dataclass(frozen=True, eq=False)
class _Protection:
    """The transformation that `protect` returns: an optimizer with an engine.

    `update` measures, judges and enforces. All of this is traced into the program's step.
    """

    inner: optax.GradientTransformationExtraArgs
    engine: Engine
    axes: Axes
    records: int
    accepted_keywords: frozenset[str] | None
    """The keywords that the optimizer takes, or None for any keyword."""
    unread_if_eager: dict[Any, list[bool]] = field(default_factory=dict)
    """See `gradients.find_unread`."""

    @property
    def heals(self) -> bool:
        """Whether decisions are enforced. Observe mode only records them."""
        return self.engine.mode != "observe"

    @property
    def scales_lr(self) -> bool:
        """Whether the updates are multiplied by the policy's learning-rate multiplier."""
        return self.heals and self.engine.scales_lr

    def init(self, params: optax.Params) -> ProtectState:
        """Makes the state of the optimizer and the healing state."""
        inner_state = self.inner.init(params)
        optimizer_numbers.warn_if_rounded(self.inner.init, params, inner_state)
        optimizer_constants.remember(self.inner.update, arrays_of(params), inner_state)
        if self.scales_lr:
            check_second_iterates(inner_state, "a cut of the learning rate")
        healing = heal_state.init(self.engine, count_leaves(params), self.records)
        healing = healing._replace(heal_numbers=optimizer_numbers.init(inner_state))
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
            raise heal_state.no_heal_state_error(state)
        call = self._call(updates, state, params, extra_args)
        measured = self._measure(call)
        # Called here, because its warning names the line that called `update`.
        signals, leaf_norms = make_signals(
            self.engine, measured.read, call.given, self.axes, measured.bad_update
        )
        before = state.heal._replace(heal_numbers=None)
        healing, decision = heal_state.step(self.engine, before, signals, leaf_norms)
        updates, inner_state = self._enforce(call, measured, healing, decision)
        resets = state.heal_reset_moments
        if resets is not None:
            resets = jnp.where(decision.skip, resets, (decision.action & Action.CUT_LR) != 0)
        healing = healing._replace(heal_numbers=measured.numbers)
        return updates, ProtectState(healing, resets, inner_state)

    def _call(
        self, updates: PyTree, state: ProtectState, params: PyTree, extra_args: dict[str, Any]
    ) -> _Call:
        """Separates the keywords, and the arrays of the parameters from their static leaves."""
        given, others = split_keywords(extra_args)
        keywords = given | others
        accepted = self.accepted_keywords
        if accepted is not None:
            keywords = {name: value for name, value in keywords.items() if name in accepted}
        arrays = arrays_of(params)

        def step(updates: PyTree, state: PyTree, arrays: PyTree) -> tuple[Any, Any]:
            return self.inner.update(updates, state, with_arrays(params, arrays), **keywords)

        return _Call(step, updates, state, arrays, params is not arrays, given, keywords)

    def _measure(self, call: _Call) -> _Measured:
        """Finds the gradients that the optimizer reads, and what its numbers would do with them.

        Adds the learning rate to `call.given` if the engine needs it and the state has it.
        """
        unread = gradients.find_unread(self.unread_if_eager, call.step, *call.inputs)
        if self.engine.limits_lr and "learning_rate" not in call.given:
            call.given.update(_injected_rate(call.step, *call.inputs))
        read = gradients.without_unread(call.updates, unread)
        numbers = call.state.heal.heal_numbers
        held = None
        if numbers is not None:
            numbers, held = optimizer_numbers.step(numbers, call.state.inner_state)
        bad_update = None
        if self.heals:
            bad_update = self._makes_nonfinite(call, held)
        else:
            held = None
        return _Measured(unread, read, numbers, held, bad_update)

    def _makes_nonfinite(self, call: _Call, held: optimizer_numbers.HeldNumbers | None) -> Any:
        """Whether the optimizer would make NaN of finite gradients, see `update_check`."""
        state = call.state.inner_state
        if held is not None:
            state = optimizer_numbers.with_held(state, held)
        if call.has_static:
            return update_check.makes_nonfinite(call.step, {}, call.updates, state, call.params)
        # `inner.update` is the same function at every call, so that eager code compiles it once.
        return update_check.makes_nonfinite(
            self.inner.update, call.keywords, call.updates, state, call.params
        )

    def _enforce(
        self, call: _Call, measured: _Measured, healing: HealState, decision: Decision
    ) -> tuple[Any, Any]:
        """Clips the gradients, then takes the optimizer's step or keeps its state.

        Returns:
            The updates and the new state of the optimizer.
        """
        scales_inside = self.scales_lr and bool(nodes(ScaleByHealLrState, call.state.inner_state))
        inside_scale = None
        if scales_inside:
            inside_scale = decision.lr_scale
        resets = call.state.heal_reset_moments
        step = _changed_step(call.step, resets, inside_scale, measured.held)
        if not self.heals and "externally_skipped" not in call.given:
            return step(*call.inputs)
        finite = gradients.finite_unread(call.updates, measured.unread)
        if _is_optax_clip(self.engine, call.given, self.axes):
            updates = _clip_as_optax(self.engine, decision, healing, finite, measured.read)
        else:
            updates = _clip(self.engine, decision, finite)
        return _step_or_skip(
            step,
            decision,
            updates,
            call.state.inner_state,
            call.params,
            scales_lr=self.scales_lr and not scales_inside,
            keeps_bad=self.heals,
        )


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
        return gradients.scale(updates, state.heal_lr_scale), state

    return optax.GradientTransformationExtraArgs(init, update)


def _step_or_skip(
    step: Step,
    decision: Decision,
    updates: PyTree,
    state: PyTree,
    params: PyTree,
    *,
    scales_lr: bool,
    keeps_bad: bool,
) -> tuple[Any, Any]:
    """Takes or skips the optimizer's step. Returns the updates, scaled if asked, and the state.

    With `keeps_bad`, an element whose update is not finite keeps its parameter.
    """
    # Replaces bad gradients by zeros, so that a loop in the optimizer (line search, Newton-Schulz)
    # terminates. XLA fuses this with the scaling, at no cost.
    updates = gradients.fill_where(updates, decision.skip, 0.0)
    updates, state = step_or_keep(step, decision.skip, updates, state, params)
    if scales_lr:
        updates = gradients.scale(updates, decision.lr_scale)
    if keeps_bad:
        return gradients.fill_bad(updates, decision.skip), state
    return gradients.fill_where(updates, decision.skip, -0.0), state


def _changed_step(
    update: Step, resets: Any, lr_scale: Any, held: optimizer_numbers.HeldNumbers | None
) -> Step:
    """The optimizer's step after changes of its state, each unless it is None.

    Args:
        update: the optimizer's own step.
        resets: whether the moments are reset, bool 0-d.
        lr_scale: the multiplier for `scale_by_heal_lr`, 0-d.
        held: the numbers to replace for this step. The new state has the program's own numbers.
    """

    def zeroed_if_reset(leaf: jax.Array) -> jax.Array:
        return jnp.where(resets, jnp.zeros_like(leaf), leaf)

    def step(updates: PyTree, state: PyTree, params: PyTree) -> tuple[Any, Any]:
        if resets is not None:
            # At the start of the step after the cut, XLA fuses the reset into the optimizer's
            # kernel. At the end of the step that cuts, it would be a second pass over all moments.
            state = reset_moments(state, zeroed_if_reset)
        if lr_scale is not None:
            scale = ScaleByHealLrState(lr_scale.astype(jnp.float32))
            state = map_nodes(ScaleByHealLrState, lambda _: scale, state)
        if held is None:
            return update(updates, state, params)
        given = optimizer_numbers.with_held(state, held)
        updates, new = update(updates, given, params)
        return updates, optimizer_numbers.with_own(new, given, state, held)

    return step


def _injected_rate(
    update: Any, updates: PyTree, inner_state: PyTree, params: PyTree
) -> dict[str, Any]:
    """The step's learning rate in a state of `optax.inject_hyperparams`, unless it has several."""
    rates = injected_rates(inner_state)
    is_scheduled = False
    for path, _ in tree_leaves_with_path(inner_state):
        if ".hyperparams_states['learning_rate']" in keystr(path):
            is_scheduled = True
    if len(rates) == 1 and is_scheduled:
        # The state has the last step's rate. XLA keeps only the schedule of this call.
        zeros = gradients.fill_where(updates, jnp.array(True), 0.0)
        rates = injected_rates(update(zeros, inner_state, params)[1])
    if len(rates) != 1:
        return {}
    return {"learning_rate": rates[0]}


def injected_hyperparameters(tree: PyTree) -> dict[str, jax.Array]:
    """Finds the hyperparameters in the states of `optax.inject_hyperparams`.

    Args:
        tree: an optimizer state, or any tree that contains some.

    Returns:
        Path -> hyperparameter, floating and 0-d, such as a learning rate or a weight decay.
    """
    found = {}
    for path, leaf in optimizer_numbers.injected_leaves(tree).items():
        if jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            found[keystr(path)] = leaf
    return found


def injected_rates(tree: PyTree) -> list[jax.Array]:
    """Finds the learning rates in the states of `optax.inject_hyperparams`.

    Args:
        tree: an optimizer state, or any tree that contains some.

    Returns:
        The rates, floating and 0-d. More than one if the tree has several such states.
    """
    rates = []
    for path, leaf in injected_hyperparameters(tree).items():
        if path.endswith(".hyperparams['learning_rate']"):
            rates.append(leaf)
    return rates


def _transformation(
    engine: Engine, axes: Axes, records: int = RECORDS
) -> optax.GradientTransformationExtraArgs:
    """The transformation of `heal` and `heal_zclip` for an engine."""

    def init(params: optax.Params) -> HealState:
        return replicate_over_mesh(params, heal_state.init(engine, count_leaves(params), records))

    def update(
        updates: optax.Updates, state: PyTree, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, HealState]:
        del params
        given, _ = split_keywords(extra_args)
        signals, norms = make_signals(engine, updates, given, axes)
        state, decision = heal_state.step(engine, state, signals, norms)
        if engine.mode == "observe" and "externally_skipped" not in given:
            return updates, state
        if _is_optax_clip(engine, given, axes):
            updates = _clip_as_optax(engine, decision, state, updates, updates)
        else:
            updates = _clip(engine, decision, updates)
        return gradients.fill_where(updates, decision.skip, 0.0), state

    return optax.GradientTransformationExtraArgs(init, update)


def _check_records(records: int) -> None:
    """Raises ValueError unless `records` is a number of steps."""
    if not isinstance(records, int | np.integer) or records < 1:
        raise ValueError(f"records is a number of steps >= 1, as records=64, not {records!r}")


def _is_optax_clip(engine: Engine, given: Mapping[str, Any], axes: Axes) -> bool:
    """Whether the policy clips at a fixed norm, and optax would compute it from these gradients.

    False with a norm that the caller has reduced over devices, and for parts of gradients.
    """
    if not engine.clips_at_fixed_norm or engine.mode == "observe":
        return False
    return "grad_norm" not in given and not axes.split


def _clip_as_optax(
    engine: Engine, decision: Decision, state: HealState, updates: PyTree, measured: PyTree
) -> Any:
    """See `gradients.clip_as_optax`."""
    assert engine.config.clip is not None
    max_norm = engine.config.clip[1].max_norm
    if isinstance(max_norm, int | float):
        max_norm = numerics.shortest_decimal(np.float32(max_norm))
    is_limited = None
    if engine.limits_norm:
        is_limited = heal_state.has_norm_limit(engine, state)
    return gradients.clip_as_optax(updates, measured, max_norm, decision.grad_scale, is_limited)


def _clip(engine: Engine, decision: Decision, updates: optax.Updates) -> optax.Updates:
    """Scales the gradients by the decision. Returns them unchanged in observe mode.

    Without clipping the factor is 1 until a limit of the norm is set in the state, whose value is
    not known while tracing. The optimizer then receives the same gradients. Measured on a CPU in
    float32: `heal` keeps every bit of SGD with and without momentum, and `protect` every bit that
    it has without the limit. A moving average (Adam, Lion) is a sum of two products, of which LLVM
    contracts one, so its last bits differ from a run without healcore, with or without the limit.

    Rejected: `lax.cond`, which keeps more bits, but writes all gradients once more (16 MB of
    gradients with adamw: 14.2 ms a step against 13.0 ms).
    """
    if engine.mode == "observe":
        return updates
    if decision.group_scale is not None:
        return gradients.scale_each(updates, decision.group_scale * decision.grad_scale)
    if not engine.scales_grads:
        return updates
    if engine.config.clip is None:  # only a limit of the norm scales
        return gradients.scale_to_limit(updates, decision.grad_scale)
    return gradients.scale(updates, decision.grad_scale)


def _keywords_of(update: Any) -> frozenset[str] | None:
    """The keywords that an `update` names, or None if it takes any keyword."""
    names = []
    for parameter in inspect.signature(update).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return None
        if parameter.kind is parameter.KEYWORD_ONLY:
            names.append(parameter.name)
    return frozenset(names)


def _check_optimizer(inner: Any) -> None:
    """Raises TypeError unless `inner` has the methods `init` and `update`."""
    is_made = not isinstance(inner, type)
    has_init = callable(getattr(inner, "init", None))
    has_update = callable(getattr(inner, "update", None))
    if is_made and has_init and has_update:
        return  # accepts optax.MultiSteps too, which is not a GradientTransformation
    name = getattr(inner, "__name__", f"a {type(inner).__name__}")
    raise TypeError(
        f"protect takes an optax transformation, got {name}: write "
        "protect(optax.adamw(1e-3), policy), and tx=protect(...) in a TrainState or nnx.Optimizer"
    )
