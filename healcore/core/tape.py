"""Records the engine's step as one straight Python function, for NumPy scalars.

The engine has no branches, so its operations are the same for all numbers. They are recorded once
and compiled. A step then has no calls, no branches on the configuration and no tuples.
`numpy.where` on two scalars takes a microsecond, and a conditional of Python a tenth of it; an
operand of a `where` is computed only if it is selected. Values and dtypes equal NumPy's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import numpy as np

from healcore.core.numerics import leaves

_MAX_DEPTH = 20
"""Limit of nested parentheses in the program; Python's parser has a limit of 200."""
_LOGICAL = {"&": "and", "|": "or"}
_ZERO, _ONE = np.float32(0), np.float32(1)


class NotRecordable(TypeError):
    """The recorded function branches on a value."""


def to_program(function: Callable[..., Any], *trees: Any) -> Callable[..., Any]:
    """Records ``function(*trees, xp=...)`` and returns a faster function with the same results.

    The function must be pure. The trees are nested NamedTuples, tuples and None with NumPy scalars
    and arrays: examples of the structure, dtypes and shapes of later calls. Later calls need
    ``np.errstate(all="ignore")``.

    Raises:
        NotRecordable: the function branches on a value.
    """
    tape = Tape()
    with np.errstate(all="ignore"):
        pairs = [tape.given(tree) for tree in trees]
        result = function(*(values for values, _ in pairs), xp=tape)
    return tape.program([pattern for _, pattern in pairs], result)


def to_loop(function: Callable[..., Any], state: Any, inputs: Any) -> Callable[..., Any]:
    """Records a loop over ``state, outputs = function(state, inputs, xp=...)``, as `to_program`.

    `state` and `inputs`, a tuple of scalars, are examples, and the outputs are a tuple.

    Returns:
        A function of the first state and of the inputs of all steps. It returns the last state and
        the outputs of each step.
    """
    tape = Tape()
    with np.errstate(all="ignore"):
        (first, pattern), (values, names) = tape.given(state), tape.given(inputs)
        new, outputs = function(first, values, xp=tape)
    return tape.loop(first, pattern, names, new, outputs)


class RecordedValue:
    """Placeholder for a number or an array in the recorded function."""

    __slots__ = ("place", "sample", "tape")
    __array_ufunc__ = None  # an array as the left operand defers to this class

    def __init__(self, tape: Tape, place: int, sample: Any) -> None:
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
    def forward(self: RecordedValue, other: Any) -> RecordedValue:
        return self.tape.binary(sign, self, other)

    def backward(self: RecordedValue, other: Any) -> RecordedValue:
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


