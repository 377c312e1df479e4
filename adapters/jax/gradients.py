"""Makes one step's `Signals` from its gradients; scales, replaces and reads gradients or updates.

optax computes norms in the dtype of the leaves. In float16, squares of 256 and more overflow;
bfloat16 has an error of 0.3 %. The functions here compute norms in float32, keep the leaves'
dtypes, and do not change integer and float0 leaves. `find_unread` finds gradients that an optimizer
does not read, for instance of parameters frozen by optax.

Under `jit` over sharded arrays a norm is global. Inside `shard_map`, `pmap` and a `vmap` with an
axis name, each device has only its part, and `Axes` reduces the signals over all devices.
"""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.interpreters.partial_eval import dce_jaxpr

from healcore.core.engine import Engine
from healcore.core.signals import SignalError, Signals
from healcore.jax.array_leaves import Leaf, PyTree, is_static
from healcore.jax.namespace import JAX

P = ParamSpec("P")
Result = TypeVar("Result")
Tree = TypeVar("Tree")


def compiled(function: Callable[P, Result], *, static: tuple[int, ...] = ()) -> Callable[P, Result]:
    """Compiles a function as one call; inside `jit` its operations are inlined.

    Outside of `jit`, JAX would dispatch each operation separately, which takes about 20 times as
    long. The function runs under the standard promotion of dtypes, because under the user's
    ``jax_numpy_dtype_promotion="strict"`` a sum of a bool and an int32 raises.

    Args:
        function: a pure function of pytrees of arrays.
        static: positions of the arguments that are hashable values instead of pytrees.

    Returns:
        A function with the same arguments and results, for eager and for traced arrays.
    """
    jitted = jax.jit(function, static_argnums=static, inline=True)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        with jax.numpy_dtype_promotion("standard"):
            return jitted(*args, **kwargs)

    return call


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


@compiled
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


def _of_gradients(
    function: Callable[Concatenate[list[jax.Array], P], list[jax.Array]],
) -> Callable[Concatenate[Tree, P], Tree]:
    """Turns a function of a list of gradients into a function of a tree, compiled as one call."""
    call = compiled(function)

    @functools.wraps(function)
    def changed(tree: Tree, *args: P.args, **kwargs: P.kwargs) -> Tree:
        leaves, structure = jax.tree.flatten(tree)
        places = []
        gradients = []
        for i, leaf in enumerate(leaves):
            if is_gradient(leaf):
                places.append(i)
                gradients.append(jnp.asarray(leaf))
        new = call(gradients, *args, **kwargs)
        for i, leaf in zip(places, new, strict=True):
            leaves[i] = leaf
        return structure.unflatten(leaves)

    return changed


@_of_gradients
def scale(leaves: list[jax.Array], factor: jax.typing.ArrayLike) -> list[jax.Array]:
    """Multiplies every gradient of a tree by one factor.

    Computes in at least float32: a factor in bfloat16 would have an error of up to 0.4 %.

    Args:
        leaves: the gradients. The caller passes a tree, and gets a tree.
        factor: float32 0-d, such as a factor of a clip or a multiplier of the learning rate.
    """
    return [_product(leaf, factor) for leaf in leaves]


@_of_gradients
def scale_to_limit(leaves: list[jax.Array], factor: jax.Array) -> list[jax.Array]:
    """As `scale` by a factor of at most 1, and the leaves themselves where the factor is 1.

    LLVM contracts a product into a sum that reads it, so after `scale` a momentum, ``0.9 * trace +
    g * 1``, may round another product than ``0.9 * trace + g`` does. It does not contract the
    result of a selection.

    Args:
        leaves: the gradients. The caller passes a tree, and gets a tree.
        factor: float32 0-d, at most 1.
    """
    is_limited = factor < 1
    return [jax.lax.select(is_limited, _product(leaf, factor), leaf) for leaf in leaves]


