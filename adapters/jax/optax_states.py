"""States of optax: their moments, second iterates and placement on a mesh.

A state is recognized by its type, because it does not name its optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path

from healcore.jax.gradients import is_gradient
from healcore.jax.heal_state import HealState, HealStateError, ScaleByHealLrState
from healcore.jax.trees import PyTree, map_nodes, node_at, nodes

State = TypeVar("State")

_MOMENTS = {
    "TraceState": ("trace",),
    "EmaState": ("count", "ema"),
    "ScaleByAdamState": ("count", "mu", "nu"),
    "ScaleByAmsgradState": ("count", "mu", "nu", "nu_max"),
    "ScaleByBeliefState": ("count", "mu", "nu"),
    "ScaleByLionState": ("count", "mu"),
    "ScaleByAdaDeltaState": ("e_g", "e_x"),
    "ScaleByAdanState": ("m", "v", "n", "g", "t"),
    "FactoredState": ("count", "v_row", "v_col", "v"),
    "MuonState": ("count", "mu"),
}
"""State with moments -> its fields whose initial value is zero for any arguments of the optimizer.
The `count` next to moments drives the bias correction. A schedule has its count in another
state."""

_SECOND_ITERATES = {
    "ScheduleFreeState": "z",
    "LookaheadState": "the slow parameters",
    "SAMState": "cache",
    "MadgradState": "s",
}
"""State with a second iterate -> name of the iterate. Scaling the update would slow down only the
parameters. (Mechanic, D-Adaptation, DoG and Prodigy derive their iterate from the parameters; the
rate of COCOB scales its update.)"""


def is_optax_state(node: PyTree) -> bool:
    """Whether a node is the state of a transformation of optax.

    False for `optax.LookaheadParams`, which holds two copies of the parameters.
    """
    kind = type(node)
    return kind.__module__.startswith("optax.") and kind is not optax.LookaheadParams


def replicate_over_mesh(params: PyTree, state: State) -> State:
    """Replicates the arrays of a fresh state over the mesh of the parameters, if any.

    A compiled step returns its arrays on that mesh. If the first state were not on the mesh, a
    mesh with explicit axes would raise an error, and another would compile the step twice.

    Args:
        params: the parameters, as passed to ``tx.init``.
        state: the state that `init` has made.

    Returns:
        The state on the mesh. The state itself if no parameter is on a mesh or has a value yet.
    """
    meshes = [
        leaf.sharding.mesh
        for leaf in filter(_is_array, jax.tree.leaves(params))
        if isinstance(leaf.sharding, NamedSharding)
    ]
    if not meshes:
        return state
    everywhere = NamedSharding(meshes[0], PartitionSpec())

    def replicated(leaf: Any) -> Any:
        if not _is_array(leaf) or leaf.committed or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        # With several processes, device_put would compare the values, which is a collective.
        value = np.asarray(leaf)
        return jax.make_array_from_callback(value.shape, everywhere, lambda index: value[index])

    return jax.tree.map(replicated, state)


def _is_array(leaf: Any) -> bool:
    """Whether a leaf is a JAX array with values, not a traced one."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)


def check_second_iterates(opt_state: PyTree, feature: str) -> None:
    """Raises HealStateError if scaling the update differs from lowering the learning rate.

    Args:
        opt_state: the state of an optimizer.
        feature: what scales the update, for the message.

    Raises:
        HealStateError: the optimizer keeps a second iterate that would still move at the full rate.
    """

    def has_second_iterate(node: PyTree) -> bool:
        # With opaque_mode SAM has no cache, and only moves the parameters.
        is_listed = is_optax_state(node) and type(node).__name__ in _SECOND_ITERATES
        return is_listed and getattr(node, "cache", ()) is not None

    for place, node in nodes(has_second_iterate, opt_state):
        if nodes(ScaleByHealLrState, tuple(node)):
            continue
        kind = type(node).__name__
        raise HealStateError(
            f"{feature} scales the update, and the optimizer at {keystr(place) or 'top'} ({kind}) "
            f"keeps a second iterate ({_SECOND_ITERATES[kind]}) that would still move at the full "
            "rate: give schedule_free, lookahead and sam the base optimizer "
            "optax.chain(base, scale_by_heal_lr()), or sam opaque_mode=True, or use a policy "
            "without cut_lr"
        )


def reset_moments(tree: State, zeroed: Callable[[Any], Any]) -> State:
    """Applies `zeroed` to each moment and each count of a bias correction, not to schedules.

    Args:
        tree: the state of an optimizer.
        zeroed: makes the new leaf of an old one, such as zeros of its shape.

    Returns:
        The state with the moments of the optax states that are listed in this file replaced.
    """

    def reset(node: PyTree) -> PyTree:
        fields = {}
        for name in _MOMENTS[type(node).__name__]:
            fields[name] = getattr(node, name)
        return node._replace(**jax.tree.map(zeroed, fields))

    return map_nodes(_has_moments, reset, tree)


def _has_moments(node: PyTree) -> bool:
    """Whether a node is a state of optax with moments that are initially zero."""
    return is_optax_state(node) and type(node).__name__ in _MOMENTS


def moments_obstacle(tree: PyTree, engines: Iterable[tuple[Any, ...]]) -> str:
    """Reason why moments cannot be reset, or an empty string.

    Args:
        tree: a run's state.
        engines: path of each HealState in it. Only the optimizers next to them are checked.

    Returns:
        The reason names the first leaf that `reset_moments` would not reset.
    """

    def is_known(node: PyTree) -> bool:
        return _has_moments(node) or isinstance(node, HealState | ScaleByHealLrState)

    for path in engines:
        for place, node in tree_leaves_with_path(node_at(tree, path[:-1]), is_leaf=is_known):
            in_accumulator = "acc_grads" in [getattr(key, "name", "") for key in place]
            if is_known(node) or in_accumulator:
                continue  # `JaxDriver.load` empties the accumulators of optax.MultiSteps
            if jnp.ndim(node) and is_gradient(node):  # 0-d numbers are scales or hyperparameters
                return (
                    f"state{keystr((*path[:-1], *place))} is not in an optax state with known "
                    f"initial values (these are {', '.join(_MOMENTS)})"
                )
    return ""