class Tape:
    """The recorded operations; also the array namespace `xp` of the recorded function."""

    float32, int32, bool = np.float32, np.int32, np.bool_
    arange = staticmethod(np.arange)
    rounded_product = staticmethod(operator.mul)  # NumPy rounds a product by itself

    def __init__(self) -> None:
        self._lines: list[tuple[str, tuple[str, ...]]] = []
        """Text of each value, with {} for its operands, and the operands' names."""
        self._known: dict[Any, RecordedValue] = {}
        self._names: dict[Any, str] = {}
        """Key of a constant -> its name in the program."""
        self._scope: dict[str, Any] = {"new": tuple.__new__}
        """Name -> constant."""

    # -- the namespace --------------------------------------------------------------------------

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        """`numpy.where`; a Python number takes the dtype of the other operand."""
        samples = [_sample(each) for each in (condition, a, b)]
        a, b = _like(a, samples[2]), _like(b, samples[1])
        if a is b:
            return a
        if any(isinstance(each, np.ndarray) for each in samples):
            return self.call(np.where, condition, a, b)
        if not isinstance(condition, RecordedValue):
            return a if condition else b
        return self.add("{1} if {0} else {2}", condition, a, b)

    def _extreme(self, sign: str, function: Callable[..., Any], a: Any, b: Any) -> Any:
        """`numpy.minimum` or `maximum`; a Python number takes the dtype of the other operand."""
        a, b = _like(a, _sample(b)), _like(b, _sample(a))
        if any(isinstance(_sample(each), np.ndarray) for each in (a, b)):
            return self.call(function, a, b)
        return self.add(f"{{0}} if {{0}} {sign} {{1}} or {{0}} != {{0}} else {{1}}", a, b)

    minimum = partialmethod(_extreme, "<", np.minimum)
    maximum = partialmethod(_extreme, ">", np.maximum)

    def clip(self, x: Any, low: Any, high: Any) -> Any:
        """`numpy.clip`."""
        return self.maximum(self.minimum(x, high), low)

    def sum(self, x: Any, axis: int) -> Any:
        """`numpy.sum`."""
        return self.add(f"{{}}.sum({axis})", x)

    def cumsum(self, x: Any, axis: int) -> Any:
        """`numpy.cumsum`."""
        return self.add(f"{{}}.cumsum({axis})", x)

    def astype(self, x: Any, dtype: Any) -> Any:
        """`numpy.astype`, which takes ten times as long as arithmetic on scalars."""
        kind = type(_sample(x))
        if kind is np.bool_:
            return self.where(x, dtype(1), dtype(0))
        if kind is np.int32 and dtype is np.float32:
            # Rounds once, because every int32 is a float of Python.
            return self.add("{} + float({})", _ZERO, x)
        return self.add("{}.astype({})", x, dtype)

    def asarray(self, x: Any) -> Any:
        """`numpy.asarray`, for constants."""
        return x if isinstance(x, RecordedValue) else np.asarray(x)

    def with_slot(self, values: Any, slot: Any, value: Any) -> Any:
        """See `numerics.with_slot`."""
        return self.call(_with_slot, values, slot, value)

    # -- recording -----------------------------------------------------------------------------

    def given(self, tree: Any) -> tuple[Any, str]:
        """Replaces the leaves of an argument by values; returns the pattern that unpacks it too."""
        if tree is None:
            return None, "_"
        if isinstance(tree, tuple):
            parts = [self.given(part) for part in tree]
            values = [value for value, _ in parts]
            rebuilt = type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
            return rebuilt, "[" + ", ".join(pattern for _, pattern in parts) + "]"
        value = self._new("", (), tree)
        return value, f"v{value.place}"

    def binary(self, sign: str, a: Any, b: Any) -> Any:
        """Records an operation on two operands, of which one may be a constant."""
        a, b = _like(a, _sample(b)), _like(b, _sample(a))
        if sign in _LOGICAL and all(isinstance(_sample(each), np.bool_) for each in (a, b)):
            sign = _LOGICAL[sign]  # short-circuit evaluation
        return self.add(f"{{}} {sign} {{}}", a, b)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Records a function call."""
        return self.add(
            f"{self._constant(function)}({', '.join(['{}'] * len(arguments))})", *arguments
        )

    def add(self, text: str, *arguments: Any) -> Any:
        """Records an operation. An operation on constants returns its result.

        An equal operation returns the value that exists.
        """
        names = tuple(self._name(each) for each in arguments)
        recorded = self._known.get((text, names))
        if recorded is None:
            samples = dict(zip(names, map(_sample, arguments), strict=True))
            sample = eval(text.format(*names), self._scope, samples)
            if not any(isinstance(each, RecordedValue) for each in arguments):
                return sample
            recorded = self._known[text, names] = self._new(text, names, sample)
        return recorded

    abs, sqrt = partialmethod(add, "abs({})"), partialmethod(call, np.sqrt)
    reciprocal = partialmethod(add, "{} / {}", _ONE)

    def program(self, patterns: list[str], result: Any) -> Callable[..., Any]:
        """Compiles the operations on which the result depends."""
        body, answer = self._operations(result)
        arguments = [f"tree{i}" for i in range(len(patterns))]
        unpacked = [f"{p} = {a}" for p, a in zip(patterns, arguments, strict=True)]
        return self._compiled(arguments, [*unpacked, *body, f"return {answer}"])

    def loop(
        self, first: Any, pattern: str, names: str, new: Any, outputs: tuple[Any, ...]
    ) -> Callable[..., Any]:
        """Compiles a loop, whose state is in local variables; see `to_loop`."""
        pairs = zip(leaves(first), leaves(new), strict=True)
        changed = [(old, value) for old, value in pairs if old is not value]
        body, results = self._operations((outputs, *(value for _, value in changed)))
        variables = "".join(f"{self._name(old)}, " for old, _ in changed)
        last = self._operations(first)[1]
        step = [*body, f"row, {variables}= {results}", "add(row)"]
        lines = [f"{pattern} = state", "rows = []", "add = rows.append", f"for {names} in inputs:"]
        lines += [f" {line}" for line in step]
        return self._compiled(["state", "inputs"], [*lines, f"return {last}, rows"])

    def _operations(self, result: Any) -> tuple[list[str], str]:
        """Writes the operations on which a result depends, and the result as an expression."""
        template, places = self._written(result)
        uses = [0] * len(self._lines)
        for name in places:
            uses[name] += 1
        for place in reversed(range(len(self._lines))):
            text, names = self._lines[place]
            if uses[place]:
                for number, name in enumerate(names):
                    if name[0] == "v":
                        uses[int(name[1:])] += max(1, text.count(f"{{{number}}}"))
        body, inlined = [], {}
        for place, (text, names) in enumerate(self._lines):
            if not text or not uses[place]:
                continue
            parts = [inlined.pop(name, (name, 0)) for name in names]
            line = text.format(*(part for part, _ in parts))
            depth = 1 + max((deep for _, deep in parts), default=0)
            if uses[place] == 1 and depth < _MAX_DEPTH:
                inlined[f"v{place}"] = (f"({line})", depth)
            else:
                body.append(f"v{place} = {line}")
        return body, template.format(*(inlined.get(f"v{at}", (f"v{at}", 0))[0] for at in places))

    def _compiled(self, arguments: list[str], lines: list[str]) -> Callable[..., Any]:
        constants = [f"{name}={name}" for name in self._names.values()]  # defaults: fast locals
        source = f"def program({', '.join([*arguments, '*', *constants])}):\n " + "\n ".join(lines)
        scope = dict(self._scope)
        exec(compile(source, "<the engine's step, recorded>", "exec"), scope)
        return scope["program"]

    def _written(self, tree: Any) -> tuple[str, list[int]]:
        """Writes a tree as an expression with {} for its values; returns their places too."""
        if tree is None:
            return "None", []
        if isinstance(tree, RecordedValue):
            return "{}", [tree.place]
        if not isinstance(tree, tuple):
            return self._constant(tree), []
        parts = [self._written(part) for part in tree]
        inner = "(" + "".join(f"{text}, " for text, _ in parts) + ")"
        if hasattr(tree, "_fields"):
            inner = f"new({self._constant(type(tree))}, {inner})"
        return inner, [place for _, places in parts for place in places]

    def _new(self, text: str, names: tuple[str, ...], sample: Any) -> RecordedValue:
        self._lines.append((text, names))
        return RecordedValue(self, len(self._lines) - 1, sample)

    def _name(self, value: Any) -> str:
        return f"v{value.place}" if isinstance(value, RecordedValue) else self._constant(value)

    def _constant(self, value: Any) -> str:
        plain = isinstance(value, (int, float, np.generic))
        key = (type(value), repr(value)) if plain else id(value)
        if key not in self._names:
            self._names[key] = f"c{len(self._names)}"
            self._scope[self._names[key]] = value  # the reference keeps the id unique
        return self._names[key]


def _sample(value: Any) -> Any:
    return value.sample if isinstance(value, RecordedValue) else value


def _like(value: Any, other: Any) -> Any:
    """Casts a Python number to the dtype that NumPy would use next to the other operand."""
    if not isinstance(value, int | float) or isinstance(value, np.generic):
        return value
    kind: Any = type(other)
    fits = (
        kind is np.float32
        or (kind is np.bool_ and isinstance(value, bool))
        or (kind in (np.int32, np.int64) and isinstance(value, int) and abs(value) < 2**31)
    )
    return kind(value) if fits else value


def _with_slot(values: Any, slot: Any, value: Any) -> Any:
    """The `values` with `value` in a slot; `values` itself if the slot has it already."""
    if values[slot] != value:
        values = values.copy()
        values[slot] = value
    return values