def clip_as_optax(
    tree: Tree, measured: PyTree, max_norm: Any, factor: jax.Array, is_limited: jax.Array | None
) -> Tree:
    """Clips gradients with the bits of `optax.clip_by_global_norm(max_norm)`.

    optax divides by the norm and then multiplies by the limit, which differs in the last bits from
    a product with one factor. The functions of optax are called as the program called them, so that
    eager and compiled steps compute what they computed.

    Args:
        tree: the gradients.
        measured: the same tree, with empty arrays for gradients that no update depends on. These
            gradients stay unchanged.
        max_norm: the limit.
        factor: the engine's factor, float32 0-d. Used in place of optax's clip where `is_limited`,
            and where optax's norm of float16 gradients overflows: optax would clip these to 0.
        is_limited: whether the engine has a lower limit besides, bool 0-d; None if it never has.

    Returns:
        The clipped gradients, in their dtypes.
    """
    leaves, structure = jax.tree.flatten(tree)
    places = []
    gradients = []
    for i, (leaf, part) in enumerate(zip(leaves, jax.tree.leaves(measured), strict=True)):
        if is_gradient(leaf) and jnp.size(part) == jnp.size(leaf):
            places.append(i)
            gradients.append(jnp.asarray(leaf))
    if not gradients:
        return tree
    with jax.numpy_dtype_promotion("standard"):
        clipped: Any
        clipped, _ = optax.clip_by_global_norm(max_norm).update(gradients, optax.EmptyState())
        uses_factor = is_limited
        if any(leaf.dtype == jnp.float16 for leaf in gradients):
            overflows = ~jnp.isfinite(optax.tree.norm(gradients))
            uses_factor = overflows
            if is_limited is not None:
                uses_factor = is_limited | overflows
        if uses_factor is not None:
            clipped = _scaled_where(gradients, uses_factor, factor, clipped)
    for i, leaf in zip(places, clipped, strict=True):
        leaves[i] = leaf
    return structure.unflatten(leaves)


@_of_gradients
def scale_each(leaves: list[jax.Array], factors: jax.Array) -> list[jax.Array]:
    """Multiplies each gradient of a tree by a factor of its own.

    Args:
        leaves: the n gradients. The caller passes a tree, and gets a tree.
        factors: float32 (n,), in the order of `both_norms`.
    """
    scaled = []
    for leaf, factor in zip(leaves, jnp.asarray(factors), strict=True):
        scaled.append(_product(leaf, factor))
    return scaled


@_of_gradients
def fill_where(leaves: list[jax.Array], skip: jax.Array, value: float) -> list[jax.Array]:
    """Replaces every element by `value` on a skip.

    An update of -0.0 keeps every parameter bit-identical: ``p + -0.0`` is p for every p, but
    ``-0.0 + 0.0`` is ``+0.0``. (XLA's bfloat16 addition flushes subnormals, |p| < 1.2e-38, in some
    programs; `commit` keeps subnormals.) XLA fuses this into the addition, at no cost.

    Args:
        leaves: gradients or updates. The caller passes a tree, and gets a tree.
        skip: bool 0-d.
        value: 0.0 for gradients that an optimizer reads, -0.0 for updates.
    """
    return [jnp.where(skip, _full_like(leaf, value), leaf) for leaf in leaves]


@compiled
def _scaled_where(
    leaves: list[jax.Array], condition: jax.Array, factor: jax.Array, others: list[jax.Array]
) -> list[jax.Array]:
    """Each leaf times the factor where the condition holds, else the leaf of `others`."""
    chosen = []
    for leaf, other in zip(leaves, others, strict=True):
        chosen.append(jnp.where(condition, _product(leaf, factor), other))
    return chosen


