"""Each floor imports only those below it, and a reader of one healthy step walks a short way."""

import ast
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from types import FrameType

import torch

from healcore.torch import attach

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


RUN = "healcore.runtime.run."
JOINERS = ("run", "construction", "start", "")
"""They import all parts of a run: `Run` names them, `construction` makes them."""


def imports_when_run(path: Path) -> set[str]:
    """The modules that a file imports at its import, without those for type checkers only."""
    tree = ast.parse(path.read_text())
    checks = [node for node in tree.body if ast.unparse(node).startswith("if TYPE_CHECKING")]
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    typed = {each for check in checks for each in ast.walk(check)}
    return {node.module or "" for node in nodes if node not in typed}


def test_the_parts_of_a_run_have_no_circle():
    """A part is a folder, or a file directly in `runtime/run`. It imports only parts below it."""
    folder = ROOT / "runtime" / "run"
    below: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        part = path.relative_to(folder).with_suffix("").parts[0].removeprefix("__init__")
        names = {name for name in imports_when_run(path) if name.startswith(RUN)}
        names = {name.removeprefix(RUN).partition(".")[0] for name in names}
        below.setdefault(part, set()).update(names - {part})
    parts = {name: names for name, names in below.items() if name not in JOINERS}
    assert [name for name, names in parts.items() if names & {*JOINERS}] == []
    levels: list[set[str]] = []
    while rest := parts.keys() - {*chain(*levels)}:
        done = {*chain(*levels)}
        levels.append({name for name in rest if parts[name] <= done})
        assert levels[-1], f"a circle among {sorted(rest)}"


def test_a_healthy_torch_step_is_short():
    """From `observe` to the end of `optimizer.step()`, without comprehensions."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    heal = attach(optimizer, "default")
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and "/healcore/" in file and (name[0] != "<" or name == "<lambda>"):
            calls[file] += 1

    for _ in range(30):
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        calls.clear()
        sys.setprofile(count)
        heal.observe(loss)
        optimizer.step()
        sys.setprofile(None)
        optimizer.zero_grad()
    assert len(calls) <= 16, calls  # and the engine's step, which is recorded
    assert calls.total() <= 55, calls
