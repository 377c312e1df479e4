"""The examples of docstrings run, and the names in backticks exist."""

import ast
import builtins
import doctest
import importlib
import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "adapters").rglob("*.py"), *(ROOT / "healcore").rglob("*.py")])
"""`rglob` does not follow links, so the files of the adapters are here once."""
TREES = {path: ast.parse(path.read_text()) for path in FILES}


def module_of(path: Path) -> str:
    """The name by which a file is imported: `adapters/jax` is installed as `healcore.jax`."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "adapters":
        parts[0] = "healcore"
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


# -- examples -----------------------------------------------------------------------------------

WITH_EXAMPLES = [
    module_of(path) for path in FILES if re.search(r"^ *>>> ", path.read_text(), flags=re.M)
]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_the_examples_run(module: str):
    importlib.import_module(module)
    loaded = sys.modules[module]
    done = doctest.testmod(loaded)
    assert done.attempted > 0
    assert done.failed == 0


# -- names --------------------------------------------------------------------------------------

NAME = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)(?:\(\))?`(?!`)")
LIBRARIES = {
    "dataclasses", "deepspeed", "flax", "jax", "json", "lax", "logging", "multihost_utils", "optax",
    "rich", "torch",
}  # fmt: skip
"""First parts of the names of other libraries. Own names begin with `healcore` or are shorter."""
WITHOUT_MEMBERS = {"Enum", "Generic", "NamedTuple", "Protocol", "TypedDict"}
"""Base classes from which a class gets no member that a docstring names."""
FILE_TYPES = {"json", "jsonl", "lock", "pt"}
OTHER_NAMES = {
    # JAX, optax
    "DictKey", "b2", "cond", "inference", "pmap", "pmean", "pprof", "shard_map", "vmap",
    # torch and its data loaders
    "DistributedSampler", "StatefulDataLoader", "collate_fn", "init_process_group", "no_sync",
    "unscale_",
    # trainers
    "ModelCheckpoint", "load_checkpoint", "log_every_n_steps", "num_input_tokens_seen", "predict",
    "report_to", "restore_callback_states_from_checkpoint", "save_hyperparameters",
    # options and classes of the systems whose policies are published
    "KillLossSpike", "SkipStepConfig", "SkipStepOptimizer", "SpikeDetection",
    "drop_norm_by_grad_norm_ema", "drop_norm_by_grad_norm_stddev", "grad_norm_skip_threshold",
    "is_unexpectedly_large", "loss_watchdog_threshold", "skip_and_clip_by_global_norm",
    "skip_step_on_spikes",
    # Python and the shell
    "basicConfig", "tr",
    # made in an example or by a name at run time
    "OPTIMIZER", "PARAMETER", "dataset", "heal_action", "heal_cause", "heal_grad_scale",
    "heal_rollback_depth", "heal_skip", "observed_skips", "v0", "v1", "zclip_z_threshold",
}  # fmt: skip
"""Names in docstrings that are not of this code."""


class CodeBase:
    """The names that the code defines or uses.

    Attributes:
        names: every identifier, keyword, file and folder of the code, and every word of a short
            string, which may be the key of a policy or of an event.
        modules: what a module or package has, by the last part of its name. Two modules of the same
            name are one entry; so are two classes.
        classes: the members of a class.
        bases: the names of the base classes of a class.
        functions: names of functions on the level of a module.
    """

    def __init__(self) -> None:
        self.names: set[str] = {*dir(builtins), *OTHER_NAMES}
        self.modules: defaultdict[str, set[str]] = defaultdict(set)
        self.classes: defaultdict[str, set[str]] = defaultdict(set)
        self.bases: defaultdict[str, set[str]] = defaultdict(set)
        self.functions: set[str] = set()
        self.modules["healcore"].add("policies")  # a folder without Python files
        for path, tree in TREES.items():
            self._add_module(module_of(path).split("."), tree)
        self.members: set[str] = set().union(*self.classes.values())

    def _add_module(self, parts: list[str], tree: ast.Module) -> None:
        self.names.update(parts)
        for parent, child in itertools.pairwise(parts):
            self.modules[parent].add(child)
        for node in tree.body:
            self.modules[parts[-1]].update(defined_by(node))
            if isinstance(node, ast.FunctionDef):
                self.functions.add(node.name)
        for node in ast.walk(tree):
            self.names.update(identifiers(node))
            if isinstance(node, ast.ClassDef):
                self._add_class(node)

    def _add_class(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            self.bases[node.name].add(ast.unparse(base).partition("[")[0].split(".")[-1])
        for each in node.body:
            self.classes[node.name].update(defined_by(each))
        for each in ast.walk(node):
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                self.classes[node.name].add(each.attr)

    def has(self, name: str) -> bool:
        """Whether a name from a docstring exists, such as `judge` or `Engine.step`."""
        first, *others = name.strip(".").split(".")
        if first in LIBRARIES and others:
            return True
        if others and others[-1] in FILE_TYPES:
            return True
        if others == ["py"]:
            return first in self.modules
        if first not in self.names:
            return False
        owner = first
        for member in others:
            if not self._has_member(owner, member):
                return False
            owner = member
        return True

    def _has_member(self, owner: str, member: str) -> bool:
        """Whether a class, module, table of a policy or variable may have a member."""
        if member in self.modules[owner]:
            return True
        if owner not in self.classes:
            # A variable: its members are those of classes, here or in another library. A constant
            # is a member of its module or class only.
            if member.isupper() and member not in OTHER_NAMES:
                return False
            is_attribute = member in self.members or member not in self.functions
            return is_attribute and member in self.names
        if member in self.classes[owner]:
            return True
        bases = self.bases[owner] - WITHOUT_MEMBERS
        return any(self._has_member(base, member) for base in bases)


def defined_by(node: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module or a class defines, also within its blocks."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
        return
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            yield each.id
        elif isinstance(each, ast.FunctionDef | ast.ClassDef):
            yield each.name
        elif isinstance(each, ast.alias):
            yield each.asname or each.name
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value  # a name of `__all__`, or of a table of names imported on first use


def identifiers(node: ast.AST) -> Iterator[str]:
    """The names of one node."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.arg | ast.keyword):
        yield node.arg or ""
    elif isinstance(node, ast.alias):
        yield from node.name.split(".")
        if node.asname is not None:
            yield node.asname
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 40:
        yield from re.findall(r"\w+", node.value)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, also of attributes."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        if isinstance(node.value.value, str):
            yield node.lineno, node.value.value


@pytest.fixture(scope="module")
def code() -> CodeBase:
    return CodeBase()


def test_the_names_in_docstrings_exist(code: CodeBase):
    """A name in backticks is of this code, or is listed above as a name of another library."""
    missing = []
    for path, tree in TREES.items():
        file = path.relative_to(ROOT)
        for line, text in docstrings(tree):
            for name in NAME.findall(text):
                if not code.has(name):
                    missing.append(f"{file}:{line}: {name}")
    assert missing == []


@pytest.mark.parametrize(
    "name",
    [
        "no_such_function",
        "no_such_file.py",
        "healcore.core.no_such_module",
        "torch_reader.check_division",
        "Engine.no_such_method",
        "Held.before",
        "steps.LAG",
        "Loop.after_step.no_such_member",
    ],
)
def test_a_wrong_name_is_noticed(code: CodeBase, name: str):
    assert not code.has(name)
