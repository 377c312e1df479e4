"""Writes lock.txt and hashed/*.txt: one resolve of all that the Makefile installs (`make lock`).

    python requirements/make_lock.py          the newest versions
    python requirements/make_lock.py --keep   present pins stay; for a package more or less

Versions come from one run of pip here. The hashes come from further dry runs of pip, one for each
system and Python below: pip tells those of the files that it would install there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent
LOCK = HERE / "lock.txt"
LOWEST = HERE / "lowest.txt"  # made by make_lowest.py
HASHED = HERE / "hashed"

PYTHONS = ("3.11", "3.12", "3.13")
_GLIBC = ("2_28", "2_27", "2_26", "2_24", "2_17", "2014", "2_12", "2010", "2_5", "1")
SYSTEMS = {
    "linux x86_64": [f"manylinux{'_' * ('_' in g)}{g}_x86_64" for g in _GLIBC],
    "linux aarch64": [f"manylinux{'_' * ('_' in g)}{g}_aarch64" for g in ("2_31", *_GLIBC)],
    "macos arm64": ["macosx_14_0_arm64"],
}

SETS: Mapping[str, tuple[str, ...]] = {
    "base": ("pip", "setuptools", "wheel"),
    "core": ("healcore",),
    "demo": ("healcore[jax,torch,report]",),
    "test": ("healcore[jax,torch,report,dev]",),
    "lint": ("lint.txt",),
    "bench": ("bench.txt",),
    "docs": ("docs.txt",),
    "release": ("release.txt",),
}
"""Name of a file in hashed/ -> what it is for; the Makefile and .ci/run install by these."""
AFTER = {"test": "demo", "lint": "test", "bench": "demo"}
"""Sets that are installed on top of another one, and so need not name its packages again."""

ELSEWHERE = "torch"
"""Not in hashed/: which file is meant depends on the machine (a CPU build, CUDA), and the CPU
builds come from an index of their own."""


def main() -> None:
    """Resolve, keep the header and the torch pin, replace the rest."""
    header, torch_pin, _ = re.split(r"^(torch==\S+)$", LOCK.read_text(), flags=re.M)
    wanted = [torch_pin, *SETS["base"]]
    for tools in sorted(HERE.glob("*.txt")):
        if tools not in (LOCK, LOWEST):
            wanted += _lines(tools)
    wanted.append(f"{HERE.parent}[jax,torch,report,dev]")
    if "--keep" in sys.argv[1:]:
        wanted += ["--constraint", str(LOCK)]
    # On Linux torch of PyPI needs the packages of CUDA; the CPU builds do not.
    resolved = [item for item in report(wanted) if not comes_with_torch(item["metadata"]["name"])]
    pins: dict[str, str] = {
        canonicalize_name(item["metadata"]["name"]): item["metadata"]["version"].partition("+")[0]
        for item in resolved
    }
    del pins["healcore"], pins[ELSEWHERE]
    LOCK.write_text(f"{header}{torch_pin}\n\n" + "".join(f"{n}=={pins[n]}\n" for n in sorted(pins)))
    reports = [resolved]
    for python in PYTHONS:
        for system, platforms in SYSTEMS.items():
            print(f"hashes for Python {python}, {system}", flush=True)
            reports.append(_elsewhere(pins, python, platforms))
    write_hashed(pins, resolved, reports)


def write_hashed(
    pins: Mapping[str, str], resolved: list[Any], reports: Iterable[list[Any]]
) -> None:
    """Writes the files of hashed/.

    Args:
        pins: name -> version.
        resolved: pip's report of all of them: it says what needs what.
        reports: pip's reports with the hashes, of all systems.
    """
    hashes: dict[str, set[str]] = {name: set() for name in pins}
    for item in (item for report in reports for item in report):
        name = canonicalize_name(item["metadata"]["name"])
        if name in hashes:
            hashes[name].add(item["download_info"]["archive_info"]["hashes"]["sha256"])
    closures = {name: _closure(roots, resolved) for name, roots in SETS.items()}
    HASHED.mkdir(exist_ok=True)
    for name, members in closures.items():
        before = AFTER.get(name)
        members = members - (closures[before] if before else set()) - {ELSEWHERE, "healcore"}
        if before and AFTER.get(before):
            members -= closures[AFTER[before]]
        text = f"# Made by make_lock.py: pip install --require-hashes --no-deps -r {name}.txt\n"
        for each in sorted(members):
            parts = [f"{each}=={pins[each]}", *(f"--hash=sha256:{h}" for h in sorted(hashes[each]))]
            text += " \\\n    ".join(parts) + "\n"
        (HASHED / f"{name}.txt").write_text(text)
    left = set(pins) - set().union(*closures.values())
    if left:
        raise SystemExit(f"in lock.txt, and needed by nothing: {', '.join(sorted(left))}")


def _closure(roots: Iterable[str], resolved: list[Any]) -> set[str]:
    """Everything that some requirements lead to, on any of the systems."""
    needs: dict[str, list[str]] = {
        canonicalize_name(item["metadata"]["name"]): item["metadata"].get("requires_dist", [])
        for item in resolved
    }
    needs["healcore"] = _own_requirements()
    found: set[tuple[str, str]] = set()
    todo: list[Requirement] = []
    for root in roots:
        todo += [Requirement(line) for line in (_lines(HERE / root) if ".txt" in root else [root])]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in found or name not in needs:
                continue
            found.add((name, extra))
            parts = map(Requirement, needs[name])
            todo += [each for each in parts if _holds(each, extra)]
    return {name for name, _ in found}


def _holds(requirement: Requirement, extra: str) -> bool:
    """Whether it is needed somewhere: with this extra, on one of the systems."""
    if requirement.marker is None:
        return not extra
    return any(
        requirement.marker.evaluate(
            {
                "extra": extra,
                "python_version": python,
                "python_full_version": f"{python}.0",
                "sys_platform": platform,
                "platform_system": {"linux": "Linux", "darwin": "Darwin"}[platform],
                "platform_machine": machine,
            }
        )
        for python in PYTHONS
        for platform, machine in (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"))
    )


def _own_requirements() -> list[str]:
    """Of pyproject.toml, as a wheel's metadata has them."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    found = list(project["dependencies"])
    for extra, lines in project["optional-dependencies"].items():
        found += [f'{line}; extra == "{extra}"' for line in lines]
    return found


