"""Prints the sizes of the code that a reader has to hold in the head; asserts nothing.

    python .ci/shape.py [FILE or FOLDER ...]

What is asserted is optimised instead of the code, so that a person reads these numbers. First come
the tokens of code without docstrings and comments, the files, functions and classes of each folder
and of all: packing or unfolding lines changes none of them. Then follow how many conditional
expressions, comprehensions and `Any` there are in 100 lines of code (optax: 0.7, 0.7, 2.3), the
length of public docstrings (optax: 15), files above 600 lines, functions above 80, and classes that
set more than 12 attributes.

The list below these numbers also has what CONTRIBUTING asks of a file and of a part of the run:

    and       the first sentence of the docstring has a clause with "and", or a later paragraph
              begins with a class of the file: a file of over 200 lines that may be two files
    modules   a folder of more than 25 modules
    parts     a class or function that takes the whole `Run` and uses at most 2 parts of it, and
              could take these parts
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("healcore", "adapters")
MAX_FILE, MAX_FUNCTION, MAX_ATTRIBUTES = 600, 80, 12
MAX_ONE_SUBJECT, MAX_MODULES, FEW_PARTS = 200, 25, 2
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (*FUNCTIONS, ast.ClassDef)
CODE_TOKENS = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
COUNTED = ("tokens", "files", "functions", "classes")


@dataclass
class Shape:
    """What was counted in some files."""

    folders: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Folder, at most two levels deep -> what of `COUNTED` is in it."""
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
        self.lines += len(lines)
        if len(lines) > MAX_FILE:
            self.large.append(f"{len(lines):5d} lines       {name}")
        in_docstring = {line for node in ast.walk(tree) for line in lines_of_docstring(node)}
        for number, line in enumerate(lines, 1):
            is_code = line.strip() and not line.strip().startswith("#")
            if is_code and number not in in_docstring:
                self.code_lines += 1
        counts = self.folders["/".join(name.parts[:-1][:2])]
        counts["files"] += 1
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            counts["tokens"] += token.type in CODE_TOKENS and token.start[0] not in in_docstring
        for node in ast.walk(tree):
            counts["functions"] += isinstance(node, FUNCTIONS)
            counts["classes"] += isinstance(node, ast.ClassDef)
        if len(lines) > MAX_ONE_SUBJECT and has_two_subjects(tree):
            self.large.append(f"      and         {name}")
        for node in ast.walk(tree):
            self._add_node(node, name)

    def add_folder(self, folder: Path) -> None:
        """Counts the modules of a folder, without those of its folders."""
        modules = [each for each in folder.glob("*.py") if each.name != "__init__.py"]
        if len(modules) > MAX_MODULES:
            name = folder.resolve().relative_to(ROOT)
            self.large.append(f"{len(modules):5d} modules     {name}")

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
        parts = parts_of_run(node)
        if parts is not None and len(parts) <= FEW_PARTS:
            names = ", ".join(sorted(parts))
            self.large.append(f"{len(parts):5d} parts       {file}: {node.name} ({names})")
        if isinstance(node, ast.ClassDef):
            attributes = set(attributes_set_by(node))
            if len(attributes) > MAX_ATTRIBUTES:
                self.large.append(f"{len(attributes):5d} attributes  {file}: {node.name}")

    def report(self) -> str:
        """The numbers, and what exceeds a limit, largest first."""
        per_100 = 100 / max(self.code_lines, 1)
        return "\n".join(
            [
                *self._table(),
                f"{self.lines:,} lines, {self.code_lines:,} of code",
                f"{self.conditionals * per_100:.2f} conditional expressions, "
                f"{self.comprehensions * per_100:.2f} comprehensions and "
                f"{self.any_types * per_100:.2f} `Any` in 100 lines of code",
                self._docstring_lengths(),
                *sorted(self.large, reverse=True),
            ]
        )

    def _table(self) -> Iterator[str]:
        """The rows of the folders, and their sum."""
        rows = {**dict(sorted(self.folders.items())), "sum": sum(self.folders.values(), Counter())}
        yield " " * 28 + "".join(f"{name:>11}" for name in COUNTED)
        for folder, counts in rows.items():
            yield f"{folder:28}" + "".join(f"{counts[name]:11,}" for name in COUNTED)

    def _docstring_lengths(self) -> str:
        """The lengths of public docstrings, of which a small file may have none."""
        if not self.docstrings:
            return "public docstrings: none"
        median = statistics.median(self.docstrings)
        mean = statistics.mean(self.docstrings)
        return f"public docstrings: median {median:g} lines, mean {mean:.1f}"


def has_two_subjects(tree: ast.Module) -> bool:
    """Whether the docstring of a file says that the file may be two files."""
    first, *others = re.split(r"\n\n+", ast.get_docstring(tree) or "")
    sentence = re.split(r"\.\s", first)[0]
    if re.search(r",\sand\s", sentence):  # "loss and norm" may be one subject
        return True
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    starts = (re.match(r"`(\w+)`", each) for each in others)
    return any(start is not None and start[1] in classes for start in starts)


def parts_of_run(node: ast.AST) -> set[str] | None:
    """The parts of the `Run` that a class or a function uses, or None if it takes no `Run`.

    Methods are counted with their class.
    """
    if isinstance(node, ast.ClassDef):
        starts = [each for each in node.body if getattr(each, "name", "") == "__init__"]
        if not starts or not takes_run(starts[0]):
            return None
    elif not takes_run(node) or has_self(node):
        return None
    parts = set()
    for each in ast.walk(node):
        if not isinstance(each, ast.Attribute):
            continue
        owner = ast.unparse(each.value)
        if owner in ("run", "self.run", "self._run"):
            parts.add(each.attr)
    return parts


def takes_run(node: ast.AST) -> bool:
    """Whether a function has an argument `run: Run`."""
    if not isinstance(node, ast.FunctionDef):
        return False
    for each in [*node.args.args, *node.args.kwonlyargs]:
        if each.arg == "run" and each.annotation is not None:
            return ast.unparse(each.annotation).startswith("Run")
    return False


def has_self(node: ast.AST) -> bool:
    """Whether a function is a method."""
    if not isinstance(node, ast.FunctionDef) or not node.args.args:
        return False
    return node.args.args[0].arg in ("self", "cls")


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
        if each.is_dir():
            for folder in [each, *each.rglob("*/")]:
                shape.add_folder(folder)
    print(shape.report())


if __name__ == "__main__":
    main(sys.argv[1:])
