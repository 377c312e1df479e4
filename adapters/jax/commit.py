"""`commit`: selects the old or the new value of each leaf of a state.

A selection keeps each bit: -0.0, subnormals, NaN payloads. Arithmetic would not: 0 times a NaN is
NaN, and ``old + 0 * (new - old)`` turns -0.0 into 0.0.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from healcore.core.errors import CommitError
from healcore.jax.trees import Leaf, differences, forms

State = TypeVar("State")
_SMALL_FLOATS = {8: jnp.uint8, 16: jnp.uint16}
"""Bits of a float that `select` selects as an integer -> the integer's dtype."""


def commit(skip: jax.Array, old: State, new: State) -> State:
    """`old` where `skip`, else `new`, so that a skip reverts the whole train state.

        skip = last_decision(opt_state).skip
        batch_stats = commit(skip, old=batch_stats, new=new_batch_stats)

    A skip of the optimizer step alone does not revert values that the forward pass of the bad batch
    wrote (BatchNorm statistics, EMA weights, accumulators). Do not pass the healing state: a
    reverted counter of skips would never count.

    Args:
        skip: bool, 0-d, usually ``decision.skip``.
        old: any pytree of arrays, including typed PRNG keys.
        new: a tree of the same structure, shapes and dtypes.

    Returns:
        A tree like `new`, bit-identical to `old` or `new`, including -0.0, subnormals and NaN
        payloads.

    Raises:
        CommitError: the structures, shapes or dtypes differ; the message names the leaf.

    Examples:
        >>> import jax.numpy as jnp
        >>> commit(jnp.bool_(True), {"mean": jnp.zeros(2)}, {"mean": jnp.full(2, jnp.nan)})
        {'mean': Array([0., 0.], dtype=float32)}
    """
    check_structure(old, new, "commit() needs one part of the state in the same structure, got")
    if jnp.shape(skip) != () or jnp.result_type(skip) != jnp.bool_:
        raise CommitError(
            f"skip must be a 0-d bool, got {jnp.result_type(skip)}{jnp.shape(skip)}: pass "
            "decision.skip, as in commit(last_decision(opt_state).skip, old, new)"
        )
    return jax.tree_util.tree_map_with_path(
        lambda path, before, after: select(skip, before, after, jax.tree_util.keystr(path)),
        old,
        new,
    )


def check_structure(old: Any, new: Any, rule: str) -> None:
    """Raises CommitError, which begins with `rule`, if two trees differ in their structure."""
    if jax.tree.structure(old) != jax.tree.structure(new):
        listed = differences(forms(new), forms(old)) or "other containers, as a list for a tuple"
        raise CommitError(f"{rule} {listed}, in comparison with the state before the step")


def select(skip: jax.Array, old: Leaf, new: Leaf, name: str, *, may_widen: bool = False) -> Leaf:
    """Selects one leaf: array, PRNG key or number.

    Args:
        skip: bool 0-d.
        old: the leaf to keep on a skip.
        new: the leaf without a skip.
        name: name of the leaf for messages.
        may_widen: whether the dtype may become wider, which keeps the old value exact. Prodigy and
            optimizers under inject_hyperparams widen bfloat16 moments in their first step if other
            parameters are float32.

    Raises:
        CommitError: the leaf changes its shape or dtype.
    """
    if old is new or (isinstance(old, np.ndarray) and old.dtype == jax.dtypes.float0):
        return new
    try:
        old, new = jnp.asarray(old), jnp.asarray(new)
    except TypeError as error:
        if old == new:
            return new
        raise CommitError(
            f"{name} is a {type(new).__name__} that the step has changed, which cannot be selected "
            "on the device. Make it an array, or remove it from the train state"
        ) from error
    are_numbers = all(jnp.issubdtype(each.dtype, jnp.number) for each in (old, new))
    if may_widen and are_numbers and jnp.promote_types(old.dtype, new.dtype) == new.dtype:
        old = old.astype(new.dtype)
    if old.shape != new.shape or old.dtype != new.dtype:
        raise CommitError(
            f"{name} was {jax.typeof(old)} and became {jax.typeof(new)}: a step must keep the "
            f"shapes and dtypes of its state. Write {name} = new.astype({old.dtype}) in the step"
        )
    is_float = jnp.issubdtype(old.dtype, jnp.floating)
    bits = _SMALL_FLOATS.get(jnp.finfo(old.dtype).bits) if is_float else None
    if bits is None:
        return jnp.where(skip, old, new)
    # On a CPU, XLA selects bfloat16 values in float32, which turns every NaN into the same NaN: 252
    # of 65536 bit patterns change (measured). A selection of integers changes none.
    as_bits = jax.lax.bitcast_convert_type
    return as_bits(jnp.where(skip, as_bits(old, bits), as_bits(new, bits)), old.dtype)
