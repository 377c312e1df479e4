"""Records the engine's step as one straight Python function, for NumPy scalars.

On the host the engine judges one step at a time, on single numbers. With NumPy most of that time is
overhead: the calls of the core's functions, and `numpy.where`, which takes a microsecond on two
scalars. The engine has no branch on a value, so its operations are the same for all numbers. They
are recorded once, written as the source of a Python function, and compiled. A selection is then a
conditional expression of Python. Values and dtypes equal NumPy's, in a twentieth of the time
(docs/decisions/0039).

How it works: `to_program` calls the function once with a placeholder, a `RecordedValue`, for each
number of its arguments. Each operator on a placeholder, and each function of `xp` with one, adds a
line and returns a new placeholder. A placeholder also holds the `sample` that
NumPy computes from the example arguments, for its dtype and shape only.

    def judged(state, norm):                        # what the core has
        mean, unused = state
        over = norm > 2.0 * mean
        return (xp.where(over, mean, norm), unused), xp.flag(over, 4)

    def program(tree0, tree1):                      # what is recorded
        [v0, _] = tree0
        v1 = tree1
        v2 = c0 * v0                                # c0 is np.float32(2)
        v3 = v1 > v2
        v4 = v0 if v3 else v1
        v5 = c1 if v3 else c2                       # c1 and c2 are np.int32(1) and np.int32(0)
        v6 = v5 * c3                                # c3 is np.int32(4)
        return ((v4, c4, ), v6, )                   # c4 is None
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from healcore.core.array_namespace import ArrayNamespace, register
from healcore.core.trees import map_leaves

Operand: TypeAlias = Any
"""An operand of a recorded operation: a `RecordedValue`, or a number or array that is constant."""


class NotRecordable(TypeError):
    """The recorded function branches on a value.

    A record has one path of operations. An `if` on a value would record only the path of the first
    step, and later steps would be judged wrongly. Write `xp.where` instead.
    """


def to_program(function: Callable[..., Any], *trees: Any) -> Callable[..., Any]:
    """Records ``function(*trees)`` and returns a faster function with the same results.

    Args:
        function: a pure function without branches on a value, such as `Engine.step`.
        trees: examples of its arguments: nested NamedTuples, tuples and None with NumPy scalars and
            arrays. Later calls must have the same structure, dtypes and shapes, which the program
            does not check.

    Returns:
        A function of trees like these. A call needs ``np.errstate(all="ignore")``.

    Raises:
        NotRecordable: the function branches on a value.

    Examples:
        >>> import numpy as np
        >>> from healcore.core.array_namespace import xp
        >>> def larger(pair):
        ...     return xp.where(pair[0] > pair[1], pair[0], pair[1])
        >>> program = to_program(larger, (np.float32(1), np.float32(2)))
        >>> program((np.float32(7), np.float32(5)))
        np.float32(7.0)
    """
    tape = Tape()
    arguments = [map_leaves(tape.placeholder, tree) for tree in trees]
    with np.errstate(all="ignore"):
        result = function(*arguments)
    names = [f"tree{i}" for i in range(len(trees))]
    body = [
        *(f"{tape.pattern(tree)} = {name}" for tree, name in zip(arguments, names, strict=True)),
        *tape.lines,
        f"return {tape.expression(result)}",
    ]
    source = f"def program({', '.join(names)}):\n " + "\n ".join(body)
    exec(compile(source, "<the engine's step, recorded>", "exec"), tape.constants)
    return tape.constants["program"]


_EXPRESSIONS = {
    "add": "{} + {}",
    "subtract": "{} - {}",
    "multiply": "{} * {}",
    "divide": "{} / {}",
    "floor_divide": "{} // {}",
    "remainder": "{} % {}",
    "less": "{} < {}",
    "less_equal": "{} <= {}",
    "greater": "{} > {}",
    "greater_equal": "{} >= {}",
    "equal": "{} == {}",
    "not_equal": "{} != {}",
    "bitwise_and": "{} & {}",
    "bitwise_or": "{} | {}",
    "absolute": "abs({})",
    "negative": "-{}",
}
"""NumPy's name of each operator, and how Python writes it."""


class RecordedValue(NDArrayOperatorsMixin):
    """Placeholder for a number or an array in the recorded function.

    It has the operators of a NumPy array, which record a line. It has no truth value, because the
    line of a branch that was not taken would be missing.

    Attributes:
        tape: where the operations on it are recorded.
        name: its name in the program.
        sample: its value for the example arguments, for its dtype and shape.
    """

    __slots__ = ("name", "sample", "tape")

    def __init__(self, tape: Tape, name: str, sample: Any) -> None:
        self.tape, self.name, self.sample = tape, name, sample

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value, the same at later steps."""
        return self.sample.shape

    def __bool__(self) -> bool:
        raise NotRecordable("the function branches on a value: use xp.where instead")

    def __getitem__(self, key: Any) -> RecordedValue:
        return self.tape.add("{}[{}]", self, key)

    def __invert__(self) -> RecordedValue:
        return self.tape.where(self, np.False_, np.True_)

    def __array_ufunc__(self, operator: np.ufunc, method: str, *operands: Operand) -> Any:
        """Records an operator. The mixin and NumPy's arrays pass each operator to this method."""
        cast = [_cast_like(each, self) for each in operands]
        return self.tape.add(_EXPRESSIONS[operator.__name__], *cast)


