"""`ArrayNamespace`: the array functions with which the core computes, `xp` in its signatures.

The core is written once and runs on arrays of NumPy, JAX and torch, and on the placeholders of
`tape`. So it imports no array library. Each function takes the namespace of its arrays as the
keyword `xp`, and writes ``xp.where(condition, a, b)`` where a NumPy program has ``np.where``.
Arithmetic and comparisons are the operators of the arrays.

A namespace implements the abstract methods. The other methods have a default, which is written with
the abstract ones. A namespace overrides a default where its library has a faster form with the same
bits, or where the default would not give the bits of NumPy (docs/parity.md).

    ====================================  ================================  ======================
    namespace                             arrays                            overrides
    ====================================  ================================  ======================
    `NUMPY`                               NumPy arrays                      no default
    `healcore.core.tape.Tape`             placeholders, which are recorded  `product`, `with_slot`
    `healcore.jax.array_namespace.JAX`    JAX arrays, traced or not         `flag`, `shared`
    `healcore.torch.array_namespace`      tensors of one device             all except `shared`
    (`Namespace`)                                                           and `with_slot`
    ====================================  ================================  ======================

The aliases of this file name the arrays in the core's signatures. They are aliases of `Any`, since
no static type covers the arrays of three libraries. A run of many policies or signals at once has
arrays with leading batch axes, which the shapes below leave out.
"""

from __future__ import annotations

import abc
import math
from types import ModuleType
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

PRODUCT_LIMIT = 1e38
"""Largest result of `ArrayNamespace.product`."""


class ArrayNamespace(abc.ABC):
    """The array functions of the core for the arrays of one library.

    All functions return new arrays, and have no branch on a value. Parameters are positional only,
    so that an implementation can be the function of a library itself.

    Examples:
        >>> import numpy as np
        >>> from healcore.core.array_namespace import NUMPY, ArrayNamespace, Float
        >>> def positive_part(x: Float, *, xp: ArrayNamespace) -> Float:
        ...     return xp.maximum(x, 0.0)
        >>> positive_part(np.array([-1, 2], np.float32), xp=NUMPY)
        array([0., 2.], dtype=float32)
    """

    float32: Any
    """The library's dtype float32."""
    int32: Any
    """The library's dtype int32."""

    # -- functions that each library has -----------------------------------------------------------

    @abc.abstractmethod
    def where(self, condition: Flag, x: Array | Number, y: Array | Number, /) -> Array:
        """Selects `x` where the condition holds, else `y`: the core's only branch on a value.

        Args:
            condition: bool, of any shape that broadcasts with the values.
            x: an array or a Python number.
            y: an array or a Python number. At most one of the two is a Python number, because the
                result of two would have a different dtype in each library.
        """

    @abc.abstractmethod
    def minimum(self, x: Array, y: Array | Number, /) -> Array:
        """The smaller of two values, element by element; NaN if one is NaN."""

    @abc.abstractmethod
    def maximum(self, x: Array, y: Array | Number, /) -> Array:
        """The larger of two values, element by element; NaN if one is NaN."""

    @abc.abstractmethod
    def clip(self, x: Array, low: float, high: float, /) -> Array:
        """`x` limited to the range from `low` to `high`; NaN stays NaN."""

    @abc.abstractmethod
    def abs(self, x: Array, /) -> Array:
        """The absolute value."""

    @abc.abstractmethod
    def sqrt(self, x: Float, /) -> Float:
        """The square root, correctly rounded."""

    @abc.abstractmethod
    def sum(self, x: Array, axis: int) -> Array:
        """The sum along an axis.

        Only for integers, and for floats of which at most one is not 0: each library adds in a
        different order. For other floats use `healcore.core.detectors.windows.folded`. A sum of
        int32 is int64 in some libraries, so it is compared, or converted before a state holds it.
        """

    @abc.abstractmethod
    def cumsum(self, x: Int, axis: int) -> Int:
        """The sums of the first 1, 2, ... elements along an axis, of integers."""

    @abc.abstractmethod
    def astype(self, x: Array, dtype: Any, /) -> Array:
        """The values as `xp.float32` or `xp.int32`."""

    @abc.abstractmethod
    def arange(self, n: int, /) -> Int:
        """0, 1, ... n - 1, to be compared; int64 in some libraries."""

    @abc.abstractmethod
    def asarray(self, x: np.ndarray, /) -> Array:
        """A constant table of the core, `healcore.core.clipping.EDGES`, as an array."""

    @abc.abstractmethod
    def reciprocal(self, count: Int, /) -> Float:
        """1 / count in float32, correctly rounded; infinite for 0."""

    # -- functions with a default ------------------------------------------------------------------

    def without_small(self, x: Float, limit: float, /) -> Float:
        """Replaces small values by +0, so that no subnormal reaches a state.

        Args:
            x: float32 of any shape; NaN stays NaN.
            limit: the largest absolute value that is replaced.
        """
        return self.where(self.abs(x) <= limit, 0.0, x)

    def product(self, x: Float | Number, y: Float, /) -> Float:
        """Multiplies and rounds to float32 before anything is added, for products below 1e38.

        A compiler may fuse ``x * y + z`` into one operation that rounds once. The minimum prevents
        this. Do not add a constant to the result: LLVM would move the addition into the minimum.

        Args:
            x: a float32 array, or a number of the policy.
            y: a float32 array.
        """
        return self.minimum(x * y, PRODUCT_LIMIT)

    def quotient(self, x: Float, y: Float | Number, /) -> Float:
        """Divides with correct rounding; `x` is a float32 array, `y` is not 0.

        An infinite `x` needs an array as `y`: the default divides it by a Python number to NaN.

        The divisor is brought to the dividend's shape, because XLA multiplies by the reciprocal of
        a broadcast divisor.
        """
        if isinstance(y, int | float):
            is_power_of_two = math.frexp(y)[0] == 0.5
            if is_power_of_two:
                return x * (1 / y)  # the reciprocal is exact
            y = x - x + y
        return x / self.where(x == x, y, 1.0)

    def flag(self, condition: Flag, flags: int, /) -> Int:
        """Gives `flags` where the condition holds, else 0.

        Not ``where(condition, flags, 0)``: two Python numbers would have a different dtype in each
        library.

        Args:
            condition: bool, of any shape.
            flags: bits of `Cause` or `Action`, a Python number.
        """
        bit = self.astype(condition, self.int32)
        if flags == 1:
            return bit
        return bit * int(flags)

    def never(self, like: Int, /) -> Flag:
        """Makes a flag that never holds.

        Args:
            like: an int32 array. The flag has its shape and its device, which a constant lacks.
        """
        return like != like

    def with_slot(self, values: Array, slot: Int, value: Array, /) -> Array:
        """Replaces one element of each ring, in a copy.

        Args:
            values: (..., n), the rings.
            slot: int (...), the index in the last axis.
            value: (...), the new element.
        """
        here = self.arange(values.shape[-1]) == slot[..., None]
        return self.where(here, value[..., None], values)

    def shared(self, x: Array, /) -> Array:
        """Marks a value on which many results depend: a bool, or an int32 from 0 to a million.

        The value stays as it is. Some compilers would otherwise compute it once for each result
        (`healcore.jax.array_namespace`).

        Args:
            x: the value.
        """
        return x


