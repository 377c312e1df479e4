"""Text of source files that changes only if their code may behave differently.

Comments, docstrings, messages and layout are not part of it, and neither are the names that the
files choose themselves. A consistent new name leaves the text as it is; an operator, a constant, a
key, a call of another function or a name from a library changes it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def code_of(file: Path) -> str:
    """Returns a file's code without comments, docstrings, messages and layout."""
    return ast.unparse(_without_text(file))


def code_without_names(files: Iterable[Path]) -> str:
    """Returns the code of all files, with numbers in place of the names that they define.

    Variables of a function are numbered within it, all other names by their first use.
    """
    trees = [_without_text(file) for file in files]
    numbering = _Numbering(trees)
    return "\n".join(ast.unparse(numbering.visit(tree)) for tree in trees)


def _without_text(file: Path) -> ast.Module:
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and _is_message(node.value):
            node.value = ""
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_docstring(each)]  # pyright: ignore
    return tree


def _is_message(value: object) -> bool:
    """Whether a constant is text for people. Names and keys, which may decide, have no space."""
    return isinstance(value, str) and " " in value.strip()


def _is_docstring(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


class _Numbering(ast.NodeTransformer):
    """Replaces the names that the trees define."""

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        self._defined = set[str]()
        """Names of functions, classes, attributes, parameters and module variables."""
        self._numbers: dict[str, int] = {}
        self._scopes: list[dict[str, str]] = []
        """Variables of each function around the present node, with their replacements."""
        for tree in trees:
            self._define(tree, local=False)

    def _define(self, node: ast.AST, *, local: bool) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not local:
            self._defined.add(node.name)
        elif isinstance(node, ast.arg):
            self._defined.add(node.arg)  # the name of a keyword in calls
        elif isinstance(getattr(node, "ctx", None), ast.Store):
            if isinstance(node, ast.Attribute):
                self._defined.add(node.attr)
            elif isinstance(node, ast.Name) and not local:
                self._defined.add(node.id)
        if isinstance(node, ast.ClassDef):
            local = False
        elif isinstance(node, _FUNCTIONS):
            local = True
        for child in ast.iter_child_nodes(node):
            self._define(child, local=local)

    def _replaced(self, name: str) -> str:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        return self._numbered(name)

    def _numbered(self, name: str) -> str:
        if name not in self._defined or name.startswith("__"):
            return name
        return f"name{self._numbers.setdefault(name, len(self._numbers))}"

    def _visit_function(self, node: Any) -> Any:
        if not isinstance(node, ast.Lambda):
            node.name = self._replaced(node.name)
            node.decorator_list = [self.visit(each) for each in node.decorator_list]
        variables: dict[str, None] = {}
        outer = set[str]()
        for inner in ast.walk(node.args):
            if isinstance(inner, ast.arg):
                variables[inner.arg] = None
        for statement in node.body if isinstance(node.body, list) else [node.body]:
            _collect(statement, variables, outer)
        depth = len(self._scopes)
        names = (name for name in variables if name not in outer)
        self._scopes.append({name: f"local{depth}_{i}" for i, name in enumerate(names)})
        for part in ("args", "body", "returns"):
            value = getattr(node, part, None)
            if isinstance(value, list):
                setattr(node, part, [self.visit(each) for each in value])
            elif value is not None:
                setattr(node, part, self.visit(value))
        self._scopes.pop()
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _visit_function

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        node.name = self._replaced(node.name)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> Any:
        node.id = self._replaced(node.id)
        return node

    def visit_arg(self, node: ast.arg) -> Any:
        node.arg = self._replaced(node.arg)
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        node.attr = self._numbered(node.attr)
        return self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> Any:
        node.arg = node.arg and self._numbered(node.arg)
        return self.generic_visit(node)

    def visit_alias(self, node: ast.alias) -> Any:
        node.name = self._numbered(node.name)
        node.asname = node.asname and self._replaced(node.asname)
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> Any:
        node.name = node.name and self._replaced(node.name)
        return self.generic_visit(node)

    def visit_Nonlocal(self, node: ast.Nonlocal | ast.Global) -> Any:
        node.names = [self._replaced(name) for name in node.names]
        return node

    visit_Global = visit_Nonlocal


def _collect(node: ast.AST, variables: dict[str, None], outer: set[str]) -> None:
    """Adds the variables of a function that a statement assigns, and the names of outer scopes."""
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        outer.update(node.names)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        variables[node.id] = None
    elif isinstance(node, ast.ExceptHandler) and node.name:
        variables[node.name] = None
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        variables[node.name] = None
        return
    if not isinstance(node, ast.Lambda):
        for child in ast.iter_child_nodes(node):
            _collect(child, variables, outer)
