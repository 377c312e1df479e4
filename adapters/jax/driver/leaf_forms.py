"""The two forms of a leaf: in the live state, and in a checkpoint.

A checkpoint stores only dtypes. A restored leaf also receives the weak type, sharding and
commitment of the live leaf, so that the step is not compiled again.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from healcore.jax.trees import Leaf, is_number


def to_live_leaf(new: Leaf, live: Leaf) -> Leaf:
    """Converts a restored leaf to the form of the live leaf: a number, or a donatable array.

    An array of another weak type or placement would compile the step again. An array that is not
    committed to the live devices would be moved at each step. The saved dtype is kept. It differs
    from the live dtype if a step after the save has widened the leaf.

    Args:
        new: the restored leaf.
        live: the leaf in its place in the live state.

    Returns:
        The leaf to put into the state.
    """
    dtype = getattr(new, "dtype", None)
    if is_number(live):
        if dtype in (None, to_saved_leaf(live).dtype):
            return type(live)(np.asarray(new).item())
        return jnp.asarray(new)
    if not isinstance(live, jax.Array):
        return new
    if jnp.issubdtype(live.dtype, jax.dtypes.prng_key):
        data = _put_like(jax.random.key_data(new), live)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(new))
    if not isinstance(new, jax.Array):
        new = np.asarray(new, dtype or live.dtype)
    new = _put_like(new, live)
    if not live.weak_type or new.weak_type:
        return new
    zero: float = 0
    if jnp.issubdtype(new.dtype, jnp.floating):
        zero = 0.0
    weak = jnp.full(new.shape, zero)
    if weak.dtype != new.dtype:  # JAX has no weak type of this dtype
        return new
    return weak.at[...].set(new)


def _put_like(new: Leaf, live: jax.Array) -> jax.Array:
    """Puts an array on the devices of the live array, with the same commitment."""
    if not live.committed and not (isinstance(new, jax.Array) and not new.committed):
        return jnp.asarray(np.asarray(new))  # only an array from the host is uncommitted
    is_there = isinstance(new, jax.Array) and new.committed == live.committed
    if is_there and new.sharding == live.sharding:
        return new
    return jax.device_put(new, live.sharding)


def to_saved_leaf(leaf: Leaf) -> Leaf:
    """Converts a Python number to an array for a checkpoint, as `jit` does.

    A TrainState's `step` is a number at the start and an array after the first compiled step, and
    both must have the same form. `ExactLeaves` keeps the number.

    Args:
        leaf: a leaf of the live state. Anything but a number is returned as it is.
    """
    if not is_number(leaf):
        return leaf
    zero = jnp.asarray(type(leaf)())
    if zero.dtype == jnp.bool_:
        return jnp.asarray(leaf)
    if type(leaf) is int:
        largest = jnp.iinfo(zero.dtype).max
    else:
        largest = float(jnp.finfo(zero.dtype).max)
    # An Inf, for instance by overflow, would make the checkpoint count as bad.
    if abs(leaf.real) <= largest and abs(leaf.imag) <= largest:
        return jnp.asarray(leaf)
    return zero
