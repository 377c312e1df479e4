"""`Protection`: what `protect` does in each step. It is traced into the program's compiled step.

One step, from top to bottom. The host takes no part: each arrow is in the compiled program.

    gradients, loss                                       old state of the optimizer
          |                                                         |
    _measure    which gradients are read, which numbers of          |
          |     the optimizer are held, would it make NaN           |
    make_signals -- Signals --> heal_state.step -- Decision         |
          |                                            |            |
    _enforce    clip the gradients; zeros on a skip <--+            |
                step_or_keep: the optimizer's step <---+------------+
                scale the updates; -0.0 on a skip <----+            |
          |                                                         |
    updates for optax.apply_updates             new state, or the old one on a skip
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr, tree_leaves_with_path

from healcore.core.decision import Action, Decision
from healcore.core.engine import Engine
from healcore.jax import (
    flax_statistics,
    gradients,
    heal_state,
    optimizer_numbers,
    update_check,
)
from healcore.jax.clipping import clip
from healcore.jax.commit import Step, step_or_keep
from healcore.jax.heal_state import HealState, ProtectState, ScaleByHealLrState, no_heal_state_error
from healcore.jax.optax_states import check_second_iterates, replicate_over_mesh, reset_moments
from healcore.jax.optimizer_numbers import injected_rates
from healcore.jax.signals import Axes, count_leaves, make_signals, split_keywords
from healcore.jax.trees import PyTree, arrays_of, map_nodes, nodes, with_arrays
from healcore.jax.wrapped_optimizer import warn_if_healed


class _Call(NamedTuple):
    """The arguments of one call of `update`, as the optimizer and the engine need them."""

    step: Step
    """The optimizer's own step, with the keywords of the call."""
    updates: PyTree
    """The gradients."""
    state: ProtectState
    """The state before the step."""
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
    """What `Protection` measures before the engine judges a step."""

    unread: list[bool]
    """Whether the optimizer ignores each gradient, as the gradient of a frozen parameter."""
    read: PyTree
    """The gradients that the optimizer does not ignore."""
    given: dict[str, Any]
    """`_Call.given`, with the learning rate if the engine needs it and the state has it."""
    numbers: Any
    """`HealState.heal_numbers` after this step."""
    held: optimizer_numbers.HeldNumbers | None
    """The numbers of the optimizer that this step replaces, or None for no replacement."""
    bad_update: Any
    """Whether the optimizer would make NaN of finite gradients, bool 0-d, or None if unknown."""


@dataclass(frozen=True, eq=False)
class Protection:
    """The transformation that `protect` returns: an optimizer with an engine.

    `init` and `update` are the methods of an `optax.GradientTransformation`. `update` measures,
    judges and enforces, in this order.
    """

    inner: optax.GradientTransformationExtraArgs
    """The optimizer."""
    engine: Engine
    """The engine of the policy, without state."""
    axes: Axes
    """The mesh axes over which the signals are reduced."""
    records: int
    """Number of steps whose records the state holds."""
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
        warn_if_healed(inner_state)
        optimizer_numbers.warn_if_rounded(self.inner.init, params, inner_state)
        optimizer_numbers.remember(self.inner.update, arrays_of(params), inner_state)
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
            raise no_heal_state_error(state)
        if self.heals:
            flax_statistics.warn_if_kept()
        call = self._call(updates, state, params, extra_args)
        measured = self._measure(call)
        # Called here, because its warning names the line that called `update`.
        signals, leaf_norms = make_signals(
            self.engine, measured.read, measured.given, self.axes, measured.bad_update
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
        """Finds the gradients that the optimizer reads, and what its numbers would do with them."""
        unread = gradients.find_unread(self.unread_if_eager, call.step, *call.inputs)
        given = call.given
        if self.engine.limits_lr and "learning_rate" not in given:
            given = given | _injected_rate(call.step, *call.inputs)
        read = gradients.without_unread(call.updates, unread)
        numbers = call.state.heal.heal_numbers
        held = None
        if numbers is not None:
            numbers, held = optimizer_numbers.step(numbers, call.state.inner_state)
        if not self.heals:  # observe mode records the ranges of the numbers, and replaces none
            return _Measured(unread, read, given, numbers, held=None, bad_update=None)
        bad_update = self._makes_nonfinite(call, held)
        return _Measured(unread, read, given, numbers, held, bad_update)

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
        updates = clip(
            self.engine,
            decision,
            healing,
            finite,
            measured=measured.read,
            given=call.given,
            axes=self.axes,
        )
        return _step_or_skip(
            step,
            decision,
            updates,
            call.state.inner_state,
            call.params,
            scales_lr=self.scales_lr and not scales_inside,
            keeps_bad=self.heals,
        )


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
        return updates, optimizer_numbers.with_program_numbers(new, given, state, held)

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


def keywords_of(update: Any) -> frozenset[str] | None:
    """The keywords that an `update` names, or None if it takes any keyword.

    Args:
        update: the method of an optax transformation.
    """
    names = []
    for parameter in inspect.signature(update).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return None
        if parameter.kind is parameter.KEYWORD_ONLY:
            names.append(parameter.name)
    return frozenset(names)
