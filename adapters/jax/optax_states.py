"""States of optax: moments, second iterates, placement on a mesh, and the numbers in them.

A state is recognized by its type, because it does not name its optimizer.

**The numbers** of a program are in the states of `optax.inject_hyperparams`, on the device. Reading
them at every step would wait for the device, so the compiled step of `protect` extends their ranges
itself, in a small array of its healing state (`HealState.heal_numbers`), which has one column for
each number:

    row           b2      weight_decay
    ------------  ------  ------------
    0  low        -inf    0.01          a number is held between low and high;
    1  high       inf     0.01          outside of this range the step uses value
    2  value      0       0.01
    3  seen low   0.99    0.01          the program's own values since the last edit
    4  seen high  0.99    0.5
    5  last       0.99    0.5           so this step uses 0.01 instead of 0.5

The Healer reads the ranges while the run is healthy, and holds numbers after a rollback
(`JaxDriver.numbers` and `hold_numbers`).
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from healcore.core.array_namespace import shortest_decimal
from healcore.jax.heal_state import HealStateError, ScaleByHealLrState
from healcore.jax.trees import Leaf, PyTree, map_nodes, node_at, nodes

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


# -- numbers of optax.inject_hyperparams -----------------------------------------------------------

Path = tuple[Any, ...]
Range = tuple[float, float, float]
"""Lowest, highest and newest value of a number, as in `healcore.runtime.driver.NumberRange`."""


def injected_leaves(tree: PyTree) -> dict[Path, Leaf]:
    """Finds each 0-d hyperparameter in the states of `optax.inject_hyperparams`.

    Args:
        tree: an optimizer state, or any tree that contains some.

    Returns:
        Path -> hyperparameter, of any dtype.
    """
    found = {}
    for path, leaf in tree_leaves_with_path(tree):
        is_injected = len(path) > 1 and getattr(path[-2], "name", None) == "hyperparams"
        if is_injected and jnp.shape(leaf) == ():
            found[path] = leaf
    return found


def injected_rates(tree: PyTree) -> list[jax.Array]:
    """Finds the learning rates in the states of `optax.inject_hyperparams`.

    Args:
        tree: an optimizer state, or any tree that contains some.

    Returns:
        The rates, floating and 0-d. More than one if the tree has several such states.
    """
    rates = []
    for path, leaf in injected_leaves(tree).items():
        is_rate = getattr(path[-1], "key", None) == "learning_rate"
        if is_rate and jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            rates.append(leaf)
    return rates


def number_leaves(tree: PyTree) -> dict[Path, Leaf]:
    """Finds each number that healcore can hold.

    These are all injected numbers except learning rates, which have limits of their own, and
    scheduled numbers.

    `optax.inject_hyperparams` computes a scheduled number from the schedule's own state within its
    update, and ignores the number in the state: a replacement would have no effect.

    Args:
        tree: the inner state of `protect`.

    Returns:
        Path -> number, in the order of the columns of `HealState.heal_numbers`.
    """
    numbers = {}
    for path, leaf in injected_leaves(tree).items():
        name = str(getattr(path[-1], "key", ""))
        if name.endswith("learning_rate") or jnp.result_type(leaf) == jnp.bool_:
            continue
        scheduled = getattr(node_at(tree, path[:-2]), "hyperparams_states", {})
        if name not in scheduled:
            numbers[path] = leaf
    return numbers


def init_numbers(inner_state: PyTree) -> jax.Array | None:
    """Makes the first `HealState.heal_numbers`, in which no number is held.

    Args:
        inner_state: the inner state of `protect`.

    Returns:
        float32 (6, n), or None if the optimizer has no number that can be held.
    """
    count = len(number_leaves(inner_state))
    if not count:
        return None
    return jnp.asarray(make_numbers([None] * count))


def make_numbers(ranges: Sequence[Range | None]) -> np.ndarray:
    """Makes a `HealState.heal_numbers`, float32 (6, n), whose numbers have not been seen yet.

    Args:
        ranges: the range in which each number is held, and its value outside of it; None for a
            number that is not held.

    Returns:
        The array, with one column for each number.
    """
    not_held = (-math.inf, math.inf, 0.0)  # no NaN: processes compare what they put on a device
    unseen = (math.inf, -math.inf, 0.0)
    columns = []
    for each in ranges:
        limits = each
        if limits is None:
            limits = not_held
        columns.append((*limits, *unseen))
    return np.array(columns, np.float32).T


def read_ranges(numbers: np.ndarray) -> list[Range | None]:
    """Reads the range of each number since `make_numbers` or `init_numbers`.

    Args:
        numbers: `HealState.heal_numbers` in host memory, float32 (6, n).

    Returns:
        Lowest, highest and newest value of each number, or None if there was no step since.
    """
    ranges: list[Range | None] = []
    for column in numbers[3:].T:
        # 0.999 instead of 0.9990000128746033.
        low, high, last = map(shortest_decimal, column)
        if low <= high:
            ranges.append((low, high, last))
        else:
            ranges.append(None)
    return ranges


def follow_numbers(numbers: jax.Array, inner_state: PyTree) -> tuple[jax.Array, PyTree]:
    """Extends the ranges by the program's numbers at one step, and replaces the held numbers.

    Args:
        numbers: `HealState.heal_numbers`, float32 (6, n), before the step.
        inner_state: the optimizer's state, with the program's numbers.

    Returns:
        The new `HealState.heal_numbers`, and the state with which the optimizer takes its step. Its
        numbers have their dtypes and weak types, because others would compile the step again.
    """
    low, high, value, seen_low, seen_high, _ = numbers
    own = jnp.stack([jnp.float32(leaf) for leaf in number_leaves(inner_state).values()])
    is_held = (low > -jnp.inf) | (high < jnp.inf)
    replaced = is_held & ~((own >= low) & (own <= high))
    # A NaN is outside of every range, as if it were below and above all numbers.
    seen_low = jnp.minimum(seen_low, jnp.where(jnp.isnan(own), -jnp.inf, own))
    seen_high = jnp.maximum(seen_high, jnp.where(jnp.isnan(own), jnp.inf, own))

    def given(i: int, leaf: Leaf) -> Leaf:
        return jnp.where(replaced[i], jnp.full_like(leaf, value[i]), leaf)

    new = jnp.stack([low, high, value, seen_low, seen_high, own])
    return new, _map_numbers(given, inner_state)


def with_program_numbers(new: PyTree, given: PyTree, own: PyTree) -> PyTree:
    """Puts the program's own numbers back after a step, unless the step has changed them.

    Without it, healcore would never see when the program's own value is back in the range, and a
    checkpoint would hold the replacements.

    Args:
        new: the inner state that the step has returned.
        given: the inner state that the step has received, with replaced numbers.
        own: the inner state with the program's numbers.

    Returns:
        The inner state to keep.
    """
    received = list(number_leaves(given).values())
    before = list(number_leaves(own).values())

    def restored(i: int, leaf: Leaf) -> Leaf:
        return jnp.where(leaf == received[i], jnp.full_like(leaf, before[i]), leaf)

    return _map_numbers(restored, new)


def _map_numbers(change: Callable[[int, Leaf], Leaf], tree: PyTree) -> PyTree:
    """Replaces each number of `number_leaves`; `change` receives its index and leaf."""
    index = {path: i for i, path in enumerate(number_leaves(tree))}

    def changed(path: Path, leaf: Leaf) -> Leaf:
        if path not in index:
            return leaf
        return change(index[path], leaf)

    return tree_map_with_path(changed, tree)


# -- the constants with which a program makes an optimizer ----------------------------------------

# `optax.adamw(1e-3)` keeps its numbers in Python functions, so an optimizer state does not hold
# them, and a checkpoint does not restore them. A restart compares them with the constants at the
# run's first start, to say that the program has changed. `protect` knows the optimizer and the
# Healer knows the state. So the optimizers are kept by the form of their states.

_LITERAL = re.compile(r"(-?[\d.]+(?:e[-+]?\d+)?):b?f\d+\[\]")
"""A floating constant in the text of a jaxpr, such as ``0.9:f32[]``."""
_newest_optimizers: dict[Any, tuple[Callable[..., Any], PyTree, PyTree]] = {}
"""Form of a state -> the `update` of the newest optimizer with such a state, and the shapes and
dtypes of its parameters and its state."""


def remember_optimizer(update: Callable[..., Any], params: PyTree, state: PyTree) -> None:
    """Remembers an optimizer for `constants_of`. Called by `init` of `protect`.

    Args:
        update: the `update` of the optimizer.
        params: its parameters, traced or not.
        state: its initial state.
    """
    _newest_optimizers[_form(state)] = update, *jax.eval_shape(lambda *each: each, params, state)


def constants_of(state: PyTree) -> list[float]:
    """Finds the constants of the optimizer with a state of this form. Traces one of its updates.

    Args:
        state: the inner state of `protect`.

    Returns:
        The floating constants of the update without repeats, ascending. Empty if this process has
        not made the optimizer, or if its update needs more than gradients, state and parameters.
    """
    if _form(state) not in _newest_optimizers:
        return []
    update, params, shapes = _newest_optimizers[_form(state)]
    try:
        with warnings.catch_warnings():  # of keywords that only the program's own call passes
            warnings.simplefilter("ignore")
            traced = jax.make_jaxpr(update)(params, shapes, params)
    except Exception:  # it needs a mesh axis or other arguments, or concrete values
        return []
    found = _LITERAL.findall(str(traced))
    for array in traced.consts:
        if jnp.shape(array) == () and jnp.issubdtype(jnp.result_type(array), jnp.floating):
            found.append(array)
    return sorted({shortest_decimal(np.float32(each)) for each in found})


def _form(state: PyTree) -> Any:
    """Shape and dtype of each leaf, which are the same in each form that a program passes."""
    leaves = jax.tree.leaves(state)
    return tuple((jnp.shape(leaf), str(jnp.result_type(leaf))) for leaf in leaves)