@_of_gradients
def fill_bad(leaves: list[jax.Array], skip: jax.Array) -> list[jax.Array]:
    """As `fill_where` by -0.0, also where an element is NaN or Inf: its parameter stays as it is.

    `update_check` finds before the decision most optimizers that make NaN of finite gradients. This
    function catches the others, element by element. XLA fuses the test into the same selection.

    Args:
        leaves: updates. The caller passes a tree, and gets a tree.
        skip: bool 0-d.
    """
    taken = ~skip
    filled = []
    for leaf in leaves:
        is_used = taken & jnp.isfinite(leaf)
        filled.append(jax.lax.select(is_used, leaf, _full_like(leaf, -0.0)))
    return filled


def _full_like(leaf: jax.Array, value: jax.typing.ArrayLike) -> jax.Array:
    """An array of one value; both parts of a complex element are the value."""
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        value = jax.lax.complex(value, value)
    return jnp.full(leaf.shape, value, leaf.dtype)


def _square_sum(leaf: jax.Array) -> jax.Array:
    """Sum of the squares of all elements, float32 0-d."""
    if jnp.iscomplexobj(leaf):
        return _square_sum(jnp.real(leaf)) + _square_sum(jnp.imag(leaf))
    # XLA splits a plain reduction over the cores. A reshape to (rows, 1024) and two sums is 12
    # times slower, because the reshape copies (25 M float32 on 2 cores: 38 ms against 3.4 ms).
    return jnp.sum(jnp.square(jnp.asarray(leaf).astype(jnp.float32)))


def _product(leaf: jax.Array, factor: jax.typing.ArrayLike) -> jax.Array:
    """A leaf times a factor, computed in at least float32, in the dtype of the leaf."""
    if jnp.iscomplexobj(leaf):  # in a complex product, -0.0 becomes 0.0
        return jax.lax.complex(_product(jnp.real(leaf), factor), _product(jnp.imag(leaf), factor))
    # A product instead of a division by the norm, as in optax.clip_by_global_norm: XLA fuses a
    # product into every consumer of the gradient, but writes a quotient to memory (25 M float32
    # with adamw on 2 cores: 19 ms a step and no temporary, against 45 ms and 100 MB).
    wide = jnp.promote_types(leaf.dtype, jnp.float32)
    return (jnp.asarray(factor, jnp.float32) * leaf.astype(wide)).astype(leaf.dtype)


# -- gradients that an optimizer does not read ---------------------------------------------------


def find_unread(
    known: dict[Any, list[bool]], step: Callable[..., tuple[Any, Any]], *args: Any
) -> list[bool]:
    """Whether each leaf of the gradients influences no update of this or any later step.

    A frozen parameter has such a gradient. Its NaN harms nothing, so it must not skip a step. The
    step is traced to a jaxpr, and a dead-code analysis finds what its outputs depend on. A gradient
    may also enter the state and reach the updates of a later step: the state leaves that the step
    reads are outputs too, until no more are found.

    Args:
        known: results of eager calls by the structure of the gradients. Eager calls add to it.
        step: a pure function ``(gradients, state, params) -> (updates, state)``. It is traced. A
            step that cannot be traced reads every gradient.
        args: gradients, state and parameters.

    Returns:
        One bool for each leaf of the gradients.
    """
    structure = jax.tree.structure(args[0])
    eager = not is_traced(args)
    if eager and structure in known:
        return known[structure]
    count = structure.num_leaves
    read = [True] * count
    try:
        closed, outputs = jax.make_jaxpr(step, return_shape=True)(*args)
    except Exception:  # concrete values are needed, or the step raises when it is run too
        pass
    else:
        updates, kept = map(_count_of_leaves, outputs)
        read_state = [False] * kept
        before = None
        while read_state != before:
            read = dce_jaxpr(closed.jaxpr, [True] * updates + read_state)[1]
            # A state leaf that this step reads has to be right at the end of the last step.
            before, read_state = read_state, read[count : count + kept]
    unread = [not each for each in read[:count]]
    if eager:
        known[structure] = unread
    return unread


def _count_of_leaves(tree: PyTree) -> int:
    """The number of leaves of a tree."""
    return len(jax.tree.leaves(tree))


