"""Each floor imports only those below it."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2] / "healcore"
ADAPTERS = ROOT.parent / "adapters"
BASE = ("adapter_registry", "checkpoint_contents", "console", "regular_file")
"""Modules of the package itself that every floor may import."""
FLOORS: list[tuple[str, ...]] = [("core", *BASE)]
FLOORS += [(name,) for name in ("policy", "events", "history", "runtime", "tools")]
"""From the lowest; a module is on the first floor that lists a prefix of its name."""


def below(module: str, names: tuple[str, ...]) -> bool:
    """Whether a module is one of these modules of healcore, or within one."""
    return any(f"{module}.".startswith(f"healcore.{name}.") for name in names)


def floor_of(module: str) -> int:
    """The number of a module's floor, or -1 for another package, or a module above all floors."""
    for number, names in enumerate(FLOORS):
        if below(module, names):
            return number
    return -1


def imports_of(path: Path) -> set[str]:
    """The modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return found


def test_imports_go_down():
    for folder, *_ in FLOORS[:-1]:
        for path in (ROOT / folder).rglob("*.py"):
            imported = imports_of(path)
            if folder == "core":
                roots = {name.partition(".")[0] for name in imported}
                assert not roots & {"jax", "torch", "optax"}, path
            module = ".".join(("healcore", *path.relative_to(ROOT).with_suffix("").parts))
            own = floor_of(module.removesuffix(".__init__"))
            assert own >= 0
            assert [name for name in imported if floor_of(name) > own] == [], path


def test_adapters_import_no_tools():
    for path in sorted(ADAPTERS.rglob("*.py")):
        allowed = tuple(name for floor in FLOORS[:5] for name in floor)
        allowed += (path.relative_to(ADAPTERS).parts[0],)
        ours = (name for name in imports_of(path) if name.startswith("healcore."))
        assert [name for name in ours if not below(name, allowed)] == [], path


IMPORTING = ("import_module", "__import__")


def imports_an_adapter(call: ast.Call) -> bool:
    """Whether a call imports an adapter by its name, or any module by a name that it computes."""
    function = ast.unparse(call.func).rpartition(".")[2]
    if function not in IMPORTING:
        return False
    is_computed = not isinstance(call.args[0], ast.Constant)
    text = ast.unparse(call)
    return is_computed or "healcore.torch" in text or "healcore.jax" in text


def test_only_the_registry_imports_an_adapter_by_name():
    """And `healcore/__init__.py`, for `healcore.torch` and `healcore.jax` as attributes."""
    for folder, *_ in FLOORS:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    assert not imports_an_adapter(node), f"{path}: use adapter_registry.find"
