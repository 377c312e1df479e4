"""`Protection`: what `protect` does in each step. It is traced into the program's compiled step.

One step, from top to bottom. The host takes no part: each arrow is in the compiled program.

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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from healcore.core.array_namespace import shortest_decimal
from healcore.core.decision import Action, Decision
from healcore.core.engine import Engine
from healcore.jax import gradients, heal_state, optimizer_numbers
from healcore.jax.compilation import in_one_call
from healcore.jax.heal_state import HealState, ProtectState, ScaleByHealLrState, no_heal_state_error
from healcore.jax.optax_states import check_second_iterates, replicate_over_mesh, reset_moments
from healcore.jax.optimizer_numbers import injected_rates
from healcore.jax.optimizer_step import OptimizerStep
from healcore.jax.signals import Axes, checked, count_leaves, make_signals, split_keywords
from healcore.jax.trees import PyTree, arrays_of, is_number, map_nodes, nodes, with_arrays


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
        heal_state.check(self.engine, state.heal)
        given, others = split_keywords(extra_args)
        keywords = {}
        for name, value in (given | others).items():
            if self._named is not None and name not in self._named:
                continue
            keywords[name] = jnp.asarray(value) if is_number(value) else value
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
            numbers, given_state = optimizer_numbers.step(numbers, old)
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
        healing, decision = heal_state.step(engine, before, signals, leaf_norms)
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
        updates = clip(engine, decision, healing, read, given, self.axes)
        # Replaces bad gradients by zeros, so that a loop in the optimizer (line search,
        # Newton-Schulz) terminates. XLA fuses this with the scaling, at no cost.
        updates = gradients.fill_where(updates, skip, 0.0)
        updates, inner_state = traced.take_or_skip(skip, old, updates, given_state, arrays)
        if numbers is not None:
            inner_state = optimizer_numbers.with_program_numbers(inner_state, given_state, old)
        if scales_updates:
            updates = gradients.scale(updates, decision.lr_scale)
        if heals and traced.may_divide_by_zero():
            updates = gradients.fill_nonfinite(updates)
        updates = gradients.fill_where(updates, skip, -0.0)
        return updates, ProtectState(healing, resets, inner_state)


def clip(
    engine: Engine,
    decision: Decision,
    state: HealState,
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
        state: the state after the step, in which a rollback may have set a limit of the norm.
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
        return gradients.scale_to_limit(updates, decision.grad_scale)
    if not engine.clips_at_fixed_norm or "grad_norm" in given or axes.split:
        return gradients.scale(updates, decision.grad_scale)
    max_norm = engine.config.clip.max_norm
    if isinstance(max_norm, int | float):
        max_norm = shortest_decimal(np.float32(max_norm))
    is_limited = heal_state.has_norm_limit(state)
    return gradients.clip_as_optax(updates, max_norm, decision.grad_scale, is_limited)


def _zeros_where(unread: list[bool], updates: PyTree) -> PyTree:
    """The gradients with zeros in the place of those that the optimizer does not read."""
    leaves, structure = jax.tree.flatten(updates)
    for place, leaf in enumerate(leaves):
        if unread[place] and gradients.is_gradient(leaf):
            leaves[place] = jnp.zeros_like(leaf)
    return structure.unflatten(leaves)
