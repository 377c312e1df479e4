"""Writes lowest.txt: the lowest versions that pyproject.toml allows (`make lock`).

Only what pyproject.toml names is at its lowest; what these packages need is at its newest, as pip
would install it. Torch and the packages of CUDA are left out: the Makefile installs torch by its
version.

    python requirements/make_lowest.py UV     UV: the program `uv`
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from make_lock import comes_with_torch, report
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent
LOWEST = HERE / "lowest.txt"
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "jsonschema", "chex")
"""At the versions of lock.txt: they run the tests."""
HEADER = """\
# Made by make_lowest.py: the lowest versions that pyproject.toml allows, for `make test-lowest`.
# The hashes are of the files for Python 3.11 on Linux (x86_64). Not in this file, because its hash
# depends on the machine:
# torch=={torch}

"""


def main() -> None:
    """Resolves with uv, asks pip for the hashes, and writes both without torch."""
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (HERE / "lock.txt").read_text(), re.M))
    command = [sys.argv[1], "pip", "compile", "--quiet", "--resolution", "lowest-direct"]
    command += ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"]
    command += ["--only-binary", ":all:", "--no-header", "--no-annotate", "--extra", "all"]
    command += [str(HERE.parent / "pyproject.toml"), "-"]
    done = subprocess.run(
        command, input="".join(f"{name}=={pins[name]}\n" for name in TOOLS),
        capture_output=True, text=True, check=False, cwd=HERE.parent,
    )  # fmt: skip
    if done.returncode:
        sys.exit(done.stderr)
    lowest = dict(re.findall(r"^([\w-]+)==(\S+)$", done.stdout, re.M))
    torch = lowest.pop("torch")
    lines = [f"{name}=={lowest[name]}" for name in lowest if not comes_with_torch(name)]
    text = HEADER.format(torch=torch)
    for item in sorted(report(["--no-deps", *lines]), key=_name):
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        version = item["metadata"]["version"]
        text += f"{_name(item)}=={version} \\\n    --hash=sha256:{digest}\n"
    LOWEST.write_text(text)


def _name(item: Any) -> str:
    return canonicalize_name(item["metadata"]["name"])


if __name__ == "__main__":
    main()
