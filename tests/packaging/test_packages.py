"""The packages of the distribution are listed by name: the list must equal the folders."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Where each dotted prefix lies in the checkout. The symlinks in healcore/ are for tools only.
SOURCES = {
    "healcore": "healcore",
    "healcore.jax": "adapters/jax",
    "healcore.torch": "adapters/torch",
    "healcore.policies": "policies",
}


def settings() -> dict:
    """Return the table [tool.setuptools] of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def packages_in(folder: Path, prefix: str) -> set[str]:
    """Return the dotted names of the folders with Python files, not following symlinks."""
    found = set()
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).parts[:-1]
        if not any((folder.joinpath(*parts[: i + 1])).is_symlink() for i in range(len(parts))):
            found.add(".".join((prefix, *parts)))
    return found


def test_package_list_equals_the_folders():
    found = set().union(*(packages_in(ROOT / path, name) for name, path in SOURCES.items()))
    listed = settings()["packages"]
    lines = "\n".join(f'    "{name}",' for name in sorted(found))
    assert listed == sorted(found), f"write in [tool.setuptools] packages:\n{lines}"


def test_symlinks_stand_for_the_mapped_folders():
    for name in ("jax", "torch", "policies"):
        link = ROOT / "healcore" / name
        assert link.is_symlink(), f"healcore/{name} must be a symlink: pytest and pyright need it"
        assert link.resolve() == ROOT / SOURCES[f"healcore.{name}"]


def test_dependencies_are_pinned_for_the_makefile():
    """Whatever the Makefile installs has its version in the lock file."""

    def name_of(requirement: str) -> str:
        return re.sub(r"[-_.]+", "-", re.split(r"[\s<>=!~\[;]", requirement)[0]).lower()

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {name_of(r) for r in project["dependencies"]}
    extras = project["optional-dependencies"]
    del extras["deepspeed"]  # .ci/run installs it, by hashes of its own
    for requirements in extras.values():
        wanted |= {name_of(r) for r in requirements} - {"healcore"}  # one extra naming others
    for tools in ("lint", "bench", "docs", "release"):
        text = (ROOT / "requirements" / f"{tools}.txt").read_text()
        rows = [line.split("#")[0].strip() for line in text.splitlines()]
        wanted |= {name_of(r) for r in rows if r and not r.startswith("-")}
    lock = (ROOT / "requirements" / "lock.txt").read_text().splitlines()
    pins = [line for line in lock if line and not line.startswith("#")]
    assert all("==" in pin for pin in pins)
    assert pins[0].startswith("torch==")
    assert wanted <= {name_of(pin) for pin in pins}


def test_the_lowest_versions_are_those_of_pyproject():
    """`make test-lowest` runs with each lower bound, but for patch releases that are withdrawn."""
    text = (ROOT / "requirements" / "lowest.txt").read_text()
    lowest = dict(re.findall(r"^(?:# )?([\w-]+)==(\S+)", text, re.M))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra, lines in project["optional-dependencies"].items():
        wanted += lines if extra not in ("dev", "deepspeed", "all") else []
    for line in wanted:
        name, _, bound = line.partition(">=")
        if bound:
            found = lowest[name]
            assert f"{found}.".startswith(f"{bound}."), f"{name} {found}: make lock"


def test_every_pin_but_torch_has_a_hash():
    """The packages that `make` installs are pinned by hash, not only by version."""
    lock = (ROOT / "requirements" / "lock.txt").read_text().splitlines()
    pins = {line.replace("_", "-") for line in lock if "==" in line and not line.startswith("#")}
    hashed = {}
    for path in sorted((ROOT / "requirements" / "hashed").glob("*.txt")):
        text = path.read_text().replace("\\\n", "")
        for line in text.splitlines():
            if not line.startswith("#"):
                pin, *hashes = line.split()
                assert hashes, f"{path.name}: {pin} has no hash"
                assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes)
                hashed[pin] = path.name
    (torch,) = (pin for pin in pins if pin.startswith("torch=="))
    assert set(hashed) == pins - {torch}
