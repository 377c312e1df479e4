"""Measures, scales and replaces gradients or updates, and makes a step's `Signals` of them.

optax computes norms in the dtype of the leaves. In float16, squares of 256 and more overflow;
bfloat16 has an error of 0.3 %. The functions here compute norms in float32, keep the leaves'
dtypes, and do not change integer and float0 leaves.

Under `jit` over sharded arrays a norm is global. Inside `shard_map`, `pmap` and a `vmap` with an
axis name, each device has only its part, and `Axes` reduces the signals over all devices.
"""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from healcore.core.engine import Engine
from healcore.core.signals import SignalError, Signals
from healcore.jax.trees import Leaf, PyTree, is_static

Tree = TypeVar("Tree")


def is_gradient(leaf: Leaf) -> bool:
    """Whether a leaf is of a floating or complex dtype, as each gradient is.

    False for an integer, and for a function or a text, which an Equinox module has among its
    leaves. An integer parameter has a gradient of dtype float0, which has no norm.

    Args:
        leaf: an array, traced or not, a number or any object.
    """
    return not is_static(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def gradient_leaves(tree: PyTree) -> list[jax.Array]:
    """The floating and complex leaves of a tree, in flattening order.

    `HealState.heal_leaf_norms` and all factors per tensor are in this order.

    Args:
        tree: gradients, parameters or any other tree.
    """
    return [leaf for leaf in jax.tree.leaves(tree) if is_gradient(leaf)]


def both_norms(tree: PyTree) -> tuple[jax.Array, jax.Array]:
    """L2 norm over all gradients, and of each gradient leaf in flattening order.

    Args:
        tree: gradients of any floating or complex dtype; may be empty.

    Returns:
        float32, 0-d and (n,). The global norm is 0 for an empty tree, and NaN or Inf if any element
        is. Finite gradients above 1.8e19 overflow float32 when squared, so their norm is Inf.
    """
    sums = [_square_sum(leaf) for leaf in gradient_leaves(tree)]
    if not sums:
        return jnp.zeros((), jnp.float32), jnp.zeros((0,), jnp.float32)
    return jnp.sqrt(functools.reduce(operator.add, sums)), jnp.sqrt(jnp.stack(sums))


def scale(tree: Tree, factor: jax.typing.ArrayLike) -> Tree:
    """Multiplies every gradient of a tree by one factor.

    Computes in at least float32: a factor in bfloat16 would have an error of up to 0.4 %.

    Args:
        tree: the gradients.
        factor: float32 0-d, such as a factor of a clip or a multiplier of the learning rate.
    """
    return _changed(tree, lambda leaf: product(leaf, factor))


def scale_to_limit(tree: Tree, factor: jax.Array, is_limited: jax.Array) -> Tree:
    """Works as `scale` where `is_limited`. Elsewhere it returns the leaves themselves.

    LLVM contracts a product into a sum that reads it, so after `scale` a momentum, ``0.9 * trace +
    g * 1``, may round another product than ``0.9 * trace + g`` does. It does not contract the
    result of a selection.

    Args:
        tree: the gradients.
        factor: float32 0-d.
        is_limited: whether a rollback has set a limit of the norm, bool 0-d.
    """
    return _changed(tree, lambda leaf: lax.select(is_limited, product(leaf, factor), leaf))


def scale_each(tree: Tree, factors: jax.Array) -> Tree:
    """Multiplies each gradient of a tree by a factor of its own.

    Args:
        tree: the n gradients.
        factors: float32 (n,), in the order of `both_norms`.
    """
    remaining = iter(factors)
    return _changed(tree, lambda leaf: product(leaf, next(remaining)))


def clip_as_optax(tree: Tree, max_norm: Any, factor: jax.Array, uses_factor: jax.Array) -> Tree:
    """Clips gradients with the bits of `optax.clip_by_global_norm(max_norm)`.

    optax divides by the norm and then multiplies by the limit, which differs in the last bits from
    a product with one factor.

    Args:
        tree: the gradients.
        max_norm: the limit.
        factor: the engine's factor, float32 0-d. Used in place of optax's clip where `uses_factor`,
            and where optax's norm of float16 gradients overflows: optax would clip these to 0.
        uses_factor: whether a rollback has set a lower limit, bool 0-d.
    """
    gradients = gradient_leaves(tree)
    if not gradients:
        return tree
    clipped: Any
    clipped, _ = optax.clip_by_global_norm(max_norm).update(gradients, optax.EmptyState())
    uses_factor |= ~jnp.isfinite(optax.tree.norm(gradients))
    remaining = iter(clipped)
    return _changed(
        tree, lambda leaf: lax.select(uses_factor, product(leaf, factor), next(remaining))
    )


def fill_where(tree: Tree, condition: jax.Array, value: float) -> Tree:
    """Replaces every gradient or update by `value` where the condition holds, see `filled`."""
    kept = ~condition
    return _changed(tree, lambda leaf: filled(leaf, kept, value))


def filled(
    leaf: jax.Array, kept: jax.Array, value: float, tested: Iterable[jax.Array] = ()
) -> jax.Array:
    """Replaces the elements of a gradient or update by `value`, at no cost: XLA fuses it.

    An update of -0.0 keeps a parameter bit-identical: ``p + -0.0`` is p for every p, but ``-0.0 +
    0.0`` is ``+0.0``. (XLA's bfloat16 addition flushes subnormals, |p| < 1.2e-38, in some programs;
    `commit` keeps subnormals.)

    Args:
        leaf: the gradient or the update of one tensor.
        kept: whether the leaf is kept, bool 0-d: the step is not skipped.
        value: 0.0 for gradients that an optimizer reads, -0.0 for updates.
        tested: arrays of the leaf's shape. An element is also replaced where one of them is NaN or
            Inf.
    """
    both: Any = value
    if jnp.iscomplexobj(leaf):
        both = lax.complex(value, value)
    for each in tested:
        kept = kept & jnp.isfinite(each)
    return lax.select(kept, leaf, lax.full_like(leaf, both))


def _changed(tree: Tree, change: Callable[[jax.Array], jax.Array]) -> Tree:
    """Changes each gradient of a tree, in flattening order. All other leaves stay."""

    def changed(leaf: Leaf) -> Leaf:
        if is_gradient(leaf):
            return change(jnp.asarray(leaf))
        return leaf

    return jax.tree.map(changed, tree)


def _square_sum(leaf: jax.Array) -> jax.Array:
    """Sum of the squares of all elements, float32 0-d."""
    if jnp.iscomplexobj(leaf):
        return _square_sum(jnp.real(leaf)) + _square_sum(jnp.imag(leaf))
    # XLA splits a plain reduction over the cores. A reshape to (rows, 1024) and two sums is 12
    # times slower, because the reshape copies (25 M float32 on 2 cores: 38 ms against 3.4 ms).
    return jnp.sum(jnp.square(jnp.asarray(leaf).astype(jnp.float32)))


def product(leaf: jax.Array, factor: jax.typing.ArrayLike) -> jax.Array:
    """A leaf times a factor, computed in at least float32, in the dtype of the leaf."""
    if jnp.iscomplexobj(leaf):  # in a complex product, -0.0 becomes 0.0
        return lax.complex(product(jnp.real(leaf), factor), product(jnp.imag(leaf), factor))
    # A product instead of a division by the norm, as in optax.clip_by_global_norm: XLA fuses a
    # product into every consumer of the gradient, but writes a quotient to memory (25 M float32
    # with adamw on 2 cores: 19 ms a step and no temporary, against 45 ms and 100 MB).
    wide = jnp.promote_types(leaf.dtype, jnp.float32)
    return (jnp.asarray(factor, jnp.float32) * leaf.astype(wide)).astype(leaf.dtype)


# -- signals of a step -----------------------------------------------------------------------------

AxisName = str | tuple[str, ...] | None
"""A name of a mesh axis, several names, or None for no axis."""

SIGNAL_KEYWORDS = (
    "value",
    *(name for name in Signals._fields if name not in ("loss", "group_norms")),
)
"""Keywords of `update` by which a caller reports signals; see `heal`."""
_MEANS = ("loss", "eval_loss", "learning_rate")
_FLAGS = ("change_expected", "externally_skipped")


def split_keywords(keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits the keywords of `update` into signals for healcore and keywords for the optimizer.

    Args:
        keywords: the keywords of a call of `update`.

    Returns:
        The signals by the names in `SIGNAL_KEYWORDS`, without signals that are None; and all other
        keywords.
    """
    signals = {}
    for name in SIGNAL_KEYWORDS:
        if keywords.get(name) is not None:
            signals[name] = keywords[name]
    others = {}
    for name, value in keywords.items():
        if name not in SIGNAL_KEYWORDS:
            others[name] = value
    return signals, others


def checked(given: Mapping[str, Any], engine: Engine) -> dict[str, jax.Array]:
    """Converts the signals that the caller of `update` passes, and warns of a missing loss.

    Args:
        given: the signals, by the keywords of `SIGNAL_KEYWORDS`.
        engine: the engine of the policy.

    Raises:
        SignalError: a signal is not a 0-d number or bool.
    """
    inactive = []
    for name, detector in engine.config.detectors:
        if "loss" in detector.NEEDS:
            inactive.append(name)
    if "value" not in given and inactive:
        warnings.warn(
            f"no loss reaches healcore, so the policy's {', '.join(inactive)} cannot act and "
            "heal/loss is NaN: write tx.update(grads, opt_state, params, value=loss)",
            stacklevel=3,  # the caller of tx.update, outside of jit
        )
    return {name: _scalar(name, value) for name, value in given.items()}


def make_signals(
    engine: Engine,
    updates: PyTree,
    given: Mapping[str, jax.Array],
    axes: Axes,
    bad_update: Any = None,
) -> tuple[Signals, jax.Array | None]:
    """Makes one step's `Signals`, the same on every device.

    Args:
        engine: the engine of the policy.
        updates: the gradients.
        given: result of `checked`.
        axes: the mesh axes over which signals are reduced.
        bad_update: whether the optimizer would make NaN or Inf of the gradients, bool 0-d or None.
            If it is True, the global norm is NaN, so that the policy treats the step as a step
            with a NaN in its gradients. The norms of the leaves stay the gradients' norms.

    Returns:
        The signals; and the norm of each gradient leaf, float32 (n,), or None if `given` has the
        global norm and the policy needs no others.
    """
    if engine.mode == "observe":
        # Without a barrier, the norm and the optimizer's second moment share the squares of the
        # gradients, which XLA then writes to memory (the size of all parameters). In other modes
        # the scaling of the gradients prevents this.
        updates = lax.optimization_barrier(updates)
    found = dict.fromkeys(SIGNAL_KEYWORDS) | dict(given)
    leaf_norms = None
    if engine.per_tensor or "grad_norm" not in given:
        # Computed even if no rule reads it, because no policy may accept a non-finite gradient.
        own_norm, leaf_norms = both_norms(updates)
        found["grad_norm"] = given.get("grad_norm", own_norm)
        if not leaf_norms.size:
            leaf_norms = jnp.zeros((1,), jnp.float32)  # `count_leaves` returns at least 1
    group_norms = None
    if engine.per_tensor:
        group_norms = leaf_norms
    signals = Signals(loss=found.pop("value"), group_norms=group_norms, **found)
    signals, leaf_norms = axes.reduce(signals, leaf_norms, norm_reported="grad_norm" in given)
    if bad_update is not None:
        if axes.names:
            bad_update = lax.psum(bad_update.astype(jnp.int32), axes.names) > 0
        norm: Any = signals.grad_norm
        signals = signals._replace(grad_norm=jnp.where(bad_update, jnp.nan, norm))
    return signals, leaf_norms


def count_leaves(params: PyTree) -> int:
    """Number of tensors with a gradient, at least one.

    Orbax cannot save an empty array, and the healing state has an array over these tensors.

    Args:
        params: the parameters, as passed to ``tx.init``.
    """
    # optax.tree.map_params calls `init` with a placeholder that has no leaves, and expects a state
    # of the same structure.
    return max(1, len(gradient_leaves(params)))


class Axes(NamedTuple):
    """The axes of `shard_map` or `pmap` whose devices have to make the same decision.

    Within these transformations each device runs the step on its own part of the data. If one
    device skipped a step and another did not, their parameters would differ from then on.
    """

    averaged: tuple[str, ...] = ()
    """Axes along which gradients are equal (already averaged, as in data-parallel training)."""
    split: tuple[str, ...] = ()
    """Axes along which each device has its own part of the gradients."""

    @property
    def names(self) -> tuple[str, ...]:
        """All axes."""
        return (*self.averaged, *self.split)

    @classmethod
    def of(cls, axis_name: AxisName, shard_axis_name: AxisName) -> Axes:
        """Makes the axes from the arguments of `heal` or `protect`.

        Args:
            axis_name: name or names of the axes along which gradients are equal, or None.
            shard_axis_name: name or names of the axes along which gradients are parts, or None.

        Raises:
            TypeError: a name is in both arguments.
        """
        axes = cls(_axis_names(axis_name), _axis_names(shard_axis_name))
        both = sorted(set(axes.averaged) & set(axes.split))
        if both:
            raise TypeError(
                f"axis {both[0]!r} is in axis_name and in shard_axis_name: along an axis, "
                "gradients are either equal (axis_name) or parts of a whole (shard_axis_name)"
            )
        return axes

    def reduce(
        self, own: Signals, leaf_norms: jax.Array | None, *, norm_reported: bool
    ) -> tuple[Signals, jax.Array | None]:
        """Reduces this device's signals and leaf norms over all devices, by one all-reduce.

        Losses and rates are averaged, norms are combined, and a flag is set if any device sets it.
        A NaN or Inf reaches every device.

        Args:
            own: the signals of this device, 0-d.
            leaf_norms: norm of each gradient leaf on this device, float32 (n,), or None.
            norm_reported: whether the caller passed `grad_norm`.

        Returns:
            The signals and the norms of the whole step, equal on all devices.
        """
        if not self.names:
            return own, leaf_norms
        names = [*_MEANS, *_FLAGS]
        if norm_reported:
            names.append("grad_norm")
        values = {}
        for name in names:
            value = getattr(own, name)
            if value is not None:
                values[name] = jnp.asarray(value, jnp.float32)
        squares = None
        if leaf_norms is not None:
            squares = jnp.square(leaf_norms)
        values, squares = lax.psum((values, squares), self.names)
        new = {}
        for name, total in values.items():
            if name in _FLAGS:
                new[name] = total > 0
            else:
                new[name] = total / self._size(self.names)
        if squares is not None:
            squares /= self._size(self.averaged)
            leaf_norms = jnp.sqrt(squares)
            if not norm_reported:
                new["grad_norm"] = jnp.sqrt(jnp.sum(squares))
        if own.group_norms is not None:
            new["group_norms"] = leaf_norms
        return own._replace(**new), leaf_norms

    def _size(self, names: tuple[str, ...]) -> int:
        """The number of devices along some axes."""
        return math.prod(lax.axis_size(name) for name in names)


def _axis_names(given: AxisName) -> tuple[str, ...]:
    """The names that a user passes, as a tuple."""
    if given is None:
        return ()
    if isinstance(given, str):
        return (given,)
    return tuple(given)


def _scalar(name: str, value: Any) -> jax.Array:
    """Converts a signal to float32 or bool, 0-d."""
    try:
        dtype, shape = jax.dtypes.result_type(value), jnp.shape(value)
    except (TypeError, ValueError) as error:
        raise SignalError(
            f"{name} must be one number, got {type(value).__name__}: pass a 0-d array"
        ) from error
    is_flag = name in _FLAGS
    if is_flag:
        wanted, kind, write = jnp.bool_, "bool", f"({name} != 0)"
    else:
        wanted, kind, write = jnp.floating, "floating number", f"{name}.mean()"
    if shape or not jnp.issubdtype(dtype, wanted):
        raise SignalError(
            f"{name} must be a 0-d {kind}, got {dtype} of shape {shape}: pass {name}={write}"
        )
    if is_flag:
        return jnp.asarray(value)
    with np.errstate(over="ignore"):  # a number beyond the range of float32 becomes Inf
        return jnp.asarray(value).astype(jnp.float32)
