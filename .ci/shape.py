"""Prints the sizes of the code that a reader has to hold in the head; asserts nothing.

    python .ci/shape.py [FILE or FOLDER ...]

What is asserted is optimised instead of the code, so that a person reads these numbers: files above
600 lines, functions above 80, classes that set more than 12 attributes, and how many conditional
expressions, comprehensions and `Any` there are in 100 lines of code (optax: 0.7, 0.7, 2.3). The
last number is the length of public docstrings (optax: 15).
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("healcore", "adapters")
MAX_FILE, MAX_FUNCTION, MAX_ATTRIBUTES = 600, 80, 12
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass
class Shape:
    """What was counted in some files."""

    files: int = 0
    lines: int = 0
    code_lines: int = 0
    conditionals: int = 0
    comprehensions: int = 0
    any_types: int = 0
    docstrings: list[int] = field(default_factory=list)
    """Lines of each docstring of a public class or function."""
    large: list[str] = field(default_factory=list)
    """What exceeds a limit, as lines to print."""

    def add(self, path: Path) -> None:
        """Counts one file."""
        text = path.read_text()
        tree = ast.parse(text)
        name = path.resolve().relative_to(ROOT)
        lines = text.splitlines()
        self.files += 1
        self.lines += len(lines)
        if len(lines) > MAX_FILE:
            self.large.append(f"{len(lines):5d} lines       {name}")
        in_docstring = {line for node in ast.walk(tree) for line in lines_of_docstring(node)}
        for number, line in enumerate(lines, 1):
            is_code = line.strip() and not line.strip().startswith("#")
            if is_code and number not in in_docstring:
                self.code_lines += 1
        for node in ast.walk(tree):
            self._add_node(node, name)

    def _add_node(self, node: ast.AST, file: Path) -> None:
        if isinstance(node, ast.IfExp):
            self.conditionals += 1
        elif isinstance(node, COMPREHENSIONS):
            self.comprehensions += 1
        elif isinstance(node, ast.Name) and node.id == "Any":
            self.any_types += 1
        if isinstance(node, DOCUMENTED) and not node.name.startswith("_"):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                self.docstrings.append(docstring.count("\n") + 1)
        if isinstance(node, ast.FunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION:
                self.large.append(f"{length:5d} lines       {file}: {node.name}")
        if isinstance(node, ast.ClassDef):
            attributes = set(attributes_set_by(node))
            if len(attributes) > MAX_ATTRIBUTES:
                self.large.append(f"{len(attributes):5d} attributes  {file}: {node.name}")

    def report(self) -> str:
        """The numbers, and what exceeds a limit, largest first."""
        per_100 = 100 / max(self.code_lines, 1)
        return "\n".join(
            [
                f"{self.files} files, {self.lines:,} lines, {self.code_lines:,} of code",
                f"{self.conditionals * per_100:.2f} conditional expressions, "
                f"{self.comprehensions * per_100:.2f} comprehensions and "
                f"{self.any_types * per_100:.2f} `Any` in 100 lines of code",
                self._docstring_lengths(),
                *sorted(self.large, reverse=True),
            ]
        )

    def _docstring_lengths(self) -> str:
        """The lengths of public docstrings, of which a small file may have none."""
        if not self.docstrings:
            return "public docstrings: none"
        median = statistics.median(self.docstrings)
        mean = statistics.mean(self.docstrings)
        return f"public docstrings: median {median:g} lines, mean {mean:.1f}"


def lines_of_docstring(node: ast.AST) -> Iterator[int]:
    """The numbers of the lines of a docstring, or of a text after an attribute."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return
    if isinstance(node.value.value, str):
        yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def attributes_set_by(node: ast.ClassDef) -> Iterator[str]:
    """The names of the attributes that the methods of a class set."""
    for each in ast.walk(node):
        if not (isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)):
            continue
        if isinstance(each.value, ast.Name) and each.value.id == "self":
            yield each.attr


def files_in(path: Path) -> list[Path]:
    """The Python files in a folder, or the file itself. Raises SystemExit for any other path."""
    if path.is_dir():
        return sorted(path.rglob("*.py"))
    if path.suffix == ".py" and path.is_file():
        return [path]
    raise SystemExit(f"a file or folder of Python code, not {path}: python .ci/shape.py healcore")


def main(paths: list[str]) -> None:
    """Prints the shape of some files and folders, by default of the product."""
    chosen = [Path(each) for each in paths] or [ROOT / each for each in FOLDERS]
    shape = Shape()
    for each in chosen:
        for path in files_in(each):
            shape.add(path)
    print(shape.report())


if __name__ == "__main__":
    main(sys.argv[1:])
