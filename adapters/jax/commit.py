"""`commit`: keeps the old train state on a skip: parameters, batch statistics, EMA, and so on."""

from __future__ import annotations

from typing import Any, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np

from healcore.core.errors import HealcoreError

State = TypeVar("State")


class CommitError(HealcoreError, TypeError):
    """Two train states that cannot be selected between, leaf by leaf."""


def commit(skip: chex.Array, old: State, new: State) -> State:
    """Returns `old` where `skip`, else `new`: the train state as one transaction.

    Skipping the optimizer step alone keeps what the bad batch wrote in the forward pass (BatchNorm
    statistics, EMA weights, accumulators); `commit` reverts all of it. Leave the healing state out
    of it: a counter of skips that is itself reverted never counts.

    Args:
        skip: bool, 0-d, usually ``decision.skip``.
        old: any pytree of arrays (typed PRNG keys too).
        new: a tree of the same structure, shapes and dtypes.

    Returns:
        A tree like `new`, bit for bit one of the two, including -0.0, subnormals and NaN payloads.

    Raises:
        CommitError: structure, shape or dtype differ; the message names the leaf.

    Example:
        >>> import jax.numpy as jnp
        >>> commit(jnp.bool_(True), {"mean": jnp.zeros(2)}, {"mean": jnp.full(2, jnp.nan)})
        {'mean': Array([0., 0.], dtype=float32)}
    """
    old_structure, new_structure = jax.tree.structure(old), jax.tree.structure(new)
    if old_structure != new_structure:
        raise CommitError(
            "commit() needs two train states of one structure, got\n"
            f"  old: {old_structure}\n  new: {new_structure}\n"
            "pass the same part of the state before and after the step"
        )
    check_skip(skip)
    return jax.tree_util.tree_map_with_path(
        lambda path, before, after: select(skip, before, after, name=jax.tree_util.keystr(path)),
        old,
        new,
    )


def select(skip: chex.Array, old: Any, new: Any, *, name: str = "leaf") -> Any:
    """One leaf of `commit`.

    Args:
        skip: bool, 0-d.
        old: array, PRNG key or number.
        new: the same shape and dtype.
        name: of the leaf, for an error.

    Raises:
        CommitError: the two differ in shape or dtype, or are not arrays and not equal.
    """
    if old is new or _is_float0(old):
        return new
    try:
        old, new = jnp.asarray(old), jnp.asarray(new)
    except TypeError as error:
        if old == new:
            return new
        raise CommitError(
            f"{name} is a {type(new).__name__} that the step has changed: it cannot be selected "
            "on the device. Make it an array, or keep it out of the train state"
        ) from error
    if old.shape != new.shape or old.dtype != new.dtype:
        raise CommitError(
            f"{name} was {_type(old)} and became {_type(new)}: a step must keep the shapes and "
            f"dtypes of its state. Write {name} = new.astype({old.dtype}) in the step"
        )
    bits = _SMALL_FLOATS.get(_width(old.dtype))
    if bits is None:
        return jnp.where(skip, old, new)
    # XLA on a CPU selects bfloat16 through float32, where every NaN becomes the same NaN: 252 of
    # 65536 bit patterns changed (measured). As integers they do not change.
    as_bits = jax.lax.bitcast_convert_type
    chosen = jnp.where(skip, as_bits(old, bits), as_bits(new, bits))
    return as_bits(chosen, old.dtype)


def check_skip(skip: Any) -> None:
    """Raises CommitError unless `skip` is one boolean."""
    if jnp.shape(skip) != () or jnp.result_type(skip) != jnp.bool_:
        raise CommitError(
            f"skip must be one bool, got {jnp.result_type(skip)}{jnp.shape(skip)}: pass "
            "decision.skip, as in commit(last_decision(opt_state).skip, old, new)"
        )


_SMALL_FLOATS = {8: jnp.uint8, 16: jnp.uint16}


def _width(dtype: Any) -> int:
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else 0


def _is_float0(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.dtype == jax.dtypes.float0


def _type(array: Any) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"
