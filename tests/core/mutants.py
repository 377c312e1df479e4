"""Planted errors: the core with one comparison reversed or one sign changed.

An oracle that no error can upset proves nothing. Errors are planted by position in the syntax
tree, not by a text to replace, so that an edit to the core cannot make this stale.
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

_FLIPPED: dict[type, type] = {
    ast.Gt: ast.Lt,
    ast.GtE: ast.Lt,
    ast.Lt: ast.Gt,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


class Mutant(NamedTuple):
    """One planted error."""

    module: ModuleType
    function: Any
    line: int
    before: str
    after: str
    tree: ast.Module
    """The function's syntax tree with the error in it."""

    def __str__(self) -> str:
        name = self.module.__name__.removeprefix("healcore.core.")
        return f"{name}:{self.line}: {self.before}  ->  {self.after}"


def mutants(module: ModuleType) -> Iterator[Mutant]:
    """All errors that can be planted into the functions and methods of `module`."""
    whole = ast.parse(inspect.getsource(module))
    places: list[tuple[Any, list[ast.stmt]]] = [(module, whole.body)]
    classes = (node for node in whole.body if isinstance(node, ast.ClassDef))
    places += [(getattr(module, node.name), node.body) for node in classes]
    for owner, body in places:
        for function in body:
            if isinstance(function, ast.FunctionDef):
                yield from _mutants_of(module, getattr(owner, function.name), function)


def _mutants_of(module: ModuleType, original: Any, function: ast.FunctionDef) -> Iterator[Mutant]:
    types = _annotations(function)
    for index, node in enumerate(ast.walk(function)):
        kind = _operator(node)
        if kind not in _FLIPPED or node in types:
            continue
        changed = copy.deepcopy(function)
        target: Any = list(ast.walk(changed))[index]
        if isinstance(target, ast.Compare):
            target.ops[0] = _FLIPPED[kind]()
        else:
            target.op = _FLIPPED[kind]()
        tree = ast.fix_missing_locations(ast.Module([changed], []))
        line = node.lineno  # type: ignore[attr-defined]
        yield Mutant(module, original, line, ast.unparse(node), ast.unparse(target), tree)


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The core with the error in it."""
    original, found = mutant.function, {}
    exec(compile(mutant.tree, f"<{mutant}>", "exec"), mutant.module.__dict__, found)
    code = original.__code__
    try:
        # Others may hold the function itself (`from x import f`): change it from the inside.
        original.__code__ = found[original.__name__].__code__
        yield
    finally:
        original.__code__ = code


def _operator(node: ast.AST) -> Any:
    """The kind of its only operator."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return type(node.ops[0])
    return type(node.op) if isinstance(node, ast.BinOp) else None


def _annotations(function: ast.FunctionDef) -> set[ast.AST]:
    """`int | None` is no disjunction."""
    roots = [function.returns]
    roots += [n.annotation for n in ast.walk(function) if isinstance(n, ast.arg | ast.AnnAssign)]
    return {each for root in roots if root is not None for each in ast.walk(root)}
