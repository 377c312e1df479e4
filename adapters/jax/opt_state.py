"""Functions of an optimizer state with a healing state in it: reading, saving, replacing.

All of them accept any nesting of optax states with one `heal`, `heal_zclip` or `protect` in it. An
argument `policy` is the policy that the optimizer was built with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import chex
import jax
import jax.export
import jax.numpy as jnp
import optax

from healcore.core.engine.state import metrics as engine_metrics
from healcore.core.engine.state import update_metrics
from healcore.core.verdict import Decision
from healcore.jax import state_layout
from healcore.jax.gradients import is_gradient
from healcore.jax.heal_state import (
    HealState,
    HealStateError,
    engine_state,
    find,
    map_nodes,
    replace,
    with_engine_state,
    with_neutral_decision,
)
from healcore.jax.optax_states import ScaleByHealLrState
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


def _engine(policy: PolicyLike) -> Engine:
    from healcore.policy import engine_of  # here: `import healcore.jax` loads no pydantic

    return engine_of(policy)


# -- the last step ------------------------------------------------------------------------------


def last_decision(opt_state: optax.OptState) -> Decision:
    """The decision of the last step.

    Return it from the compiled step as an output of its own: a donated state cannot be read
    afterwards.

        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, last_decision(opt_state)

    Args:
        opt_state: any nesting of optax states with one `heal`, `heal_zclip` or `protect` in it.

    Returns:
        The Decision, 0-d arrays, not copied. Neutral before the first step.

    Raises:
        HealStateError: there is no healing state in it, or more than one.
    """
    found = find(opt_state).heal_decision
    return Decision(*(found.get(f"heal_{field}") for field in Decision._fields))


def metrics(opt_state: optax.OptState, policy: PolicyLike | None = None) -> dict[str, chex.Array]:
    """Named scalars for a logger: 0-d arrays under `heal/...`, without a sync or a copy.

    Args:
        opt_state: as in `last_decision`.
        policy: the policy that the optimizer was built with; needed for the numbers of
            `[update_clip]`, whose place in the state depends on it.

    Returns:
        See `healcore.core.engine.state.metrics`; `heal/loss` is NaN until there was a finite one,
        so also where `value=` is never passed.

    Raises:
        HealStateError: as in `last_decision`, or the state is of another policy.
    """
    state = find(opt_state)
    found = _metrics(state.heal_floats, state.heal_ints)
    if policy is None:
        return found
    return {**found, **update_metrics(engine_state(_engine(policy), state))}


@jax.jit
def _metrics(floats: chex.Array, ints: chex.Array) -> dict[str, chex.Array]:
    """Compiled, so that it is one dispatch outside of a compiled step."""
    head: Any = state_layout.head(floats, ints)
    found = engine_metrics(head)
    # The state itself stays finite: a checkpoint with a NaN in it would count as bad.
    loss = jnp.where(state_layout.header(ints).loss_seen != 0, found["heal/loss"], jnp.nan)
    return {**found, "heal/loss": loss}


def gradient_norms(opt_state: optax.OptState, params: optax.Params) -> dict[str, chex.Array]:
    """The norm of each parameter's gradient at the last step, before clipping, for a logger.

    The decision needs them anyway, so this adds nothing to the cost of a step.

        logger.log({f"grad_norm/{name}": float(norm) for name, norm in norms.items()})

    Args:
        opt_state: as in `last_decision`.
        params: the parameters, or any tree of their structure; only their names are used.

    Returns:
        ``"params/Dense_0/kernel"`` -> L2 norm, float32 0-d. Zeros before the first step, and
        while the caller passes `grad_norm`.

    Raises:
        HealStateError: as in `last_decision`, or `params` has another number of floating tensors
            than there were gradients.
    """
    norms = jnp.unstack(find(opt_state).heal_leaf_norms)
    paths = [
        path for path, leaf in jax.tree_util.tree_leaves_with_path(params) if is_gradient(leaf)
    ]
    if len(paths) != len(norms):
        raise HealStateError(
            f"there were {len(norms)} gradients, and params has {len(paths)} floating "
            "tensors: pass the tree that the optimizer was initialised with"
        )
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]
    return dict(zip(names, norms, strict=True))


# -- the engine's state -------------------------------------------------------------------------


def to_dict(opt_state: optax.OptState, policy: PolicyLike) -> dict[str, Any]:
    """The engine's state in the framework-neutral, JSON-safe form. Reads the device.

    `healcore.torch` and NumPy can load it and make the same decisions.

    Raises:
        HealStateError: as in `last_decision`, or the state is of another policy.
    """
    engine = _engine(policy)
    return engine.to_dict(jax.device_get(engine_state(engine, find(opt_state))))


def from_dict(opt_state: State, data: Mapping[str, Any], policy: PolicyLike) -> State:
    """An optimizer state that continues from a saved engine state.

    Args:
        opt_state: a state of this run's optimizer, usually fresh from ``tx.init(params)``.
        data: from `to_dict` of any adapter.
        policy: the policy that the optimizer was built with.

    Returns:
        `opt_state` with the engine's state replaced, its dtypes and shapes kept.

    Raises:
        StateError: `data` is damaged, or of another policy or number of tensors.
        HealStateError: as in `to_dict`.
    """
    engine = _engine(policy)
    old = find(opt_state)
    engine_state(engine, old)  # raises unless the policy is the optimizer's
    new = with_engine_state(engine, old, engine.from_dict(data))
    return replace(opt_state, with_neutral_decision(new))


def expect_change(opt_state: State) -> State:
    """Opens the grace window at the next step: LR, batch, data or weights are about to change.

    The same as ``change_expected=True`` in that step's update, for a host that does not call it.
    Raises HealStateError as in `last_decision`.
    """
    state = find(opt_state)
    ints = state_layout.with_change_expected(state.heal_ints)
    return replace(opt_state, state._replace(heal_ints=ints))


def on_rollback(live: State, restored: State, policy: PolicyLike) -> State:
    """The optimizer state to continue with after a checkpoint was restored.

    Args:
        live: the optimizer state at the moment of the rollback.
        restored: the optimizer state in the checkpoint.
        policy: the policy that the optimizer was built with.

    Returns:
        `restored`, with the budgets and the LR multiplier of `live`: a rollback keeps them.

    Raises:
        HealStateError: as in `to_dict`, for one of the two.
    """
    engine = _engine(policy)
    now, then = find(live), find(restored)
    state = engine.on_rollback(engine_state(engine, now), engine_state(engine, then), xp=jnp)
    return replace(restored, with_engine_state(engine, then, state))


# -- to and from plain optax --------------------------------------------------------------------


def without_heal_state(state: PyTree) -> PyTree:
    """The state without healcore's part, as a checkpoint of a plain optax run holds it.

    A `protect` becomes the optimizer it protects; a member of a chain (`heal`, `heal_zclip`,
    `scale_by_heal_lr`) becomes the empty state of a stateless one, as `clip_by_global_norm` has it.

        old = store.restore(step, {"state": without_heal_state(state)}).state["state"]
        state = with_heal_state(old, like=state)

    `state` is any pytree, such as a train state. Nothing is copied.
    """
    return map_nodes(_HEALING, _bare, state)


def _bare(node: Any) -> Any:
    is_wrapper = isinstance(node, ProtectState)
    return without_heal_state(node.inner_state) if is_wrapper else optax.EmptyState()


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
        like: the state whose healing part is used, live or fresh from ``tx.init``.

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
    return structure.unflatten(map(_healed, parts, nodes))


def _part_like(wanted: Any, tree: Any) -> Any:
    """The part of a chain with the wanted structure, if the chain has no other leaves."""
    structure = jax.tree.structure(wanted)

    def fits(node: Any) -> bool:
        return jax.tree.structure(node) == structure

    nodes = jax.tree.leaves(tree, is_leaf=fits)
    return nodes[0] if len(nodes) == 1 and fits(nodes[0]) else tree


def _healed(bare: Any, node: Any) -> Any:
    """The leaf or subtree `bare` with the healing part of `node`, which is at its place."""
    if isinstance(node, ProtectState):
        return node._replace(inner_state=with_heal_state(bare, node.inner_state))
    return node if isinstance(node, _HEALING) else bare
