"""Reads, saves and replaces the healing state in an optimizer state.

All functions accept any nesting of optax states that contains one `heal`, `heal_zclip` or
`protect`, such as the ``opt_state`` of an `nnx.Optimizer`. `without_heal_state` and
`with_heal_state` need optax's own states in it. The other functions accept dictionaries in their
place, as in ``nnx.state(optimizer)``. An argument `policy` is the policy of the transformation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.export
import jax.numpy as jnp
import optax

from healcore.core.decision import Decision
from healcore.jax import heal_state
from healcore.jax.gradients import is_gradient
from healcore.jax.heal_state import (
    HealState,
    HealStateError,
    ProtectState,
    ScaleByHealLrState,
    engine_state,
    with_engine_state,
)
from healcore.jax.trees import Path, PyTree, differences, forms, map_nodes, nodes
from healcore.policy import PolicyLike, engine_of

State = TypeVar("State")
"""Any nesting of optax states."""
_HEALING = (HealState, ProtectState, ScaleByHealLrState)
"""The states of healcore. A state of `protect` contains the other two kinds."""

for _type in (*_HEALING, Decision):  # for `jax.export` of a step that takes or returns them
    jax.export.register_namedtuple_serialization(
        _type, serialized_name=f"healcore.{_type.__name__}"
    )


# -- the last step ------------------------------------------------------------------------------


def last_decision(opt_state: optax.OptState) -> Decision:
    """The decision of the last step.

        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, last_decision(opt_state)

    Return it from the compiled step as a separate output, because a donated state cannot be read
    afterwards.

    Args:
        opt_state: any nesting of optax states that contains one `heal`, `heal_zclip` or `protect`,
            such as the ``opt_state`` of a TrainState or of an `nnx.Optimizer`.

    Returns:
        The Decision, in 0-d arrays. Neutral before the first step.

    Raises:
        HealStateError: the state contains no healing state, or more than one.
    """
    return heal_state.last_decision(find(opt_state))


def metrics(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """Scalars for a logger: 0-d arrays named `heal/...`, without a sync or a copy.

        for name, value in healcore.jax.metrics(opt_state).items():
            print(name, float(value))  # `float` waits for the device

    Args:
        opt_state: as in `last_decision`.

    Returns:
        See `healcore.core.engine.state.metrics`. `heal/loss` is NaN until the first finite
        loss, and always if `value=` is not passed.

    Raises:
        HealStateError: as in `last_decision`.
    """
    return heal_state.metrics(find(opt_state).heal_records)


def gradient_norms(opt_state: optax.OptState, params: optax.Params) -> dict[str, jax.Array]:
    """The norm of each parameter's gradient at the last step, before clipping.

        norms = gradient_norms(opt_state, params)
        logger.log({f"grad_norm/{name}": float(norm) for name, norm in norms.items()})

    The step computes these norms for its decision, so they add no cost.

    Args:
        opt_state: as in `last_decision`.
        params: the parameters, or any tree of their structure. Only their names are used.

    Returns:
        ``"params/Dense_0/kernel"`` -> L2 norm, float32 0-d. Zeros before the first step, and
        while the caller passes `grad_norm`. 0 for a parameter that the optimizer freezes.

    Raises:
        HealStateError: as in `last_decision`, or the number of floating tensors in `params` differs
            from the number of gradients.
    """
    norms = jnp.unstack(find(opt_state).heal_leaf_norms)
    names = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if is_gradient(leaf):
            names.append(jax.tree_util.keystr(path, simple=True, separator="/"))
    if len(names) != len(norms):
        raise HealStateError(
            f"the last step had {len(norms)} gradients, and params has {len(names)} floating "
            "tensors: pass the tree that was passed to tx.init"
        )
    return dict(zip(names, norms, strict=True))


# -- the engine's state -------------------------------------------------------------------------


def to_dict(opt_state: optax.OptState, policy: PolicyLike) -> dict[str, Any]:
    """The engine's state in a framework-neutral form that JSON can hold.

        saved = json.dumps(to_dict(opt_state, "default"))
        opt_state = from_dict(tx.init(params), json.loads(saved), "default")

    `healcore.torch` and NumPy can load this form, and then make the same decisions. A `Healer`
    saves it in each checkpoint; call this function only if you write your own checkpoints without
    the optimizer state.

    Args:
        opt_state: as in `last_decision`. Waits for the device once.
        policy: the policy of the optimizer, which the state does not contain.

    Returns:
        Numbers, texts and lists only, with the fingerprint of the policy.

    Raises:
        HealStateError: as in `last_decision`, or the state belongs to another policy.
    """
    engine = engine_of(policy)
    return engine.to_dict(engine_state(engine, find(opt_state)))


def from_dict(opt_state: State, data: Mapping[str, Any], policy: PolicyLike) -> State:
    """An optimizer state that continues from a saved engine state.

        opt_state = from_dict(tx.init(params), healing.state_dict(), policy)  # of torch's `attach`

    Args:
        opt_state: a state of this run's optimizer, usually fresh from ``tx.init(params)``.
        data: result of `to_dict` of any adapter.
        policy: the optimizer's policy.

    Returns:
        `opt_state` with the engine's state replaced; dtypes and shapes are unchanged.

    Raises:
        StateError: `data` is damaged, or belongs to another policy or number of tensors.
        HealStateError: as in `to_dict`.
    """
    engine = engine_of(policy)
    old = find(opt_state)
    engine_state(engine, old)  # raises for another policy
    new = with_engine_state(engine, old, engine.from_dict(data))
    return replace(opt_state, new)


def expect_change(opt_state: State) -> State:
    """Opens the grace window at the next step, where LR, batch, data or weights will change.

        params, opt_state = state
        opt_state = healcore.jax.expect_change(opt_state)  # the next step uses other data

    Without it, a new stage of the data looks like a spike of the loss. Equivalent to
    ``change_expected=True`` in the next call of `update`. With a `Healer`, call
    `Healer.expect_change` instead.

    Args:
        opt_state: as in `last_decision`, outside of a compiled step.

    Returns:
        A new state, from which the next step has to start.

    Raises:
        HealStateError: as in `last_decision`.
    """
    new = heal_state.with_change_expected(find(opt_state))
    return replace(opt_state, new)


# -- conversion to and from plain optax ---------------------------------------------------------


def without_heal_state(state: PyTree) -> PyTree:
    """Removes the healing states, as in a checkpoint of a plain optax run. Copies nothing.

        old = store.restore(step, {"state": without_heal_state(state)}).state["state"]
        state = with_heal_state(old, like=state)

    Use it to load a checkpoint of a run without healcore, or to write one for such a run.

    Args:
        state: any pytree, such as a train state or an optimizer state.

    Returns:
        The tree in which the state of `protect` is the state of its inner optimizer, and the state
        of a member of a chain (`heal`, `heal_zclip`, `scale_by_heal_lr`) is `optax.EmptyState`.

    Raises:
        HealStateError: the tree has dictionaries in the place of optax's states.
    """

    def bare(node: PyTree) -> PyTree:
        if isinstance(node, ProtectState):
            return without_heal_state(node.inner_state)
        if isinstance(node, Mapping):
            raise HealStateError(
                "this state has a dictionary in the place of a HealState, as nnx.state(optimizer) "
                "has: pass optimizer.opt_state"
            )
        return optax.EmptyState()

    return map_nodes(lambda node: isinstance(node, _HEALING) or is_healing(node), bare, state)


def with_heal_state(bare: PyTree, like: State) -> State:
    """Inserts the healing states of `like`; the inverse of `without_heal_state`.

    This continues a run without healcore, or with another policy, from its moments:

        # old is a state of adamw, or of chain(clip, adamw)
        opt_state = with_heal_state(old, like=tx.init(params))
        # old is a state of another policy
        opt_state = with_heal_state(without_heal_state(old), like=tx.init(params))

    Args:
        bare: a tree with the structure of ``without_heal_state(like)``, or a chain with one such
            tree and otherwise stateless members.
        like: the state whose healing states are inserted, live or fresh from ``tx.init``.

    Returns:
        `bare` with the detectors, budgets and learning-rate multiplier of `like`.

    Raises:
        HealStateError: `bare` has another structure.
    """
    wanted = without_heal_state(like)
    structure = jax.tree.structure(wanted)

    def fits(node: PyTree) -> bool:
        return jax.tree.structure(node) == structure

    members = jax.tree.leaves(bare, is_leaf=fits)
    if not fits(bare) and (len(members) != 1 or not fits(members[0])):
        listed = (
            differences(forms(bare), forms(wanted)) or "other containers, as a list for a tuple"
        )
        raise HealStateError(
            "with_heal_state takes a state with the structure of without_heal_state(like), got "
            f"{listed}. Pass a state of the same model and optimizer. A checkpoint restored "
            "without a target has dicts instead of optax's states: restore it with "
            "target=without_heal_state(like)"
        )
    # Both trees have their other leaves in the same order.
    leaves = iter(jax.tree.leaves(bare))

    def filled(node: PyTree) -> PyTree:
        """A healing state of `like`, or the next leaf of `bare`."""
        if isinstance(node, ProtectState):
            return node._replace(inner_state=fill(node.inner_state))
        if isinstance(node, _HEALING):
            return node
        return next(leaves)

    def fill(tree: PyTree) -> PyTree:
        return jax.tree.map(filled, tree, is_leaf=lambda node: isinstance(node, _HEALING))

    return fill(like)


# -- the healing state in an optimizer state ------------------------------------------------------


def find(opt_state: PyTree) -> HealState:
    """Finds the HealState in an optimizer state, and takes its arrays out of nnx Variables.

    Args:
        opt_state: any nesting of optax states, with arrays or nnx Variables, or of mappings in
            their place.

    Raises:
        HealStateError: `opt_state` has no HealState, or several.
    """
    found = nodes(is_healing, opt_state)
    if len(found) == 1:
        arrays = _arrays_of(found[0][1])
        if arrays.keys() - set(HealState._fields) or arrays.get("heal_records") is None:
            raise HealStateError(
                "this healing state is of another release: to continue from the moments of the "
                "optimizer, with_heal_state(without_heal_state(old), like=tx.init(params))"
            )
        return HealState(**arrays)
    if found:
        places = [f"opt_state{jax.tree_util.keystr(path)}" for path, _ in found]
        raise HealStateError(
            f"this optimizer state contains {len(found)} healing states, at {', '.join(places)}: "
            "pass a part with only one of them"
        )
    raise HealStateError(
        f"no healing state in this {type(opt_state).__name__}: pass the opt_state of a "
        "transformation that contains heal(), heal_zclip() or protect() (a TrainState and an "
        "nnx.Optimizer have it at .opt_state)"
    )


def replace(opt_state: State, new: HealState) -> State:
    """Replaces the values of the HealState in an optimizer state.

    Args:
        opt_state: as for `find`.
        new: a HealState with the shapes of the old one.

    Returns:
        The state in the same form. Variables and mappings are new objects.
    """

    def value(path: Path, _: PyTree) -> PyTree:
        return getattr(new, getattr(path[0], "name", None) or path[0].key)

    def replaced(old: PyTree) -> PyTree:
        return jax.tree_util.tree_map_with_path(value, old)

    return map_nodes(is_healing, replaced, opt_state)


def is_healing(node: PyTree) -> bool:
    """Whether a node is a HealState, or a mapping that flax or Orbax has made of one."""
    return isinstance(node, HealState) or (isinstance(node, Mapping) and "heal_engine" in node)


def _arrays_of(node: PyTree) -> dict[str, Any]:
    """The array of each field of a HealState, without the Variable around it."""
    if isinstance(node, Mapping):
        fields = node
    else:
        fields = node._asdict()
    return {name: next(iter(jax.tree.leaves(field)), None) for name, field in fields.items()}