def is_traced(tree: PyTree) -> bool:
    """Whether a tree contains a tracer, so that its values are not known now.

    Args:
        tree: arguments of a function that differs between eager and traced calls.
    """
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def without_unread(tree: Tree, unread: Sequence[bool]) -> Tree:
    """Replaces gradients that are unread by empty arrays, whose norm is 0.

    Args:
        tree: the gradients.
        unread: result of `find_unread`, one bool for each leaf.

    Returns:
        The tree to measure and judge, not to apply.
    """

    def empty(leaf: Leaf) -> jax.Array:
        del leaf
        return jnp.zeros((0,), jnp.float32)

    return _changed(tree, unread, empty)


def finite_unread(tree: Tree, unread: Sequence[bool]) -> Tree:
    """Replaces NaN and Inf of gradients that are unread by 0.

    No update depends on these gradients, so no step is skipped for them. But the optimizer may put
    them into moments, and a checkpoint with a NaN in it would count as bad.

    Args:
        tree: the gradients.
        unread: result of `find_unread`, one bool for each leaf.

    Returns:
        The gradients for the optimizer.
    """

    def finite(leaf: Leaf) -> jax.Array:
        return jnp.where(jnp.isfinite(leaf), leaf, 0)

    return _changed(tree, unread, finite)


def _changed(tree: Tree, unread: Sequence[bool], change: Callable[[Leaf], jax.Array]) -> Tree:
    """Changes the gradients of a tree that are `unread`."""
    leaves, structure = jax.tree.flatten(tree)
    new = []
    for leaf, is_unread in zip(leaves, unread, strict=True):
        if is_unread and is_gradient(leaf):
            leaf = change(leaf)
        new.append(leaf)
    return structure.unflatten(new)


# -- signals of a step -----------------------------------------------------------------------------

AxisName = str | tuple[str, ...] | None

NAMES = ("value", *(name for name in Signals._fields if name not in ("loss", "group_norms")))
"""Keywords of `update` by which a caller reports signals; see `heal`."""
_MEANS = ("loss", "eval_loss", "learning_rate")
_FLAGS = ("change_expected", "externally_skipped")


