"""Builds what a release uploads, and installs it as a user does (`make release-check`).

    python .ci/release_check.py            each extra, in an environment of its own (9 minutes)
    python .ci/release_check.py --quick    the core and `report`; what CI runs (2 minutes)
    python .ci/release_check.py --newest   not the locked versions but the newest ones

Checks the version in all places, builds the sdist and from it the wheel, lets twine check the
metadata, installs the wheel with each extra into a clean environment, and runs a smoke test there.
The extra `deepspeed` compiles itself beside torch: `make test-deepspeed` tests it.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements" / "lock.txt"
PARTS = ("healcore", "adapters", "policies")
FILES = ("pyproject.toml", "README.md", "LICENSE")
"""What a release is built from, with the folders in `PARTS`."""
QUICK = ("core", "report")
ELSEWHERE = ("deepspeed", "dev")
"""Extras that this script does not install. `make test-deepspeed` and `make test` use them."""


def main() -> None:
    """Runs all checks; ends at the first that fails."""
    started = time.monotonic()
    version = check_version()
    with tempfile.TemporaryDirectory(prefix="release-check-") as folder:
        wheel = build(Path(folder), version)
        for extra in QUICK if "--quick" in sys.argv[1:] else extras():
            begun = time.monotonic()
            install_and_try(wheel, extra, Path(folder) / "venv")
            print(f"{extra}: ok, {time.monotonic() - begun:.0f} s", flush=True)
    print(f"release {version}: ok, {time.monotonic() - started:.0f} s")


def extras() -> list[str]:
    """The core and every extra, from pyproject.toml."""
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return ["core", *(each for each in found["optional-dependencies"] if each not in ELSEWHERE)]


def check_version() -> str:
    """Compares the version of the package with CITATION.cff and CHANGELOG.md.

    Between two releases the version is that of the next release, with `.dev0`. CHANGELOG.md then
    has an unreleased section of this version, and CITATION.cff names the last release.

    Returns:
        The version.
    """
    source = (ROOT / "healcore" / "__init__.py").read_text()
    version = next(
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    )
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    released = re.search(r"^## \[([\d.]+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    day = re.search(r"^date-released: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    if not (cited and released and day):
        sys.exit("CITATION.cff or CHANGELOG.md has no version or no date")
    found = {"healcore": version, "CITATION.cff": cited[1], "CHANGELOG.md": released[1]}
    if version.endswith(".dev0"):
        heading = f"## [{version.removesuffix('.dev0')}] (unreleased)"
        assert heading in (ROOT / "CHANGELOG.md").read_text(), f"CHANGELOG.md has no {heading}"
        del found["healcore"]
    assert len(set(found.values())) == 1, f"different versions: {found}"
    assert day[1] == released[2], f"different dates: {day[1]} in CITATION.cff, {released[2]}"
    return version


def build(folder: Path, version: str) -> Path:
    """Builds the sdist, then the wheel from it, and checks the metadata of both.

    Builds from a copy: the sdist would contain the files that a stale egg-info of the checkout
    lists.

    Returns:
        The wheel.
    """
    dist, copy = folder / "dist", folder / "checkout"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for part in PARTS:
        shutil.copytree(ROOT / part, copy / part, symlinks=True, ignore=ignore)
    for file in FILES:
        shutil.copy(ROOT / file, copy / file)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(copy))
    names = sorted(each.name for each in dist.iterdir())
    assert names == [f"healcore-{version}-py3-none-any.whl", f"healcore-{version}.tar.gz"], names
    run(sys.executable, "-m", "twine", "check", "--strict", *map(str, dist.iterdir()))
    print(f"built and checked: {', '.join(names)}", flush=True)
    return dist / names[0]


def install_and_try(wheel: Path, extra: str, venv: Path) -> None:
    """Installs the wheel with an extra into a new environment, and runs the smoke test."""
    make_venv(venv)
    limits = [] if "--newest" in sys.argv[1:] else ["--constraint", str(LOCK)]
    index = os.environ.get("TORCH_INDEX")
    if index and extra in ("torch", "huggingface", "lightning", "all"):
        pip(venv, "--index-url", index, "--no-deps", *limits, "torch")  # as in the Makefile
    if extra == "core" and limits:
        hashed = LOCK.parent / "hashed" / "core.txt"
        pip(venv, "--require-hashes", "--no-deps", "-r", str(hashed))
    pip(venv, *limits, str(wheel) + (f"[{extra}]" if extra != "core" else ""))
    run(str(venv / "bin" / "python"), "-m", "pip", "check")
    smoke = "smoke_wheel.py" if extra == "core" else "smoke_extra.py"
    copy = venv.parent / smoke
    shutil.copy(ROOT / ".ci" / smoke, copy)
    argument = str(ROOT) if extra == "core" else extra
    run(str(venv / "bin" / "python"), "-I", str(copy), argument, cwd=venv.parent)
    shutil.rmtree(venv)


def make_venv(venv: Path) -> None:
    """Makes an empty environment with pip."""
    command = [sys.executable, "-m", "venv", "--clear"]
    if importlib.util.find_spec("ensurepip"):
        run(*command, str(venv))
        return
    # As in the Makefile: this pip installs a pip there.
    run(*command, "--without-pip", str(venv))
    base = str(LOCK.parent / "hashed" / "base.txt")
    arguments = ("install", "--require-hashes", "--no-deps", "-r", base)
    python = str(venv / "bin" / "python")
    run(sys.executable, "-m", "pip", "--quiet", "--python", python, *arguments)


def pip(venv: Path, *arguments: str) -> None:
    """Calls `pip install` of an environment."""
    python = str(venv / "bin" / "python")
    run(python, "-m", "pip", "--disable-pip-version-check", "-qq", "install", *arguments)


def run(*command: str, cwd: Path = ROOT) -> None:
    """Runs a command; ends with its output if it fails."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, check=False, cwd=cwd, env=clean, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{done.stdout[-6000:]}\nfailed: {' '.join(command)}")


if __name__ == "__main__":
    main()
