"""The wheel, built by way of the sdist from a copy of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ["healcore", "adapters", "policies"]
FILES = ["pyproject.toml", "README.md", "LICENSE"]


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Built without isolation (no download), and in a copy: a build litters its tree."""
    copy = tmp_path_factory.mktemp("checkout")
    for part in PARTS:
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / part, copy / part, symlinks=True, ignore=ignore)
    for file in FILES:
        shutil.copy(ROOT / file, copy / file)
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PIP_NO_INDEX": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def wheel_files(dist: Path) -> list[str]:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if not name.endswith("/")]


def test_no_other_top_level_name(dist):
    top = {name.split("/")[0] for name in wheel_files(dist)}
    (info,) = (name for name in top if name.endswith(".dist-info"))
    assert top == {"healcore", info}


def test_every_source_file_is_in_the_wheel(dist):
    places = {"healcore": "healcore", "adapters/jax": "healcore/jax",
              "adapters/torch": "healcore/torch", "policies": "healcore/policies"}  # fmt: skip
    wanted = set()
    for source, target in places.items():
        for base, folders, names in os.walk(ROOT / source):  # does not follow symlinks
            folders[:] = [f for f in folders if f != "__pycache__"]
            for name in names:
                if name.endswith((".py", ".toml", ".css", ".js", ".html")) or name == "py.typed":
                    wanted.add(str(target / (Path(base) / name).relative_to(ROOT / source)))
    got = {name for name in wheel_files(dist) if ".dist-info/" not in name}
    assert got == wanted


def test_sdist_carries_the_licence_and_no_tests(dist):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md"} <= names
    assert not any(name.startswith("tests/") for name in names)
