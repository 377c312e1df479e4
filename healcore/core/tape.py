"""Records the engine's step as one straight Python function, for NumPy scalars.

On the host the engine judges one step at a time, on single numbers. With NumPy most of that time is
overhead: the calls of the core's functions, their branches on the policy, and `numpy.where`, which
takes a microsecond on two scalars. The engine has no branch on a value, so its operations are the
same for all numbers. They are recorded once, written as the source of a Python function, and
compiled. A conditional expression of Python takes a tenth of a `numpy.where`, and computes only the
operand that it selects. Values and dtypes equal NumPy's.

How it works: `to_program` calls the function once with a placeholder, a `RecordedValue`, for each
number of its arguments, and with a `Tape` as `xp`. Each operator on a placeholder, and each call
of the tape, adds a line and returns a new placeholder. A placeholder also holds the `sample` that
NumPy computes from the example arguments, for its dtype and shape only. From the result the tape
finds the lines that are needed. A line that is used once becomes part of the line that uses it.

    def judged(state, norm, *, xp):                 # what the core has
        mean, unused = state
        over = norm > 2.0 * mean
        accepted = xp.where(over, mean, norm)
        mean = mean + xp.product(np.float32(0.125), accepted - mean)
        return (mean, unused), xp.flag(over, 4)

    def program(tree0, tree1, *, c0=2.0, c1=0.125, c2=1, c3=0, c4=4):           # what is recorded
        [v0, _] = tree0
        v1 = tree1
        v3 = v1 > (c0 * v0)
        return (((v0 + (c1 * ((v0 if v3 else v1) - v0))), None, ), ((c2 if v3 else c3) * c4), )

Constants are NumPy scalars, and defaults of keyword parameters. The names `v0`, `v1`, ... number
all lines, so numbers of lines that were inlined or are not needed are missing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from healcore.core.array_namespace import Array, ArrayNamespace, Flag, Float, Int, Number
from healcore.core.trees import leaves

Tree: TypeAlias = Any
"""A number, an array, or a named tuple or tuple of trees: the state of an engine, its signals."""
Operand: TypeAlias = Any
"""An operand of a recorded operation: a `RecordedValue`, or a number or array that is constant."""
Function: TypeAlias = Callable[..., Any]
"""A function of the core that is recorded, or the program that replaces it."""

_MAX_DEPTH = 20
"""Limit of nested parentheses in the program; Python's parser has a limit of 200."""
_LOGICAL = {"&": "and", "|": "or"}
_ZERO, _ONE = np.float32(0), np.float32(1)


class NotRecordable(TypeError):
    """The recorded function branches on a value.

    A record has one path of operations. An `if` on a value would record only the path of the first
    step, and later steps would be judged wrongly. Write `xp.where` instead.
    """


def to_program(function: Function, *trees: Tree) -> Function:
    """Records ``function(*trees, xp=...)`` and returns a faster function with the same results.

    Args:
        function: a pure function without branches on a value, such as `Engine.step`.
        trees: examples of its arguments: nested NamedTuples, tuples and None with NumPy scalars and
            arrays. Later calls must have the same structure, dtypes and shapes, which the program
            does not check.

    Returns:
        A function of trees like these, without `xp`. A call needs ``np.errstate(all="ignore")``.

    Raises:
        NotRecordable: the function branches on a value.

    Examples:
        >>> import numpy as np
        >>> def larger(pair, *, xp):
        ...     return xp.where(pair[0] > pair[1], pair[0], pair[1])
        >>> program = to_program(larger, (np.float32(1), np.float32(2)))
        >>> program((np.float32(7), np.float32(5)))
        np.float32(7.0)
    """
    tape = Tape()
    with np.errstate(all="ignore"):
        arguments, patterns = [], []
        for tree in trees:
            argument, pattern = tape.bind(tree)
            arguments.append(argument)
            patterns.append(pattern)
        result = function(*arguments, xp=tape)
    return tape.program(patterns, result)


