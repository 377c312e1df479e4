"""The float32 arithmetic of the core.

It gives the same bits in NumPy, XLA and torch (docs/parity.md), if the core follows these rules.
The functions are those of `healcore.core.array_namespace.xp`.

* XLA on a CPU contracts ``a * b + c`` into a fused multiply-add, except through a ``select``
  whose condition LLVM cannot prove: use `xp.product`. LLVM moves the addition of a constant into
  a select, and factors ``where(c, a * b, b * b)``. XLA merges two constant factors.
* XLA multiplies by the reciprocal of a constant or broadcast divisor, and so does torch for
  ``scalar / tensor``. Divide by `xp.quotient`, never by, or into, a Python number.
* XLA flushes subnormals to zero; NumPy and torch keep them. Signals below `TINY` and state
  below `FLUSH` are therefore set to zero.
* ``where`` between two Python numbers has a different dtype in each backend: pass an array.
* A constant in the shape of an array is made of the array: `zero_like`, `one_like`, and
  ``flag & False``.
* torch's CPU ``sqrt`` may be one ulp off. Comparisons square instead, and the torch namespace
  rounds a root correctly.
"""

from __future__ import annotations

from typing import Any

import numpy as np

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


def zero_like(x: Any) -> Any:
    """A zero with the shape and dtype of a finite array, in every backend."""
    return x - x


def one_like(x: Any) -> Any:
    """A one with the shape of a finite float array, in every backend."""
    return zero_like(x) + 1.0


def complement(decay: Any, like: Any) -> Any:
    """Computes `1 - decay` in float32, the same for a Python number and an array.

    Args:
        decay: a number of the policy.
        like: a finite float32 array, whose shape the result has.
    """
    return one_like(like) - decay
