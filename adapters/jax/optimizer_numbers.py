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
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from healcore.core.numerics import shortest_decimal
from healcore.jax.trees import Leaf, PyTree, node_at

Path = tuple[Any, ...]
Range = tuple[float, float, float]
"""Lowest, highest and newest value of a number, as in `healcore.runtime.driver.NumberRange`."""

_LOW, _HIGH, _VALUE, _SEEN_LOW, _SEEN_HIGH, _LAST = range(6)
"""Rows of `HealState.heal_numbers`. A number outside of `_LOW` to `_HIGH` is replaced by `_VALUE`.

These limits are infinite for a number that is not held. The other rows are the program's values
since `make_numbers`.
"""


class HeldNumbers(NamedTuple):
    """The numbers that one step replaces, because they are outside of their held range.

    Made and used within one step. The state keeps the program's own numbers, so that healcore can
    see when the program's own value is back in the range.
    """

    replaced: Sequence[jax.Array]
    """Whether the step replaces each number, bool 0-d."""
    values: Sequence[jax.Array]
    """The value in place of each number if it is replaced, float32 0-d."""


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
    rates = []
    for path, leaf in injected_hyperparameters(tree).items():
        if path.endswith(".hyperparams['learning_rate']"):
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
        kind = jnp.result_type(leaf)
        is_number = jnp.issubdtype(kind, jnp.floating) or jnp.issubdtype(kind, jnp.integer)
        if name.endswith("learning_rate") or not is_number:
            continue
        scheduled = getattr(node_at(tree, path[:-2]), "hyperparams_states", {})
        if name not in scheduled:
            numbers[path] = leaf
    return numbers


def warn_if_rounded(make_state: Callable[[Any], Any], params: PyTree, inner_state: PyTree) -> None:
    """Warns of numbers that `optax.inject_hyperparams` has rounded to a small dtype.

    It casts every number to the dtype of the first parameter. In bfloat16 a `b2` of 0.999 is 1, so
    Adam divides 0 by 0; in float16 an `eps` of 1e-8 is 0. Rounding by less than the last digit of
    the dtype is normal, so only numbers that became 0 or 1 are named.

    Args:
        make_state: `init` of the optimizer.
        params: its parameters.
        inner_state: result of `make_state(params)`.
    """
    small = {}
    for path, leaf in injected_leaves(inner_state).items():
        if jnp.result_type(leaf) in (jnp.bfloat16, jnp.float16):
            small[path] = leaf
    if not small:
        return

    def tiny(leaf: Leaf) -> np.ndarray:
        kind = jnp.result_type(leaf)
        if jnp.issubdtype(kind, jnp.floating):
            kind = np.float32
        return np.zeros((1,) * jnp.ndim(leaf), kind)

    try:  # the same numbers in float32; outside of a trace, so that they have values
        with jax.ensure_compile_time_eval():
            found = injected_leaves(make_state(jax.tree.map(tiny, params)))
            exact = {path: float(leaf) for path, leaf in found.items()}
    except Exception:  # an optimizer that needs the real shapes
        return
    rounded = []
    for path, leaf in small.items():
        value = exact.get(path, 0.0)
        in_state = float(np.dtype(jnp.result_type(leaf)).type(value))
        if value not in (0, 1) and in_state in (0, 1):
            rounded.append(f"{path[-1].key}={value:.4g} is {in_state}")
    if rounded:
        dtype = jnp.result_type(next(iter(small.values())))
        warnings.warn(
            f"optax.inject_hyperparams rounds the optimizer's numbers to {dtype}, the dtype of the "
            f"first parameter: {', '.join(rounded)}, and the optimizer can make NaN of finite "
            "gradients. Write optax.inject_hyperparams(..., hyperparam_dtype=jnp.float32), or "
            "leave it out and pass learning_rate=rate to tx.update",
            stacklevel=3,  # names the caller of `tx.init`
        )


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
    for column in numbers[_SEEN_LOW:].T:
        # 0.999 instead of 0.9990000128746033.
        low, high, last = map(shortest_decimal, column)
        if low <= high:
            ranges.append((low, high, last))
        else:
            ranges.append(None)
    return ranges


def step(numbers: jax.Array, inner_state: PyTree) -> tuple[jax.Array, HeldNumbers]:
    """Extends the ranges by the program's numbers at one step, and finds the numbers to replace.

    Written with selections instead of concatenations, so that XLA makes one kernel of it.

    Args:
        numbers: `HealState.heal_numbers`, float32 (6, n), before the step.
        inner_state: the optimizer's state, with the program's numbers.

    Returns:
        The new `HealState.heal_numbers`, and the numbers that are outside of their held range.
    """
    leaves = []
    for leaf in number_leaves(inner_state).values():
        leaves.append(jnp.asarray(leaf).astype(jnp.float32))
    column = lax.broadcasted_iota(np.int32, numbers.shape, 1)
    row = lax.broadcasted_iota(np.int32, numbers.shape, 0)
    values = numbers
    for i, leaf in enumerate(leaves):
        values = jnp.where(column == i, leaf, values)
    own = values[_LAST]
    inside = (own >= numbers[_LOW]) & (own <= numbers[_HIGH])
    is_held = (numbers[_LOW] > -jnp.inf) | (numbers[_HIGH] < jnp.inf)
    replaced = ~inside & is_held
    # A NaN is outside of every range, as if it were below and above all numbers.
    low = jnp.where(jnp.isnan(values), -jnp.inf, values)
    high = jnp.where(jnp.isnan(values), jnp.inf, values)
    new = jnp.where(row == _SEEN_LOW, jnp.minimum(numbers, low), numbers)
    new = jnp.where(row == _SEEN_HIGH, jnp.maximum(numbers, high), new)
    new = jnp.where(row == _LAST, values, new)
    return new, HeldNumbers(jnp.unstack(replaced), jnp.unstack(numbers[_VALUE]))


