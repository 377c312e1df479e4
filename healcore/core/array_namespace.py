"""`xp`: the array functions with which the core computes, of the library of their operands.

The core is written once and runs on arrays of NumPy, JAX and torch, and on the placeholders of
`tape`. So it imports no array library. It writes ``xp.where(condition, a, b)`` where a NumPy
program has ``np.where``. Arithmetic, comparisons and `abs` are the operators of the arrays.

An `ArrayNamespace` is a library with NumPy's names, and the few functions that give the same bits
in each library (docs/parity.md). A subclass replaces what its library has in another or a faster
form, and `register` says for which arrays it computes:

    ====================================  ================================  ======================
    namespace                             arrays                            replaces
    ====================================  ================================  ======================
    `NUMPY`                               NumPy arrays                      nothing
    `healcore.core.tape.Tape`             placeholders, which are recorded  selections, conversions
    `healcore.jax.compilation.JAX`        JAX arrays, traced or not         `where`, `shared`, ...
    `healcore.torch.array_namespace`      tensors                           what torch lacks, or
    (`TORCH`)                                                               rounds otherwise
    ====================================  ================================  ======================

The aliases of this file name the arrays in the core's signatures. They are aliases of `Any`, since
no static type covers the arrays of three libraries. A run of many policies or signals at once has
arrays with leading batch axes, which the shapes below leave out.

The arithmetic gives the same bits in NumPy, XLA and torch (docs/parity.md), if the core follows
these rules:

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

from collections.abc import Callable
from typing import Annotated, Any

import numpy as np

Array = Any
"""An array of the namespace, of any dtype and shape."""
Float = Annotated[Any, np.float32]
"""A float32 array, 0-d unless a comment gives its shape."""
Int = Annotated[Any, np.int32]
"""An int32 array, 0-d unless a comment gives its shape."""
Flag = Annotated[Any, np.bool_]
"""A bool array, 0-d unless a comment gives its shape."""
Norms = Annotated[Any, np.float32]
"""A float32 array (n,): one number for each of the n tensors with a gradient."""
Number = Any
"""A number of a policy or a constant: a Python number, or a 0-d array in a sweep of policies."""

TINY = 1e-12
"""Signals below this number become 0, so that no square is subnormal."""

FLUSH = 1e-30
"""Numbers of a state below this one become 0. It is far above the subnormals that XLA flushes."""

SIGNAL_LIMIT = 1e15
"""Limit of norms and losses for detectors, so that squares stay finite."""

FLOAT32_MAX = float(np.finfo(np.float32).max)

PRODUCT_LIMIT = 1e38
"""Largest result of `ArrayNamespace.product`."""


class ArrayNamespace:
    """The array functions of the core for the arrays of one library.

    All functions return new arrays, and have no branch on a value. These are the library's own,
    with NumPy's names and positional arguments:

        where(condition, x, y)   the core's only branch on a value. At most one of `x` and `y` is a
                                 Python number: the dtype of two would differ between libraries.
        minimum(x, y), maximum(x, y), sqrt(x)
        cumsum(x, axis), sum(x, axis)   of integers, and of floats of which at most one is not 0:
                                 each library adds in another order. For other floats use
                                 `healcore.core.detectors.windows.folded`. A sum of int32 is int64
                                 in some libraries: compare it, or convert it for a state.

    Args:
        library: a module with the functions of NumPy 2.

    Examples:
        >>> import numpy as np
        >>> from healcore.core.array_namespace import Float, xp
        >>> def positive_part(x: Float) -> Float:
        ...     return xp.maximum(x, 0.0)
        >>> positive_part(np.array([-1, 2], np.float32))
        array([0., 2.], dtype=float32)
    """

    def __init__(self, library: Any) -> None:
        self.library = library

    def __getattr__(self, name: str) -> Any:
        """A function of the library."""
        return getattr(self.library, name)

    def places(self, values: Array, /) -> Int:
        """Counts 0, 1, ... along the last axis of an array."""
        return self.library.arange(values.shape[-1])

    def table(self, numbers: np.ndarray, like: Array, /) -> Array:
        """Makes an array of constants, in the library and on the device of `like`."""
        del like
        return self.library.asarray(numbers)

    def as_float(self, x: Array, /) -> Float:
        """The values as float32; exact for counts below 2**24."""
        return x.astype(np.float32)

    def as_int(self, x: Array, /) -> Int:
        """The values as int32."""
        return x.astype(np.int32)

    def clip(self, x: Array, low: float, high: float, /) -> Array:
        """`x` limited to the range from `low` to `high`; NaN stays NaN."""
        return self.maximum(self.minimum(x, high), low)

    def flush(self, x: Float, limit: float = FLUSH, /) -> Float:
        """Replaces small values by +0, so that no backend keeps a subnormal.

        Every float of a state passes through here, before it is stored. XLA flushes subnormals to
        zero and NumPy keeps them, so two frameworks would otherwise drift apart.

        Args:
            x: float32 of any shape; NaN stays NaN.
            limit: the largest absolute value that is replaced.
        """
        return self.where(abs(x) <= limit, 0.0, x)

    def product(self, x: Float | Number, y: Float, /) -> Float:
        """Multiplies and rounds to float32 before anything is added, for products below 1e38.

        A compiler may fuse ``x * y + z`` into one operation that rounds once. The minimum prevents
        this. Do not add a constant to the result: LLVM would move the addition into the minimum.

        Args:
            x: a float32 array, or a number of the policy.
            y: a float32 array.
        """
        return self.minimum(x * y, PRODUCT_LIMIT)

    def quotient(self, x: Float, y: Float, /) -> Float:
        """Divides with correct rounding; `y` is an array without 0.

        The divisor is brought to the dividend's shape, because XLA multiplies by the reciprocal of
        a broadcast divisor.
        """
        return x / self.where(x == x, y, 1.0)

    def flag(self, condition: Flag, flags: int, /) -> Int:
        """Gives `flags` where the condition holds, else 0.

        Not ``where(condition, flags, 0)``: two Python numbers would have a different dtype in each
        library.

        Args:
            condition: bool, of any shape.
            flags: bits of `Cause` or `Action`, a Python number.
        """
        return self.as_int(condition) * int(flags)

    def with_slot(self, values: Array, slot: Int, value: Array, /) -> Array:
        """Replaces one element of each ring, in a copy.

        Args:
            values: (..., n), the rings.
            slot: int (...), the index in the last axis.
            value: (...), the new element.
        """
        here = self.places(values) == slot[..., None]
        return self.where(here, value[..., None], values)

    def shared(self, x: Array, /) -> Array:
        """Marks a value on which many results depend: a bool, or an int32 from 0 to a million.

        The value stays as it is. Some compilers would otherwise compute it once for each result
        (`healcore.jax.compilation`).
        """
        return x

    def ema(self, mean: Float, value: Float, rate: Float, learn: Flag, /) -> Float:
        """One step of a moving average: ``mean + rate * (value - mean)`` where `learn` holds.

        Args:
            mean: the average so far, float32.
            value: the new value, which may be NaN where `learn` is false.
            rate: weight of the new value, from 0 to 1.
            learn: whether the value counts. Elsewhere the average stays the same.
        """
        step = self.product(rate, value - mean)
        return self.flush(mean + self.where(learn, step, 0.0))

    def decremented(self, count: Int, /) -> Int:
        """Decrements an int32, but not below zero."""
        return self.maximum(count - 1, 0)

    def streak(self, before: Int, hit: Flag, learn: Flag, restart: Flag, /) -> Int:
        """Counts hits in a row.

        Args:
            before: hits in a row before this step.
            hit: this step is a hit.
            learn: this step counts. Otherwise it changes nothing, except by `restart`.
            restart: forget the earlier hits first.
        """
        before = self.where(restart, 0, before)
        return self.where(learn, self.where(hit, before + 1, 0), before)


NUMPY = ArrayNamespace(np)
"""The namespace of NumPy arrays.

