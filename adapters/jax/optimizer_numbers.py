"""The numbers in states of `optax.inject_hyperparams`: their ranges, and which numbers are held.

The program's numbers are in the optimizer state, on the device. Reading them at every step would
wait for the device, so the compiled step of `protect` extends their ranges itself, in a small array
of its healing state (`HealState.heal_numbers`), which has one column for each number:

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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from healcore.core.array_namespace import shortest_decimal
from healcore.jax.trees import Leaf, PyTree, node_at

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


def injected_hyperparameters(tree: PyTree) -> dict[str, jax.Array]:
    """Finds the hyperparameters in the states of `optax.inject_hyperparams`.

    Args:
        tree: an optimizer state, or any tree that contains some.

    Returns:
        Path -> hyperparameter, floating and 0-d, such as a learning rate or a weight decay.
    """
    found = {}
    for path, leaf in injected_leaves(tree).items():
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
    found = injected_hyperparameters(tree).items()
    return [leaf for path, leaf in found if path.endswith(".hyperparams['learning_rate']")]


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


def init(inner_state: PyTree) -> jax.Array | None:
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
    """Reads the range of each number since `make_numbers` or `init`.

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


def step(numbers: jax.Array, inner_state: PyTree) -> tuple[jax.Array, PyTree]:
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


def remember(update: Callable[..., Any], params: PyTree, state: PyTree) -> None:
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
