"""The float32 arithmetic of the core.

It gives the same bits in NumPy, XLA and torch (docs/parity.md), if the core follows these rules.
The namespace `xp` is an `ArrayNamespace`.

* XLA on a CPU contracts ``a * b + c`` into a fused multiply-add, except through a ``select``
  whose condition LLVM cannot prove: use `xp.product`. LLVM moves the addition of a constant into
  a select, and factors ``where(c, a * b, b * b)``. XLA merges two constant factors.
* XLA multiplies by the reciprocal of a constant or broadcast divisor, and so does torch for
  ``scalar / tensor``. Divide by `xp.quotient`, never by, or into, a Python number.
* XLA flushes subnormals to zero; NumPy and torch keep them. Signals below `TINY` and state
  below `FLUSH` are therefore set to zero.
* ``where`` between two Python numbers has a different dtype in each backend: pass an array.
* A constant in the shape of an array is made of the array: `zero_like`, `one_like`, `false_like`,
  `true_like`.
* torch's CPU ``sqrt`` may be one ulp off. Comparisons square instead, and the torch namespace
  rounds a root correctly.
"""

from __future__ import annotations

import numpy as np

from healcore.core.array_namespace import Array, ArrayNamespace, Flag, Float, Int, Number

TINY = 1e-12
"""Signals below this number become 0, so that no square is subnormal."""

FLUSH = 1e-30
"""Numbers of a state below this one become 0. It is far above the subnormals that XLA flushes."""

SIGNAL_LIMIT = 1e15
"""Limit of norms and losses for detectors, so that squares stay finite."""

FLOAT32_MAX = float(np.finfo(np.float32).max)


def shortest_decimal(number: np.generic) -> float:
    """The decimal number with the fewest digits that rounds to a number: 0.1 for float32(0.1).

    The core has every number of a policy in float32. A framework that clips float64 gradients
    computes with the number that the user has written, and a report prints it.

    Args:
        number: a number of NumPy, whose dtype says how a decimal number is rounded.
    """
    return float(str(number))


def zero_like(x: Array) -> Array:
    """A zero with the shape and dtype of a finite array, in every backend."""
    return x - x


def one_like(x: Float) -> Float:
    """A one with the shape of a finite float array, in every backend."""
    return zero_like(x) + 1.0


def false_like(like: Flag) -> Flag:
    """False in the shape of a flag."""
    return like & False


def true_like(like: Flag) -> Flag:
    """True in the shape of a flag."""
    return like | True


def and_not(a: Flag, b: Flag) -> Flag:
    """`a & ~b` for two bools, in one operation."""
    return a > b


def flush(x: Float, *, xp: ArrayNamespace) -> Float:
    """Replaces values of at most `FLUSH` by +0, so that no backend keeps a subnormal.

    Every float of a state passes through here, before it is stored. XLA flushes subnormals to zero
    and NumPy keeps them, so two frameworks would otherwise drift apart.
    """
    return xp.without_small(x, FLUSH)


def plus_one(number: Number) -> Number:
    """Computes `1 + number` in float32.

    Args:
        number: a Python number, or a float32 array in a sweep of policies. Python would add the
            number in float64, and a sweep would then judge otherwise than a single policy.
    """
    if isinstance(number, int | float):
        return float(np.float32(1.0) + np.float32(number))
    return 1.0 + number


def complement(decay: Number, like: Float) -> Float:
    """Computes `1 - decay` in float32, the same for a Python number and an array.

    Args:
        decay: a number of the policy.
        like: a finite float32 array, whose shape the result has.
    """
    return one_like(like) - decay


def sanitized(
    x: Float, low: float, high: float, other: Float | Number = 0.0, *, xp: ArrayNamespace
) -> tuple[Float, Flag]:
    """Makes a signal safe for arithmetic, and finds out whether it is bad.

    Args:
        x: the signal, float32 of any shape.
        low: the smallest value that is not bad.
        high: the largest value that is not bad.
        other: replaces bad values.
        xp: the array namespace.

    Returns:
        `x` limited to `SIGNAL_LIMIT`, where values of at most `TINY` are 0; and a bool array of its
        shape: the value is bad, which is NaN or outside of the range.
    """
    bad = xp.clip(x, low, high) != x
    x = xp.clip(xp.where(bad, other, x), -SIGNAL_LIMIT, SIGNAL_LIMIT)
    return xp.without_small(x, TINY), bad


def ema(mean: Float, value: Float, rate: Float, learn: Flag, *, xp: ArrayNamespace) -> Float:
    """One step of a moving average: ``mean + rate * (value - mean)`` where `learn` holds.

    Args:
        mean: the average so far, float32.
        value: the new value, which may be NaN where `learn` is false.
        rate: weight of the new value, from 0 to 1.
        learn: whether the value counts. Elsewhere the average stays the same.
        xp: the array namespace.
    """
    step = xp.product(rate, value - mean)
    return flush(mean + xp.where(learn, step, 0.0), xp=xp)


def as_float(count: Int, *, xp: ArrayNamespace) -> Float:
    """Converts an int32 counter to float32; exact below 2**24."""
    return xp.astype(count, xp.float32)


def decremented(count: Int, *, xp: ArrayNamespace) -> Int:
    """Decrements an int32, but not below zero."""
    return xp.maximum(count - 1, 0)


def streak(
    before: Int, hit: Flag, learn: Flag, restart: Flag, limit: Number, *, xp: ArrayNamespace
) -> Int:
    """Counts hits in a row.

    Args:
        before: hits in a row before this step.
        hit: this step is a hit.
        learn: this step counts. Otherwise it changes nothing, except by `restart`.
        restart: forget the earlier hits first.
        limit: the count does not grow above this number, so that it cannot overflow.
        xp: the array namespace.
    """
    before = xp.where(restart, 0, before)
    longer = xp.where(before < limit, before + 1, before)
    return xp.where(learn, xp.where(hit, longer, 0), before)