register(RecordedValue, lambda value: value.tape)


class Tape(ArrayNamespace):
    """The recorded operations; also the array namespace of the placeholders.

    A function of NumPy with a placeholder among its arguments becomes a line with this call. Those
    that are slow on scalars become expressions of Python.
    """

    def __init__(self) -> None:
        super().__init__(np)
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {"np": np, "new": tuple.__new__}
        """Name -> constant of the program."""
        self._names = 0

    def __getattr__(self, name: str) -> Any:
        """A function of NumPy, recorded."""
        return lambda *operands: self._call(f"np.{name}", *operands)

    def _call(self, function: str, *operands: Operand) -> Any:
        return self.add(f"{function}({', '.join(['{}'] * len(operands))})", *operands)

    def where(self, condition: Operand, x: Operand, y: Operand, /) -> Any:
        """A conditional expression, or `numpy.where` if an operand is an array."""
        operands = condition, _cast_like(x, y), _cast_like(y, x)
        return self._selection("{1} if {0} else {2}", "where", *operands)

    def minimum(self, x: Operand, y: Operand, /) -> Any:
        """A conditional expression, which lets each NaN through, or `numpy.minimum`."""
        operands = _cast_like(x, y), _cast_like(y, x)
        return self._selection("{0} if {0} < {1} or {0} != {0} else {1}", "minimum", *operands)

    def maximum(self, x: Operand, y: Operand, /) -> Any:
        """A conditional expression, which lets each NaN through, or `numpy.maximum`."""
        operands = _cast_like(x, y), _cast_like(y, x)
        return self._selection("{0} if {0} > {1} or {0} != {0} else {1}", "maximum", *operands)

    def _selection(self, expression: str, function: str, *operands: Operand) -> Any:
        """Records the expression for numbers, and NumPy's function for arrays."""
        if all(isinstance(_sample(each), np.generic) for each in operands):
            return self.add(expression, *operands)
        return self._call(f"np.{function}", *operands)

    def as_float(self, x: Operand, /) -> Any:
        """`numpy.astype`, which takes five times as long on scalars."""
        if isinstance(_sample(x), np.generic):
            return self.add("float({}) + {}", x, np.float32(0))  # rounds once
        return self.add("{}.astype(np.float32)", x)

    def as_int(self, x: Operand, /) -> Any:
        """`numpy.astype`."""
        if isinstance(_sample(x), np.bool_):
            return self.where(x, np.int32(1), np.int32(0))
        return self.add("{}.astype(np.int32)", x)

    def product(self, x: Operand, y: Operand, /) -> Any:
        """A plain product, because NumPy rounds each operation by itself."""
        return x * y

    def add(self, text: str, *operands: Operand) -> Any:
        """Records an operation.

        Args:
            text: the expression, with {} for each operand.
            operands: placeholders and constants.

        Returns:
            The placeholder of the result. An operation on constants only returns its result.
        """
        names = [self.expression(each) for each in operands]
        expression = text.format(*names)
        samples = dict(zip(names, map(_sample, operands), strict=True))
        sample = eval(expression, self.constants, samples)
        if not any(isinstance(each, RecordedValue) for each in operands):
            return sample
        result = self.placeholder(sample)
        self.lines.append(f"{result.name} = {expression}")
        return result

    def placeholder(self, sample: Any) -> RecordedValue:
        """A new placeholder with an example of its values."""
        self._names += 1
        return RecordedValue(self, f"v{self._names}", sample)

    def pattern(self, tree: Any) -> str:
        """Writes a tree of placeholders as the left side of an assignment."""
        if isinstance(tree, tuple):
            return f"[{', '.join(self.pattern(part) for part in tree)}]"
        if tree is None:
            return "_"
        return tree.name

    def expression(self, tree: Any) -> str:
        """Writes a tree of placeholders and constants as an expression."""
        if isinstance(tree, RecordedValue):
            return tree.name
        if isinstance(tree, tuple):
            parts = "".join(f"{self.expression(part)}, " for part in tree)
            if type(tree) is tuple:
                return f"({parts})"
            return f"new({self.expression(type(tree))}, ({parts}))"
        name = f"c{len(self.constants)}"
        self.constants[name] = tree
        return name


def _sample(value: Operand) -> Any:
    """The example of a placeholder, or the constant itself."""
    if isinstance(value, RecordedValue):
        return value.sample
    return value


def _cast_like(value: Operand, other: Operand) -> Any:
    """Casts a Python number to the dtype that NumPy would use next to a scalar operand."""
    kind = type(_sample(other))
    if isinstance(value, int | float) and issubclass(kind, np.generic):
        return kind(value)
    return value