def _elsewhere(pins: Mapping[str, str], python: str, platforms: list[str]) -> list[Any]:
    """What pip reports for another system, without the packages that have no wheel there."""
    # Only from PyPI: what this machine has beside it is in the first report.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_EXTRA", "PIP_FIND"))}
    env["PIP_CONFIG_FILE"] = os.devnull
    there = dict(pins)
    options = ["--only-binary=:all:", "--no-deps", "--target", "unused", "--implementation", "cp"]
    options += ["--python-version", python, *(f"--platform={each}" for each in platforms)]
    while True:
        try:
            return report([*options, *(f"{n}=={v}" for n, v in there.items())], env)
        except subprocess.CalledProcessError as error:
            bad = re.search(r"No matching distribution found for ([^=\s]+)==", error.stderr)
            if bad is None:
                raise
            print(f"  no wheel of {bad[1]}", flush=True)
            del there[canonicalize_name(bad[1])]


def report(arguments: list[str], env: Mapping[str, str] | None = None) -> list[Any]:
    """What pip would install, with versions and hashes."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    done = subprocess.run(
        [*command, "--report", "-", *arguments],
        check=False, capture_output=True, text=True, env=env,
    )  # fmt: skip
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        done.check_returncode()
    return json.loads(done.stdout)["install"]


def comes_with_torch(name: str) -> bool:
    """Whether a package belongs to CUDA: only torch needs it, and only on some machines."""
    name = canonicalize_name(name)
    return name == "triton" or name.startswith(("nvidia-", "cuda-"))


def _lines(path: Path) -> list[str]:
    """The requirements in a file."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("-")]


if __name__ == "__main__":
    main()