NumPy warns of invalid values that a `where` discards later. `Engine.step` ignores these warnings;
callers of other functions need ``np.errstate(all="ignore")``.
"""

_namespaces: dict[type, Callable[[Any], ArrayNamespace]] = {}
"""The function that returns the namespace of an array, by the class of the array: the registered
classes, and each class of an operand so far."""


def register(kind: type, namespace_of: Callable[[Any], ArrayNamespace]) -> None:
    """Says which namespace computes with the arrays of a library.

    Args:
        kind: the class of the arrays.
        namespace_of: returns the namespace of an array.
    """
    _namespaces[kind] = namespace_of


def _namespace(operands: tuple[Any, ...]) -> ArrayNamespace:
    """The namespace of the first operand that is neither of NumPy nor a Python number.

    Constants of NumPy may be mixed with the arrays of every library.
    """
    for each in operands:
        if type(each) not in _namespaces:
            bases = [base for base in _namespaces if isinstance(each, base)]
            if bases:
                _namespaces[type(each)] = _namespaces[bases[0]]
            else:
                _namespaces[type(each)] = lambda array: NUMPY
        namespace = _namespaces[type(each)](each)
        if namespace is not NUMPY:
            return namespace
    return NUMPY


class _NamespaceOfOperands:
    """Each function is the one of the operands' namespace."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*operands: Any) -> Any:
            return getattr(_namespace(operands), name)(*operands)

        setattr(self, name, call)
        return call


xp: Any = _NamespaceOfOperands()
"""The functions of `ArrayNamespace`, for the arrays of every registered library."""


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