def to_loop(function: Function, state: Tree, inputs: Tree) -> Function:
    """Records a loop over ``state, outputs = function(state, inputs, xp=...)``, as `to_program`.

    A replay judges a million steps. In a loop the numbers of the state stay in local variables, and
    are not packed into NamedTuples after each step. Only the leaves that the step changes are
    assigned.

    Args:
        function: returns the new state and a tuple of outputs.
        state: an example of the state.
        inputs: an example of one step's inputs, a tuple of scalars.

    Returns:
        A function of the first state and of an iterable with the inputs of each step. It returns
        the last state and a list with the outputs of each step.
    """
    tape = Tape()
    with np.errstate(all="ignore"):
        (first, pattern), (values, names) = tape.bind(state), tape.bind(inputs)
        new, outputs = function(first, values, xp=tape)
    return tape.loop(first, pattern, names, new, outputs)


class RecordedValue:
    """Placeholder for a number or an array in the recorded function.

    It has the operators of a NumPy array, which record a line. It has no truth value, because the
    line of a branch that was not taken would be missing.

    Attributes:
        tape: where the operations on it are recorded.
        place: index of its line. Its name in the program is ``v{place}``.
        sample: its value for the example arguments, for its dtype and shape.
    """

    __slots__ = ("place", "sample", "tape")
    __array_ufunc__ = None  # an array as the left operand defers to this class

    def __init__(self, tape: Tape, place: int, sample: Tree) -> None:
        self.tape, self.place, self.sample = tape, place, sample

    shape = property(operator.attrgetter("sample.shape"))
    ndim = property(operator.attrgetter("sample.ndim"))
    dtype = property(operator.attrgetter("sample.dtype"))

    def __bool__(self) -> bool:
        raise NotRecordable("the function branches on a value: use xp.where instead")

    def __hash__(self) -> int:
        return self.place

    def __getitem__(self, key: Any) -> RecordedValue:
        return self.tape.call(operator.getitem, self, key)

    def __neg__(self) -> RecordedValue:
        return self.tape.add("-{}", self)

    def __invert__(self) -> RecordedValue:
        if isinstance(self.sample, np.bool_):
            return self.tape.where(self, np.False_, np.True_)
        return self.tape.add("~{}", self)


def _binary(sign: str) -> tuple[Any, Any]:
    """Makes the methods of an operator: with the placeholder on its left, and on its right."""

    def forward(self: RecordedValue, other: Operand) -> RecordedValue:
        return self.tape.binary(sign, self, other)

    def backward(self: RecordedValue, other: Operand) -> RecordedValue:
        return self.tape.binary(sign, other, self)

    return forward, backward


_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "pow": "**"}
_OTHERS = {"floordiv": "//", "mod": "%", "and": "&", "or": "|", "xor": "^"}
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
for _name, _sign in (_ARITHMETIC | _OTHERS | _COMPARISONS).items():
    _forward, _backward = _binary(_sign)
    setattr(RecordedValue, f"__{_name}__", _forward)
    if _name not in _COMPARISONS:
        setattr(RecordedValue, f"__r{_name}__", _backward)


