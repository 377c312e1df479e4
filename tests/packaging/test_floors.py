"""Each floor of the architecture imports only those below it, or itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "healcore"
FLOORS = (
    ("healcore.core",),
    ("healcore.policy",),
    ("healcore.runtime.events", "healcore.runtime.forking"),
    ("healcore.history",),
    ("healcore.runtime",),
    ("healcore.tools", "healcore.demo"),
)
"""From the lowest; a module is on the first floor that has its name's beginning."""
MODULES = sorted(
    path
    for floor in ("core", "policy", "history", "runtime")
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
    # `from healcore.runtime import forking` names its folder too, which is no import of its floor.
    above -= {name for name in above if any(n.startswith(f"{name}.") for n in imports_of(path))}
    assert not above, f"{module} is below {', '.join(sorted(above))}"
