"""Moves healing state: as JSON, in an exported step, after a rollback, to and from plain optax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.export
import jax.numpy as jnp
import optax

from healcore.core.verdict import Decision
from healcore.jax.lr import ScaleByHealLrState
from healcore.jax.state import (
    HealState,
    HealStateError,
    engine_state,
    find,
    map_nodes,
    neutral_decision,
    replace,
    with_engine_state,
)
from healcore.jax.state_layout import with_change_expected
from healcore.jax.transform import ProtectState

if TYPE_CHECKING:
    from healcore.core.engine import Engine
    from healcore.policy import PolicyLike

PyTree = Any
"""Any nesting of registered nodes: JAX has no type for it."""
State = TypeVar("State")
"""Any nesting of optax states."""
_HEALING = (HealState, ProtectState, ScaleByHealLrState)

for _type in (*_HEALING, Decision):  # a step that takes or returns them can be serialized
    jax.export.register_namedtuple_serialization(
        _type, serialized_name=f"healcore.{_type.__name__}"
    )


def to_dict(opt_state: optax.OptState, policy: PolicyLike) -> dict[str, Any]:
    """The engine's state in the framework-neutral, JSON-safe form. Reads the device.

    Args:
        opt_state: any nesting of optax states with one healing state in it.
        policy: the policy that the optimizer was built with.

    Returns:
        The state; `healcore.torch` and NumPy can load it and make the same decisions.

    Raises:
        HealStateError: there is no healing state in it, or more than one.
    """
    engine = _engine(policy)
    return engine.to_dict(jax.device_get(engine_state(engine, find(opt_state))))


def from_dict(opt_state: State, data: Mapping[str, Any], policy: PolicyLike) -> State:
    """An optimizer state that goes on from a saved engine state.

    Args:
        opt_state: a state of this run's optimizer, usually fresh from ``tx.init(params)``.
        data: from `to_dict` of any adapter.
        policy: the policy that the optimizer was built with.

    Returns:
        `opt_state` with the engine's state replaced, its dtypes and shapes kept.

    Raises:
        StateError: `data` is damaged, or of another policy or number of tensors.
        HealStateError: there is no healing state in `opt_state`, more than one, or one of another
            policy.
    """
    engine = _engine(policy)
    old = find(opt_state)
    engine_state(engine, old)  # raises unless the policy is that of the optimizer
    state = with_engine_state(engine, old, engine.from_dict(data))
    return replace(opt_state, state._replace(heal_decision=neutral_decision(old)))


def expect_change(opt_state: State) -> State:
    """Opens the grace window at the next step: LR, batch, data or weights are about to change.

    The same as ``change_expected=True`` in that step's update, for a host that does not call it.

    Args:
        opt_state: any nesting of optax states with one healing state in it.

    Raises:
        HealStateError: there is no healing state in it, or more than one.
    """
    state = find(opt_state)
    return replace(opt_state, state._replace(heal_ints=with_change_expected(state.heal_ints)))


def on_rollback(live: State, restored: State, policy: PolicyLike) -> State:
    """The optimizer state to go on with after a checkpoint was restored.

    Args:
        live: the optimizer state at the moment of the rollback.
        restored: the one that the checkpoint holds.
        policy: the policy that the optimizer was built with.

    Returns:
        `restored`, with the budgets and the LR multiplier of `live`: a rollback keeps them.

    Raises:
        HealStateError: one of the two holds no healing state, or more than one.
    """
    engine = _engine(policy)
    now, then = find(live), find(restored)
    state = engine.on_rollback(engine_state(engine, now), engine_state(engine, then), xp=jnp)
    return replace(restored, with_engine_state(engine, then, state))


def _engine(policy: PolicyLike) -> Engine:
    from healcore.policy import engine_of  # here: `import healcore.jax` loads no pydantic

    return engine_of(policy)


def without_heal_state(state: PyTree) -> PyTree:
    """The state without healcore's part, as a checkpoint of a plain optax run holds it.

    A `protect` becomes the optimizer it protects; a member of a chain (`heal`, `heal_zclip`,
    `scale_by_heal_lr`) becomes the empty state of a stateless one, as `clip_by_global_norm` has it.

        old = store.restore(step, {"state": without_heal_state(state)}).state["state"]
        state = with_heal_state(old, like=state)

    Args:
        state: any pytree: a train state, an optimizer state.

    Returns:
        A tree without arrays of healcore. Nothing is copied.
    """
    return map_nodes(
        _HEALING,
        lambda node: (
            without_heal_state(node.inner_state)
            if isinstance(node, ProtectState)
            else optax.EmptyState()
        ),
        state,
    )


def with_heal_state(bare: PyTree, like: State) -> State:
    """The opposite of `without_heal_state`.

    It also takes over a run without healcore, or with another policy: `protect` begins with the
    moments that the optimizer has,

        # old: of adamw, or of chain(clip, adamw)
        opt_state = with_heal_state(old, like=tx.init(params))
        # old: of another policy
        opt_state = with_heal_state(without_heal_state(old), like=tx.init(params))

    Args:
        bare: a tree of the structure of ``without_heal_state(like)``, or a chain with one such
            tree in it and otherwise stateless members.
        like: the state whose healing part is to be taken over, live or fresh from ``tx.init``.

    Returns:
        `bare` with the detectors, budgets and learning-rate multiplier of `like`.

    Raises:
        HealStateError: `bare` has another structure.
    """
    bare = _part_like(without_heal_state(like), bare)
    nodes, structure = jax.tree.flatten(like, is_leaf=lambda node: isinstance(node, _HEALING))
    try:
        parts = structure.flatten_up_to(bare)
    except ValueError as error:
        raise HealStateError(
            f"this state does not have the structure of without_heal_state(like): {error}. Pass a "
            "state of the same model and optimizer"
        ) from None
    return structure.unflatten(
        _whole(part, node) if isinstance(node, _HEALING) else part
        for part, node in zip(parts, nodes, strict=True)
    )


def _part_like(wanted: Any, tree: Any) -> Any:
    """The part of a chain with the wanted structure, if the chain has no other leaves."""
    structure = jax.tree.structure(wanted)
    if jax.tree.structure(tree) == structure:
        return tree

    def fits(node: Any) -> bool:
        return jax.tree.structure(node) == structure

    nodes = jax.tree.leaves(tree, is_leaf=fits)
    return nodes[0] if len(nodes) == 1 and fits(nodes[0]) else tree


def _whole(bare: Any, node: Any) -> Any:
    if not isinstance(node, ProtectState):
        return node
    return node._replace(inner_state=with_heal_state(bare, node.inner_state))