class Tape(ArrayNamespace):
    """The recorded operations; also the array namespace `xp` of the recorded function.

    A function of the namespace whose arguments are all constants returns its result. With a
    placeholder among the arguments it records an expression of Python, and returns the placeholder
    of the result.
    """

    float32 = np.float32
    int32 = np.int32

    def __init__(self) -> None:
        self._lines: list[tuple[str, tuple[str, ...]]] = []
        """Text of each value, with {} for its operands, and the operands' names."""
        self._known: dict[Any, RecordedValue] = {}
        """(text, names) -> the value that this operation has given."""
        self._names: dict[Any, str] = {}
        """Key of a constant -> its name in the program."""
        self._scope: dict[str, Any] = {"new": tuple.__new__}
        """Name -> constant."""

    # -- the namespace --------------------------------------------------------------------------

    def where(self, condition: Flag, x: Array | Number, y: Array | Number, /) -> Array:
        """A conditional expression, or `numpy.where` if an operand is an array."""
        samples = [_sample(each) for each in (condition, x, y)]
        if_true, if_false = _cast_like(x, samples[2]), _cast_like(y, samples[1])
        if if_true is if_false:
            return if_true
        if any(isinstance(each, np.ndarray) for each in samples):
            return self.call(np.where, condition, if_true, if_false)
        if isinstance(condition, RecordedValue):
            return self.add("{1} if {0} else {2}", condition, if_true, if_false)
        if condition:
            return if_true
        return if_false

    def minimum(self, x: Array, y: Array | Number, /) -> Array:
        """A conditional expression, or `numpy.minimum` if an operand is an array."""
        return self._extreme("<", np.minimum, x, y)

    def maximum(self, x: Array, y: Array | Number, /) -> Array:
        """A conditional expression, or `numpy.maximum` if an operand is an array."""
        return self._extreme(">", np.maximum, x, y)

    def _extreme(self, sign: str, function: Function, x: Array, y: Array) -> Array:
        """Records a minimum or maximum; the second comparison lets a NaN of `x` through."""
        left, right = _cast_like(x, _sample(y)), _cast_like(y, _sample(x))
        if any(isinstance(_sample(each), np.ndarray) for each in (left, right)):
            return self.call(function, left, right)
        return self.add(f"{{0}} if {{0}} {sign} {{1}} or {{0}} != {{0}} else {{1}}", left, right)

    def clip(self, x: Array, low: float, high: float, /) -> Array:
        """A minimum and a maximum."""
        return self.maximum(self.minimum(x, high), low)

    def abs(self, x: Array, /) -> Array:
        """Python's `abs`."""
        return self.add("abs({})", x)

    def sqrt(self, x: Float, /) -> Float:
        """`numpy.sqrt`."""
        return self.call(np.sqrt, x)

    def sum(self, x: Array, axis: int) -> Array:
        """`numpy.sum`."""
        return self.add(f"{{}}.sum({axis})", x)

    def cumsum(self, x: Int, axis: int) -> Int:
        """`numpy.cumsum`."""
        return self.add(f"{{}}.cumsum({axis})", x)

    def astype(self, x: Array, dtype: Any, /) -> Array:
        """`numpy.astype`, which takes ten times as long as arithmetic on scalars."""
        kind = type(_sample(x))
        if kind is np.bool_:
            return self.where(x, dtype(1), dtype(0))
        if kind is np.int32 and dtype is np.float32:
            # Rounds once, because every int32 is a float of Python.
            return self.add("{} + float({})", _ZERO, x)
        return self.add("{}.astype({})", x, dtype)

    def arange(self, n: int, /) -> Int:
        """`numpy.arange`, a constant."""
        return np.arange(n)

    def asarray(self, x: Operand, /) -> Array:
        """`numpy.asarray`, for constants."""
        if isinstance(x, RecordedValue):
            return x
        return np.asarray(x)

    def reciprocal(self, count: Int, /) -> Float:
        """A division of 1 by the count as float32."""
        return self.add("{} / {}", _ONE, self.astype(count, np.float32))

    def product(self, x: Float | Number, y: Float, /) -> Float:
        """A plain product, because NumPy rounds each operation by itself."""
        return x * y

    def with_slot(self, values: Array, slot: Int, value: Array, /) -> Array:
        """A copy with one other element, or `values` itself if the element is equal."""
        return self.call(_with_slot, values, slot, value)

    # -- recording -----------------------------------------------------------------------------

    def bind(self, tree: Tree) -> tuple[Any, str]:
        """Replaces the leaves of an argument by placeholders.

        Returns the argument, and the pattern by which the program unpacks its own argument.
        """
        if tree is None:
            return None, "_"
        if isinstance(tree, tuple):
            values, patterns = [], []
            for part in tree:
                value, pattern = self.bind(part)
                values.append(value)
                patterns.append(pattern)
            pattern = f"[{', '.join(patterns)}]"
            if hasattr(tree, "_fields"):
                return type(tree)(*values), pattern
            return tuple(values), pattern
        value = self._add_line("", (), tree)
        return value, f"v{value.place}"

    def binary(self, sign: str, a: Operand, b: Operand) -> Any:
        """Records an operation on two operands.

        Args:
            sign: the operator of Python, such as "+" or "<".
            a: a recorded value or a constant.
            b: a recorded value or a constant. One of the two is recorded.
        """
        a, b = _cast_like(a, _sample(b)), _cast_like(b, _sample(a))
        if sign in _LOGICAL and all(isinstance(_sample(each), np.bool_) for each in (a, b)):
            sign = _LOGICAL[sign]  # short-circuit evaluation
        return self.add(f"{{}} {sign} {{}}", a, b)

    def call(self, function: Function, *arguments: Operand) -> Operand:
        """Records a function call.

        Args:
            function: a function without side effects, which is called in each later step.
            *arguments: recorded values or constants.
        """
        placeholders = ", ".join(["{}"] * len(arguments))
        return self.add(f"{self._constant(function)}({placeholders})", *arguments)

    def add(self, text: str, *arguments: Operand) -> Operand:
        """Records an operation.

        Args:
            text: the expression, with {} for each operand.
            arguments: the operands, placeholders and constants.

        Returns:
            The placeholder of the result. An operation on constants only returns its result, and an
            operation that is recorded already returns the placeholder that exists.
        """
        names = tuple(self._name(each) for each in arguments)
        recorded = self._known.get((text, names))
        if recorded is None:
            samples = dict(zip(names, map(_sample, arguments), strict=True))
            sample = eval(text.format(*names), self._scope, samples)
            if not any(isinstance(each, RecordedValue) for each in arguments):
                return sample
            recorded = self._known[text, names] = self._add_line(text, names, sample)
        return recorded

    def program(self, patterns: list[str], result: Tree) -> Function:
        """Compiles the operations on which the result depends.

        Args:
            patterns: how each argument is unpacked, ``[v0, [v1, _]]``; see `bind`.
            result: what the recorded function has returned.
        """
        body, answer = self._operations(result)
        arguments = [f"tree{i}" for i in range(len(patterns))]
        unpacked = [f"{p} = {a}" for p, a in zip(patterns, arguments, strict=True)]
        return self._compiled(arguments, [*unpacked, *body, f"return {answer}"])

    def loop(
        self, first: Tree, pattern: str, names: str, new: Tree, outputs: tuple[Tree, ...]
    ) -> Function:
        """Compiles a loop, whose state is in local variables; see `to_loop`."""
        variables = ""
        new_values = []
        for old, value in zip(leaves(first), leaves(new), strict=True):
            if old is not value:
                variables += f"{self._name(old)}, "
                new_values.append(value)
        body, results = self._operations((outputs, *new_values))
        last = self._operations(first)[1]
        step = [*body, f"row, {variables}= {results}", "add(row)"]
        lines = [f"{pattern} = state", "rows = []", "add = rows.append", f"for {names} in inputs:"]
        lines += [f" {line}" for line in step]
        return self._compiled(["state", "inputs"], [*lines, f"return {last}, rows"])

    def _operations(self, result: Tree) -> tuple[list[str], str]:
        """Writes the operations on which a result depends, and the result as an expression.

        A value that is used once is written where it is used, in parentheses, unless these would be
        nested deeper than `_MAX_DEPTH`. Python evaluates it in the same order as before.
        """
        template, places = self._expression_of(result)
        uses = self._count_uses(places)
        body: list[str] = []
        inlined: dict[str, tuple[str, int]] = {}  # name -> its expression, and the depth of that
        for place, (text, names) in enumerate(self._lines):
            if not text or not uses[place]:
                continue
            parts, depth = [], 1
            for name in names:
                part, part_depth = inlined.pop(name, (name, 0))
                parts.append(part)
                depth = max(depth, 1 + part_depth)
            line = text.format(*parts)
            if uses[place] == 1 and depth < _MAX_DEPTH:
                inlined[f"v{place}"] = (f"({line})", depth)
            else:
                body.append(f"v{place} = {line}")
        results = []
        for place in places:
            expression, _ = inlined.get(f"v{place}", (f"v{place}", 0))
            results.append(expression)
        return body, template.format(*results)

    def _count_uses(self, places: list[int]) -> list[int]:
        """Counts how often the result uses each line, directly or through another line.

        Args:
            places: the lines in the result.
        """
        uses = [0] * len(self._lines)
        for place in places:
            uses[place] += 1
        # A line uses earlier lines only. So the uses of a line are known when it is reached.
        for place in reversed(range(len(self._lines))):
            text, names = self._lines[place]
            if uses[place]:
                for number, name in enumerate(names):
                    if name.startswith("v"):
                        uses[int(name[1:])] += max(1, text.count(f"{{{number}}}"))
        return uses

    def _compiled(self, arguments: list[str], lines: list[str]) -> Function:
        """Compiles a function of these parameters with these lines as its body."""
        parameters = list(arguments)
        if self._names:
            # Constants are defaults of keyword parameters, because local variables are fast.
            parameters.append("*")
            parameters += [f"{name}={name}" for name in self._names.values()]
        source = f"def program({', '.join(parameters)}):\n " + "\n ".join(lines)
        scope = dict(self._scope)
        exec(compile(source, "<the engine's step, recorded>", "exec"), scope)
        return scope["program"]

    def _expression_of(self, tree: Tree) -> tuple[str, list[int]]:
        """Writes a tree as an expression with {} for its values; returns their places too."""
        if tree is None:
            return "None", []
        if isinstance(tree, RecordedValue):
            return "{}", [tree.place]
        if not isinstance(tree, tuple):
            return self._constant(tree), []
        inner = ""
        all_places: list[int] = []
        for part in tree:
            text, places = self._expression_of(part)
            inner += f"{text}, "
            all_places += places
        inner = f"({inner})"
        if hasattr(tree, "_fields"):
            inner = f"new({self._constant(type(tree))}, {inner})"
        return inner, all_places

    def _add_line(self, text: str, names: tuple[str, ...], sample: Tree) -> RecordedValue:
        """Adds a line, and returns the placeholder of its value."""
        self._lines.append((text, names))
        return RecordedValue(self, len(self._lines) - 1, sample)

    def _name(self, value: Operand) -> str:
        """The name of a placeholder or constant in the program."""
        if isinstance(value, RecordedValue):
            return f"v{value.place}"
        return self._constant(value)

    def _constant(self, value: Operand) -> str:
        """The name of a constant. Equal numbers of one type have one name."""
        if isinstance(value, (int, float, np.generic)):
            key = (type(value), repr(value))  # as text: -0.0 equals 0.0, and NaN not itself
        else:
            key = id(value)
        if key not in self._names:
            self._names[key] = f"c{len(self._names)}"
            self._scope[self._names[key]] = value  # the reference keeps the id unique
        return self._names[key]


def _sample(value: Operand) -> Any:
    """The example of a placeholder, or the constant itself."""
    if isinstance(value, RecordedValue):
        return value.sample
    return value


def _cast_like(value: Operand, other: Operand) -> Any:
    """Casts a Python number to the dtype that NumPy would use next to the other operand."""
    if not isinstance(value, int | float) or isinstance(value, np.generic):
        return value
    kind: Any = type(other)
    fits = (
        kind is np.float32
        or (kind is np.bool_ and isinstance(value, bool))
        or (kind in (np.int32, np.int64) and isinstance(value, int) and abs(value) < 2**31)
    )
    if fits:
        return kind(value)
    return value


def _with_slot(values: Tree, slot: Operand, value: Operand) -> Any:
    """The `values` with `value` in a slot; `values` itself if the slot has it already."""
    if values[slot] != value:
        values = values.copy()
        values[slot] = value
    return values
