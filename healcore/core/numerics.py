"""Arrays of the core: float32 arithmetic, and states as trees (NamedTuples, tuples, arrays, None).

The arithmetic gives the same bits in NumPy, XLA and torch: docs/parity.md.

* XLA on a CPU contracts ``a * b + c`` into a fused multiply-add, except through a ``select``
  whose condition LLVM cannot prove: use `product`. LLVM moves the addition of a constant into
  a select, and factors ``where(c, a * b, b * b)``. XLA merges two constant factors.
* XLA multiplies by the reciprocal of a constant or broadcast divisor, and so does torch for
  ``scalar / tensor``. Divide by `quotient`, never by, or into, a Python number.
* XLA flushes subnormals to zero; NumPy and torch keep them. Signals below `TINY` and state
  below `FLUSH` are therefore set to zero.
* ``where`` between two Python numbers has a different dtype in each backend: pass an array.
* ``x - x`` is a zero with the shape and dtype of a finite array ``x``, in every backend.
* torch's CPU ``sqrt`` may be one ulp off. Comparisons square instead, and the torch namespace
  rounds a root correctly.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import numpy as np

TINY = 1e-12  # smaller signals become 0, so that no square is subnormal

FLUSH = 1e-30  # smaller state becomes 0; far above the subnormals that XLA flushes

SIGNAL_LIMIT = 1e15  # limit of norms and losses for detectors, so that squares stay finite

FLOAT32_MAX = float(np.finfo(np.float32).max)

PRODUCT_LIMIT = 1e38


def as_written(number: float) -> float:
    """The shortest decimal number that rounds to the same float32: 0.1 for float32(0.1).

    The core has every number of a policy in float32. A framework that clips float64 gradients
    computes with the number that the user has written.
    """
    return float(str(np.float32(number)))


def and_not(a: Any, b: Any) -> Any:
    """`a & ~b` for two bools, in one operation."""
    return a > b


def flush(x: Any, *, xp: Any) -> Any:
    """Replaces values below `FLUSH` by zero, so that no backend keeps a subnormal."""
    return _without_small(x, FLUSH, xp=xp)


def _without_small(x: Any, limit: float, *, xp: Any) -> Any:
    """Replaces values of at most `limit`, in absolute value, by +0."""
    if hasattr(xp, "without_small"):
        return xp.without_small(x, limit)
    return xp.where(xp.abs(x) <= limit, 0.0, x)


def product(a: Any, b: Any, *, xp: Any) -> Any:
    """Multiplies and rounds to float32 separately in every backend, for products below 1e38.

    Do not add a constant to the result: LLVM would move the addition into the minimum.
    """
    if hasattr(xp, "rounded_product"):
        return xp.rounded_product(a, b)
    return xp.minimum(a * b, PRODUCT_LIMIT)


def quotient(a: Any, b: Any, *, xp: Any) -> Any:
    """Divides with correct rounding in every backend; `a` is a float32 array, `b` is not 0.

    The divisor is brought to the dividend's shape, because XLA multiplies by the reciprocal of a
    broadcast divisor.
    """
    if hasattr(xp, "quotient"):
        return xp.quotient(a, b)
    if isinstance(b, int | float):
        if math.frexp(b)[0] == 0.5:
            return a * (1 / b)  # a power of two: exact
        b = a - a + b
    return a / xp.where(a == a, b, 1.0)


def plus_one(number: Any) -> Any:
    """`1 + number` in float32, the same for a Python number and a float32 array."""
    if isinstance(number, int | float):
        return float(np.float32(1.0) + np.float32(number))
    return 1.0 + number


def complement(decay: Any, like: Any) -> Any:
    """`1 - decay` in float32, the same for a Python number and an array shaped as `like`."""
    return (like - like + 1.0) - decay


def sanitized(x: Any, low: float, high: float, other: Any = 0.0, *, xp: Any) -> tuple[Any, Any]:
    """`x` limited to SIGNAL_LIMIT, and whether `x` is bad: NaN or not from `low` to `high`.

    Values below TINY become 0; `other` replaces bad values.
    """
    bad = xp.clip(x, low, high) != x
    x = xp.clip(xp.where(bad, other, x), -SIGNAL_LIMIT, SIGNAL_LIMIT)
    return _without_small(x, TINY, xp=xp), bad


def ema(mean: Any, value: Any, rate: Any, learn: Any, *, xp: Any) -> Any:
    """One step of a moving average; `value` may be NaN where `learn` is false."""
    step = product(rate, value - mean, xp=xp)
    return flush(mean + xp.where(learn, step, 0.0), xp=xp)


def shared(x: Any, *, xp: Any) -> Any:
    """Marks a value on which many results depend: a bool, or an int32 from 0 to a million.

    Some compilers would otherwise compute the value once per result (`healcore.jax.namespace`).
    """
    return xp.shared(x) if hasattr(xp, "shared") else x


def with_slot(values: Any, slot: Any, value: Any, *, xp: Any) -> Any:
    """`values` (..., n) with `value` (...) at index `slot` (...) of the last axis."""
    if hasattr(xp, "with_slot"):
        return xp.with_slot(values, slot, value)
    here = xp.arange(values.shape[-1]) == slot[..., None]
    return xp.where(here, value[..., None], values)


def as_float(count: Any, *, xp: Any) -> Any:
    """Converts an int32 counter to float32; exact below 2**24."""
    return xp.astype(count, xp.float32)


def flag(condition: Any, flags: int, *, xp: Any) -> Any:
    """`flags` as int32 where `condition` holds, else 0.

    Not `where(condition, flags, 0)`: each backend chooses another dtype for two Python numbers.
    """
    if hasattr(xp, "flag"):
        return xp.flag(condition, int(flags))
    bit = xp.astype(condition, xp.int32)
    return bit if flags == 1 else bit * int(flags)


def decremented(count: Any, *, xp: Any) -> Any:
    """Decrements an int32, but not below zero."""
    return xp.maximum(count - 1, 0)


def streak(run: Any, hit: Any, learn: Any, restart: Any, most: Any, *, xp: Any) -> Any:
    """Counts hits in a row, at most `most`, int32; a step changes nothing where not `learn`."""
    run = xp.where(restart, 0, run)
    longer = xp.where(run < most, run + 1, run)
    return xp.where(learn, xp.where(hit, longer, 0), run)


# -- trees of arrays -------------------------------------------------------------------------------

State = TypeVar("State")

# Kinds of the fields of a state, see `zeros`. The arrays are of NumPy, JAX or torch.
Float = Annotated[Any, np.float32]
Int = Annotated[Any, np.int32]
Flag = Annotated[Any, np.bool_]


def zeros(kind: type[State], shape: tuple[int, ...] = ()) -> State:
    """A state of zeros in NumPy; its fields are `Float`, `Int`, `Flag` or other states."""
    return kind(
        *(
            np.zeros(shape, hint.__metadata__[0]) if get_origin(hint) else zeros(hint, shape)
            for hint in _hints(kind)
        )
    )


@functools.cache
def _hints(kind: type) -> tuple[Any, ...]:
    return tuple(get_type_hints(kind, include_extras=True).values())


def zero_init(kind: type[State]) -> Callable[..., State]:
    """Makes a method `init` that returns `zeros(kind)`."""

    def init(self: Any, *, groups: int = 0) -> State:
        """The state before the first step."""
        del self, groups
        return zeros(kind)

    return init


def map_leaves(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Applies `fn` to each array of `tree` and the matching arrays of `rest`; keeps None."""
    if tree is None:
        return None
    if isinstance(tree, tuple):
        mapped = [map_leaves(fn, *parts) for parts in zip(tree, *rest, strict=True)]
        return type(tree)(*mapped) if hasattr(tree, "_fields") else tuple(mapped)
    return fn(tree, *rest)


def leaves(tree: Any) -> list[Any]:
    """The arrays of `tree`, depth first."""
    if tree is None:
        return []
    if isinstance(tree, tuple):
        return [leaf for part in tree for leaf in leaves(part)]
    return [tree]


def select(condition: Any, if_true: Any, if_false: Any, *, xp: Any) -> Any:
    """`xp.where(...)`, whose `if_false` may have more trailing axes than `condition`."""
    if if_true is if_false:
        return if_false
    trailing = (None,) * (if_false.ndim - condition.ndim)
    return xp.where(condition[(..., *trailing)] if trailing else condition, if_true, if_false)
