"""Float32 arithmetic that gives the same bits in NumPy, XLA and torch: docs/parity.md.

* XLA on a CPU contracts ``a * b + c`` into a fused multiply-add, but not through a ``select`` whose
  condition LLVM cannot prove: `product`. (LLVM moves the addition of a constant into a select, and
  takes a common factor out of ``where(c, a * b, b * b)``.) Of two constant factors XLA makes one.
* XLA multiplies by the reciprocal of a constant or broadcast divisor, and so does torch for
  ``scalar / tensor``: divide by `quotient`, and never by, or into, a Python number.
* XLA flushes subnormals to zero, NumPy and torch keep them: signals below `TINY` and state below
  `FLUSH` are made zero.
* ``where`` between two Python numbers has another dtype in each backend: one side is an array.
* torch's CPU ``sqrt`` is one ulp off in a fifth of all cases: comparisons square instead, and where
  a root is needed the torch namespace rounds it correctly.
"""

from __future__ import annotations

from typing import Any

TINY = 1e-12  # a smaller signal is zero to the core, so that its square is no subnormal

FLUSH = 1e-30  # smaller state is made zero: far above the subnormals that XLA flushes

HUGE = 1e15  # a norm or loss above this counts as overflowed: squares stay finite in float32

_LARGEST = 1e38


def settle(x: Any, *, xp: Any) -> Any:
    """Makes what is nearly zero exactly zero, so that no backend keeps a subnormal."""
    return xp.where(xp.abs(x) < FLUSH, 0.0, x)


def product(a: Any, b: Any, *, xp: Any) -> Any:
    """`a * b` rounded to float32 separately, in every backend, for products below 1e38.

    Add no constant to it: LLVM would move that addition into the select.
    """
    result = a * b
    return xp.where(result < _LARGEST, result, _LARGEST)


def quotient(a: Any, b: Any, *, xp: Any) -> Any:
    """`a / b`, correctly rounded in every backend; `a` is a float32 array, `b` not 0.

    The divisor takes the dividend's shape, since XLA multiplies by the reciprocal of a broadcast
    one.
    """
    return a / xp.where(a == a, b, 1.0)


def complement(decay: Any, like: Any) -> Any:
    """`1 - decay` in float32, equal for a Python number and an array of the shape of `like`."""
    return (like - like + 1.0) - decay


def bounded(x: Any, ok: Any, *, xp: Any) -> Any:
    """`x` cut to TINY <= |x| <= HUGE or 0, and 0 where `ok` is false (it may be NaN)."""
    x = xp.where(ok, x, 0.0)
    x = xp.where(x > HUGE, HUGE, x)
    x = xp.where(x < -HUGE, -HUGE, x)
    return xp.where(xp.abs(x) < TINY, 0.0, x)


def larger(a: Any, b: Any, *, xp: Any) -> Any:
    """Elementwise maximum; either side may be a Python number (torch.maximum takes none)."""
    return xp.where(a > b, a, b)


def smaller(a: Any, b: Any, *, xp: Any) -> Any:
    """Elementwise minimum; either side may be a Python number."""
    return xp.where(a < b, a, b)


def ema(mean: Any, value: Any, rate: Any, learn: Any, *, xp: Any) -> Any:
    """One step of a moving average; where `learn` is false it stays, and `value` may be NaN."""
    step = product(rate, value - mean, xp=xp)
    return settle(mean + xp.where(learn, step, 0.0), xp=xp)


def shared(x: Any, *, xp: Any) -> Any:
    """`x` itself: a bool, or an int32 from 0 to a million, that many results depend on.

    For a compiler that would compute it again for each of them (`healcore.jax.namespace`).
    """
    return xp.shared(x) if hasattr(xp, "shared") else x


def as_float(count: Any, *, xp: Any) -> Any:
    """An int32 counter as float32 (exact below 2**24)."""
    return xp.astype(count, xp.float32)


def sub_one(count: Any, *, xp: Any) -> Any:
    """Counts an int32 down, never below zero."""
    return xp.where(count > 0, count - 1, 0)