class LibraryNamespace(ArrayNamespace):
    """The functions of a library that has NumPy's names, such as NumPy itself.

    This is enough for right results, if the library rounds each operation by itself. A library that
    compiles has faster forms: compare `healcore.jax.array_namespace`.

    Args:
        library: a module with the functions of NumPy 2.
    """

    def __init__(self, library: ModuleType) -> None:
        self._library = library
        self.float32 = library.float32
        self.int32 = library.int32

    def where(self, condition: Flag, x: Array | Number, y: Array | Number, /) -> Array:
        """`numpy.where`."""
        return self._library.where(condition, x, y)

    def minimum(self, x: Array, y: Array | Number, /) -> Array:
        """`numpy.minimum`."""
        return self._library.minimum(x, y)

    def maximum(self, x: Array, y: Array | Number, /) -> Array:
        """`numpy.maximum`."""
        return self._library.maximum(x, y)

    def clip(self, x: Array, low: float, high: float, /) -> Array:
        """`numpy.clip`."""
        return self._library.clip(x, low, high)

    def abs(self, x: Array, /) -> Array:
        """`numpy.abs`."""
        return self._library.abs(x)

    def sqrt(self, x: Float, /) -> Float:
        """`numpy.sqrt`."""
        return self._library.sqrt(x)

    def sum(self, x: Array, axis: int) -> Array:
        """`numpy.sum`."""
        return self._library.sum(x, axis=axis)

    def cumsum(self, x: Int, axis: int) -> Int:
        """`numpy.cumsum`."""
        return self._library.cumsum(x, axis=axis)

    def astype(self, x: Array, dtype: Any, /) -> Array:
        """`numpy.astype`."""
        return self._library.astype(x, dtype)

    def arange(self, n: int, /) -> Int:
        """`numpy.arange`."""
        return self._library.arange(n)

    def asarray(self, x: np.ndarray, /) -> Array:
        """`numpy.asarray`."""
        return self._library.asarray(x)

    def reciprocal(self, count: Int, /) -> Float:
        """`numpy.reciprocal` of the count as float32."""
        return self._library.reciprocal(self.astype(count, self.float32))


NUMPY = LibraryNamespace(np)
"""The namespace of NumPy arrays.

NumPy warns of invalid values that a `where` discards later. `Engine.step` ignores these warnings;
callers of other functions need ``np.errstate(all="ignore")``.
"""


def as_namespace(xp: ArrayNamespace | ModuleType) -> ArrayNamespace:
    """Accepts a module such as `numpy` where a namespace is needed.

    Args:
        xp: a namespace, which is returned unchanged, or a module with the functions of NumPy 2.

    Returns:
        The namespace: ``as_namespace(np) is NUMPY``.
    """
    if not isinstance(xp, ModuleType):
        return xp
    if xp is np:
        return NUMPY
    return LibraryNamespace(xp)
