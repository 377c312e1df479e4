"""The learning-rate multiplier in a chain, where the host can set it."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from healcore.jax.gradients import scale as scaled
from healcore.jax.state import HealStateError, map_nodes, nodes, on_mesh_of

State = TypeVar("State")

_SECOND_ITERATES = {
    "ScheduleFreeState": (
        "z",
        "optax.contrib.schedule_free(optax.chain(optax.sgd(rate), scale_by_heal_lr()), rate)",
    ),
    "LookaheadState": (
        "the slow parameters",
        "optax.lookahead(optax.chain(optax.sgd(rate), scale_by_heal_lr()), ...)",
    ),
    "SAMState": (
        "cache",
        "optax.contrib.sam(optax.chain(optax.sgd(rate), scale_by_heal_lr()), ...), "
        "or pass opaque_mode=True",
    ),
    "MadgradState": ("s", "another optimizer: MADGRAD has no place for a multiplier"),
}
"""optax's states whose optimizer moves more than the parameters: class -> what else, and how to
write the optimizer so that a cut reaches all of it. A scaled update would slow the parameters down
and not the second iterate. (Mechanic, D-Adaptation, DoG and Prodigy derive theirs from the
parameters; the rate of COCOB scales its update.)"""


class ScaleByHealLrState(NamedTuple):
    """One multiplier, under a name that no other state in a chain has."""

    heal_lr_scale: chex.Array
    """float32 0-d in (0, 1]."""


def scale_by_heal_lr() -> optax.GradientTransformationExtraArgs:
    """Multiplies the updates by a number in the state, 1.0 until it is set.

    `heal` comes before the optimizer in a chain and cannot change its learning rate, and a schedule
    cannot be overridden from outside. Put this last:

        tx = optax.chain(heal("default"), optax.adamw(schedule), scale_by_heal_lr())
        ...
        decision = last_decision(opt_state)
        opt_state = set_lr_scale(opt_state, decision.lr_scale)  # from the next step on

    `protect` applies the multiplier itself, in the same step. It needs this only within an
    optimizer that keeps a second iterate, such as `optax.contrib.schedule_free`:

        base = optax.chain(optax.sgd(rate), scale_by_heal_lr())
        tx = protect(optax.contrib.schedule_free(base, rate))

    ``optax.tree.set(opt_state, heal_lr_scale=...)`` works as well, unchecked.

    Returns:
        A transformation whose state is one float32.
    """

    def init(params: optax.Params) -> ScaleByHealLrState:
        return on_mesh_of(params, ScaleByHealLrState(jnp.ones((), jnp.float32)))

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ScaleByHealLrState]:
        del params, extra_args
        return scaled(updates, state.heal_lr_scale), state

    return optax.GradientTransformationExtraArgs(init, update)


def set_lr_scale(opt_state: State, scale: chex.Numeric) -> State:
    """Sets the multiplier of every `scale_by_heal_lr` in an optimizer state.

    Args:
        opt_state: the state of a chain with `scale_by_heal_lr`.
        scale: a number in (0, 1], or a traced array (not checked).

    Returns:
        The new optimizer state; dtypes kept, so a compiled step is not compiled again.

    Raises:
        ValueError: `scale` is not in (0, 1].
        HealStateError: there is no `scale_by_heal_lr` in the state.
    """
    if not isinstance(scale, Tracer):
        number = float(np.asarray(scale))
        if not 0.0 < number <= 1.0:
            raise ValueError(
                f"scale must be in (0, 1], got {number}: 1.0 is the schedule itself, and healing "
                "never raises a learning rate"
            )
    if not has_lr_scale(opt_state):
        raise HealStateError(
            "no learning-rate multiplier in this optimizer state: build the optimizer as "
            "optax.chain(heal(policy), ..., scale_by_heal_lr())"
        )
    return with_lr_scale(opt_state, jnp.asarray(scale, jnp.float32))


def has_lr_scale(opt_state: Any) -> bool:
    """Whether there is a `scale_by_heal_lr` in an optimizer state."""
    return bool(nodes(ScaleByHealLrState, opt_state))


def with_lr_scale(opt_state: State, scale: chex.Array) -> State:
    """The state with the multiplier in every `scale_by_heal_lr`."""
    new = ScaleByHealLrState(scale.astype(jnp.float32))
    return map_nodes(ScaleByHealLrState, lambda _: new, opt_state)


def check_second_iterates(opt_state: Any, cut: str, *, reaches_base: bool = True) -> None:
    """Raises HealStateError if a scaled update is not what a lower learning rate gives.

    Args:
        opt_state: the state of an optimizer.
        cut: what scales the update, for the message.
        reaches_base: whether a `scale_by_heal_lr` within the optimizer takes the place of `cut`.
    """
    for place, node in jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=_has_second_iterate):
        if not _has_second_iterate(node):
            continue
        if reaches_base and nodes(ScaleByHealLrState, tuple(node)):
            continue
        what, write = _SECOND_ITERATES[type(node).__name__]
        fix = f"write {write}" if reaches_base else "use a policy without [update_clip]"
        raise HealStateError(
            f"{cut} scales the update, and the optimizer at {jax.tree_util.keystr(place) or 'top'} "
            f"({type(node).__name__}) keeps a second iterate ({what}) that would move on at the "
            f"full rate: {fix}" + (", or use a policy without cut_lr" if reaches_base else "")
        )


def _has_second_iterate(node: Any) -> bool:
    kind = type(node)
    known = kind.__module__.startswith("optax.") and kind.__name__ in _SECOND_ITERATES
    # With opaque_mode SAM moves the parameters only, and has no cache.
    return known and getattr(node, "cache", ()) is not None


def injected_rates(tree: Any) -> list[chex.Array]:
    """The learning rates that `optax.inject_hyperparams` holds in a state: floating, 0-d."""
    found = injected_hyperparameters(tree)
    return [leaf for path, leaf in found.items() if path.endswith(".hyperparams['learning_rate']")]


def has_injected_schedule(tree: Any) -> bool:
    """Whether `optax.inject_hyperparams` computes a rate from a schedule, in the update."""
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(tree))
    return any(".hyperparams_states['learning_rate']" in jax.tree_util.keystr(p) for p in paths)


def injected_hyperparameters(tree: Any) -> dict[str, chex.Array]:
    """Path -> each number that `optax.inject_hyperparams` holds in a state: floating, 0-d."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in leaves
        if len(path) > 1
        and getattr(path[-2], "name", None) == "hyperparams"
        and jnp.shape(leaf) == ()
        and jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
    }