def split_keywords(keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits the keywords of `update` into signals for healcore and keywords for the optimizer.

    Args:
        keywords: the keywords of a call of `update`.

    Returns:
        The signals by the names in `NAMES`, without those that are None; and all other keywords.
    """
    signals = {}
    for name in NAMES:
        if keywords.get(name) is not None:
            signals[name] = keywords[name]
    others = {}
    for name, value in keywords.items():
        if name not in NAMES:
            others[name] = value
    return signals, others


def make_signals(
    engine: Engine, updates: PyTree, given: Mapping[str, Any], axes: Axes, bad_update: Any = None
) -> tuple[Signals, jax.Array | None]:
    """Makes one step's `Signals`, the same on every device.

    Args:
        engine: the engine of the policy.
        updates: the gradients.
        given: the signals that the caller passes, by the keywords of `NAMES`.
        axes: the mesh axes over which signals are reduced.
        bad_update: whether the optimizer would make NaN or Inf of the gradients, bool 0-d or None.
            The step is then as bad as one whose gradient is not finite: the norm is NaN, but the
            norms of the leaves are those of the gradients.

    Returns:
        The signals; and the norm of each gradient leaf, float32 (n,), or None if `given` has the
        global norm and the policy needs no others.

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
    if engine.mode == "observe":
        # Without a barrier, the norm and the optimizer's second moment share the squares of the
        # gradients, which XLA then writes to memory (the size of all parameters). In other modes
        # the scaling of the gradients prevents this.
        updates = jax.lax.optimization_barrier(updates)
    leaf_norms = None
    grad_norm = given.get("grad_norm")
    if engine.per_tensor or grad_norm is None:
        # Computed even if no rule reads it, because no policy may accept a non-finite gradient.
        own_norm, leaf_norms = both_norms(updates)
        if grad_norm is None:
            grad_norm = own_norm
        if not leaf_norms.size:
            leaf_norms = jnp.zeros((1,), jnp.float32)  # `count_leaves` returns at least 1
    reported = {**given, "grad_norm": grad_norm}
    found = {name: _scalar(name, reported.get(name)) for name in NAMES}
    group_norms = None
    if engine.per_tensor:
        group_norms = leaf_norms
    signals = Signals(loss=found.pop("value"), group_norms=group_norms, **found)
    signals, leaf_norms = axes.signals(signals, leaf_norms, norm_reported="grad_norm" in given)
    if bad_update is not None:
        bad_update = axes.any(bad_update)
        norm = JAX.where(bad_update, jnp.nan, signals.grad_norm)
        signals = signals._replace(grad_norm=norm)
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

    @classmethod
    def of(cls, axis_name: AxisName, shard_axis_name: AxisName) -> Axes:
        """Makes the axes from the arguments of `heal` or `protect`.

        Args:
            axis_name: name or names of the axes along which gradients are equal, or None.
            shard_axis_name: name or names of the axes along which gradients are parts, or None.

        Raises:
            TypeError: a name is not a text, or is in both arguments.
        """
        axes = cls(
            _axis_names("axis_name", axis_name), _axis_names("shard_axis_name", shard_axis_name)
        )
        both = sorted(set(axes.averaged) & set(axes.split))
        if both:
            raise TypeError(
                f"axis {both[0]!r} is in axis_name and in shard_axis_name: along an axis, "
                "gradients are either equal (axis_name) or parts of a whole (shard_axis_name)"
            )
        return axes

    def signals(
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
        if not (self.averaged or self.split):
            return own, leaf_norms
        names = [*_MEANS, *_FLAGS]
        if norm_reported:
            names = [*_MEANS, "grad_norm", *_FLAGS]
        found = []
        vector = []
        for name in names:
            value = getattr(own, name)
            if value is not None:
                found.append(name)
                vector.append(jnp.asarray(value, jnp.float32)[None])
        if leaf_norms is not None:
            vector.append(jnp.square(leaf_norms))
        total = jax.lax.psum(jnp.concatenate(vector), (*self.averaged, *self.split))
        devices = self._size(self.averaged + self.split)
        new = {}
        for i, name in enumerate(found):
            new[name] = total[i] / devices
        for name in _FLAGS:
            if name in new:
                new[name] = new[name] > 0
        if leaf_norms is not None:
            squares = total[len(found) :] / self._size(self.averaged)
            leaf_norms = jnp.sqrt(squares)
            if not norm_reported:
                new["grad_norm"] = jnp.sqrt(jnp.sum(squares))
        if own.group_norms is not None:
            new["group_norms"] = leaf_norms
        return own._replace(**new), leaf_norms

    def any(self, flag: jax.Array) -> jax.Array:
        """Whether a flag is set on any device.

        Args:
            flag: bool 0-d, of this device.

        Returns:
            bool 0-d, equal on all devices.
        """
        names = (*self.averaged, *self.split)
        if not names:
            return flag
        return jax.lax.psum(flag.astype(jnp.int32), names) > 0

    def _size(self, names: tuple[str, ...]) -> int:
        """The number of devices along some axes."""
        return math.prod(jax.lax.axis_size(name) for name in names)


def _axis_names(argument: str, given: Any) -> tuple[str, ...]:
    """The names that a user passes as `argument`, as a tuple. Raises TypeError for other types."""
    names = given
    if given is None:
        names = ()
    elif isinstance(given, str):
        names = (given,)
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{argument} must be the name of a mesh axis, or a tuple of names, got {given!r}: "
            f'write {argument}="data"'
        )
    return tuple(names)


def _scalar(name: str, value: Any) -> jax.Array | None:
    """Converts a signal to float32 or bool, 0-d. Returns None for None."""
    if value is None:
        return None
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
