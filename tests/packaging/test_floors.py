"""Each floor of the architecture imports only those below it, or itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "healcore"
BASE = ("adapter_registry", "checkpoint_contents", "console", "regular_file")
"""Modules of the package itself that every floor may import."""
FLOORS = (
    ("healcore.core", *(f"healcore.{name}" for name in BASE)),
    ("healcore.policy",),
    ("healcore.events",),
    ("healcore.history",),
    ("healcore.runtime",),
    ("healcore.demo",),
    ("healcore.tools",),
)
"""From the lowest; a module is on the first floor that lists a prefix of its name."""
MODULES = sorted(
    path
    for floor in ("core", "policy", "events", "history", "runtime", "demo")
    for path in (ROOT / floor).rglob("*.py")
)


def floor_of(module: str) -> int | None:
    """The number of a module's floor; None: of another package, or above them all."""
    for number, names in enumerate(FLOORS):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return number
    return None


def imports_of(path: Path) -> set[str]:
    """The modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return {name for name in found if name.startswith("healcore.")}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path):
    module = ".".join(("healcore", *path.relative_to(ROOT).with_suffix("").parts))
    own = floor_of(module.removesuffix(".__init__"))
    assert own is not None
    above = {name for name in imports_of(path) if (floor_of(name) or 0) > own}
    assert not above, f"{module} is below {', '.join(sorted(above))}"


ADAPTERS = ROOT.parent / "adapters"
PARTS = ("core", "policy", "events", "history", "runtime", "extras", *BASE)
BELOW_TOOLS = tuple(f"healcore.{name}" for name in PARTS)


@pytest.mark.parametrize(
    "path", sorted(ADAPTERS.rglob("*.py")), ids=lambda path: str(path.relative_to(ADAPTERS))
)
def test_adapters_import_no_tools(path):
    own = f"healcore.{path.relative_to(ADAPTERS).parts[0]}"
    allowed = (*BELOW_TOOLS, own)
    if path.name == "demo.py":  # a training loop as a user would write it
        own_names = ("demo", "Checkpoints", "Healer", "Logging", "RunStopped")
        allowed += tuple(f"healcore.{name}" for name in own_names)
    others = {
        name
        for name in imports_of(path)
        if not any(name == each or name.startswith(f"{each}.") for each in allowed)
    }
    assert not others, f"an adapter imports {', '.join(BELOW_TOOLS)} and its own, not {others}"


@pytest.mark.parametrize(
    "path",
    sorted(
        each
        for each in ROOT.rglob("*.py")
        if each.relative_to(ROOT).parts[0] not in ("jax", "torch", "policies")
    ),
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_only_the_registry_imports_an_adapter_by_name(path):
    """And `healcore/__init__.py`, for `healcore.torch` and `healcore.jax` as attributes."""
    calls = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__")
    ]
    named = [ast.unparse(call) for call in calls if not isinstance(call.args[0], ast.Constant)]
    adapters = ("healcore.torch", "healcore.jax")
    named += [text for text in map(ast.unparse, calls) if any(each in text for each in adapters)]
    if str(path.relative_to(ROOT)) in ("adapter_registry.py", "__init__.py"):
        return
    assert not named, f"write adapter_registry.find(framework, need) instead of {named}"
