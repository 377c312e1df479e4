"""Which code each result file in benchmarks/results depends on, and whether that code has changed.

Each result file has a digest (`source`) of this code. If the digest of the present code differs,
the code has changed since `COMMIT`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.healbench.code_digest import code_of, code_without_names
from benchmarks.healbench.running import DECIDING

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
COMMIT = "81f07582"
"""Commit whose code has made all results. Whoever makes a result again makes all of them again."""
ADAPTERS = tuple(
    f"adapters/{name}/{part}" for name in ("torch", "jax") for part in ("*", "driver/**/*")
)
HEALCORE = (*DECIDING, *ADAPTERS)
DEPENDS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "step_overhead": ("python benchmarks/step_overhead.py", HEALCORE, ("default", "zclip")),
    "rollback": (
        "python benchmarks/rollback.py",
        ("healcore/runtime/store", "adapters/torch/store/**/*", "adapters/jax/store/**/*"),
        (),
    ),
    "detectors": (
        "python benchmarks/detectors.py FOLDER",
        (
            "healcore/core",
            "healcore/policy",
            "benchmarks/labelled_runs",
            "benchmarks/published_rules",
        ),
        ("default", "pretraining", "aggressive", "conservative"),
    ),
    "recoveries": (
        "python -m benchmarks.recoveries",
        (*DECIDING, "adapters/torch/*", "adapters/torch/driver/**/*", "benchmarks/healbench/tasks"),
        ("default", "pretraining"),
    ),
    "goodput": (
        "python -m benchmarks.goodput",
        ("benchmarks/goodput/simulation", "benchmarks/goodput/parameters"),
        (),
    ),
    "demo": (
        "python -m benchmarks.demo",
        (*HEALCORE, "healcore/demo", "healcore/runtime/incidents"),
        ("default",),
    ),
    "zclip_table": (
        "python -m benchmarks.zclip_table",
        HEALCORE,
        ("default", "pretraining", "zclip", "zclip-1.0.0", "zclip-paper"),
    ),
}
"""Result file -> its command, the code that its numbers depend on, and the policies that it uses.
A path is a file without its suffix, a folder, or a pattern. The command's own code counts too."""
INPUTS = {"goodput": ("recoveries", "rollback")}
"""Result file -> other result files that its command reads."""
TEXTS = ("description", "references")
"""Keys of a policy file that decide nothing."""
NOTES = ("machine", "load", "source")
"""Keys of a result file that are no results."""


def source(name: str, root: Path = ROOT) -> str:
    """Digest of the code, policies and inputs that a result file depends on.

    Comments, docstrings, messages, layout and names that the code defines do not change it.
    """
    _, code, policies = DEPENDS[name]
    files = {file for path in code for file in _files(root, path)}
    command = root / "benchmarks" / f"{name}.py"
    parts = [code_of(command if command.exists() else root / f"benchmarks/{name}/__main__.py")]
    parts.append(code_without_names(sorted(files)))
    for policy in policies:
        data = tomllib.loads((root / "policies" / f"{policy}.toml").read_text())
        data = {key: value for key, value in data.items() if key not in TEXTS}
        parts.append(json.dumps(data, sort_keys=True))
    for other in INPUTS.get(name, ()):
        measured = json.loads((root / "benchmarks/results" / f"{other}.json").read_text())
        measured = {key: value for key, value in measured.items() if key not in NOTES}
        parts.append(json.dumps(measured, sort_keys=True))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _files(root: Path, path: str) -> Iterator[Path]:
    if "*" in path:
        yield from root.glob(f"{path}.py")
    else:
        yield from (root / path).rglob("*.py")
        yield from root.glob(f"{path}.py")


def stale_results() -> list[str]:
    """The result files whose code, policies or inputs have changed, each with its command."""
    stale = []
    for name, (command, *_) in DEPENDS.items():
        found, present = read_result(name).get("source"), source(name)
        if found != present:
            stale.append(f"{name}.json: made by {found}, now {present}: {command} --json ...")
    return stale


@functools.cache
def read_result(name: str) -> dict[str, Any]:
    """The content of a result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())