def with_held(inner_state: PyTree, numbers: HeldNumbers) -> PyTree:
    """Makes the state with which the optimizer takes its step.

    Args:
        inner_state: the optimizer's state, with the program's numbers.
        numbers: the numbers to replace, from `step`.

    Returns:
        The state with these numbers replaced, in their dtypes and weak types. Other dtypes would
        compile the step again.
    """

    def replaced(i: int, leaf: Leaf) -> Leaf:
        return jnp.where(numbers.replaced[i], jnp.full_like(leaf, numbers.values[i]), leaf)

    return _map_numbers(replaced, inner_state)


def with_program_numbers(new: PyTree, given: PyTree, own: PyTree, numbers: HeldNumbers) -> PyTree:
    """Puts the program's own numbers back after a step, unless the step has changed them.

    Without it, healcore would never see when the program's own value is back in the range, and a
    checkpoint would hold the replacements.

    Args:
        new: the inner state that the step has returned.
        given: the inner state with replaced numbers that the step has received.
        own: the inner state with the program's numbers.
        numbers: which numbers were replaced.

    Returns:
        The inner state to keep.
    """
    replaced = list(number_leaves(given).values())
    before = list(number_leaves(own).values())

    def restored(i: int, leaf: Leaf) -> Leaf:
        is_same = leaf == jnp.full_like(leaf, replaced[i])
        return jnp.where(numbers.replaced[i] & is_same, jnp.full_like(leaf, before[i]), leaf)

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

_MAX_SIZE = 64
"""Number of elements up to which a constant array is read. A larger one is data of the program."""


class _Optimizer(NamedTuple):
    """An optimizer that `protect` has wrapped."""

    update: Callable[..., Any]
    params: PyTree
    """`jax.ShapeDtypeStruct` of each parameter."""
    state: PyTree
    """`jax.ShapeDtypeStruct` of each leaf of its state."""


_newest_optimizers: dict[Any, _Optimizer] = {}
"""Form of a state -> the newest optimizer with such a state."""


def remember(update: Callable[..., Any], params: PyTree, state: PyTree) -> None:
    """Remembers an optimizer for `constants_of`. Called by `init` of `protect`.

    Args:
        update: the `update` of the optimizer.
        params: its parameters, traced or not.
        state: its initial state.
    """
    _newest_optimizers[_form(state)] = _Optimizer(update, _abstract(params), _abstract(state))


def constants_of(state: PyTree) -> list[float]:
    """Finds the constants of the optimizer with a state of this form. Traces one of its updates.

    Args:
        state: the inner state of `protect`.

    Returns:
        The floating constants of the update without repeats, ascending. Empty if this process has
        not made the optimizer, or if its update needs more than gradients, state and parameters.
    """
    known = _newest_optimizers.get(_form(state))
    if known is None:
        return []
    try:
        with warnings.catch_warnings():  # of keywords that only the program's own call passes
            warnings.simplefilter("ignore")
            traced = jax.make_jaxpr(known.update)(known.params, known.state, known.params)
    except Exception:  # it needs a mesh axis or other arguments, or concrete values
        return []
    found = {shortest_decimal(np.float32(value)) for value in _constants(traced)}
    return sorted(float(each) for each in found if np.isfinite(each))


def _constants(traced: ClosedJaxpr) -> Iterator[float]:
    """The floating constants of a jaxpr and of the jaxprs in it, with repeats."""
    for array in traced.consts:
        if np.size(array) <= _MAX_SIZE:
            yield from _floats(array)
    for equation in traced.jaxpr.eqns:
        for variable in equation.invars:
            if isinstance(variable, Literal):
                yield from _floats(variable.val)
        for parameter in equation.params.values():
            for part in jax.tree.leaves(parameter, is_leaf=_is_jaxpr):
                if isinstance(part, Jaxpr):
                    part = ClosedJaxpr(part, ())
                if isinstance(part, ClosedJaxpr):
                    yield from _constants(part)


def _is_jaxpr(node: Any) -> bool:
    """Whether a parameter of an equation is a function that was traced too."""
    return isinstance(node, Jaxpr | ClosedJaxpr)


def _floats(value: Any) -> Iterator[float]:
    """The elements of a floating constant. Nothing for an integer or a random key."""
    if jnp.issubdtype(jnp.result_type(value), jnp.floating):
        yield from np.asarray(jax.device_get(value), np.float32).ravel().tolist()


def _form(state: PyTree) -> Any:
    """Shape and dtype of each leaf, which are the same in each form that a program passes."""
    leaves = jax.tree.leaves(state)
    return tuple((jnp.shape(leaf), str(jnp.result_type(leaf))) for leaf in leaves)


def _abstract(tree: PyTree) -> PyTree:
    """The tree with shape and dtype in place of each array."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), tree
    )
