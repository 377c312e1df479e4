"""Lines of committed Python. A commit lowers the ceilings to what it reached; none raises them."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CEILINGS = {
    "product": (("healcore", "adapters"), 36_531),
    "tests": (("tests",), 31755),
    "benchmarks": (("benchmarks",), 8903),
}
"""Part -> its folders, and the most lines."""


@pytest.mark.parametrize("part", CEILINGS)
def test_no_more_lines_than_before(part: str):
    folders, ceiling = CEILINGS[part]
    command = ["git", "-C", str(ROOT), "ls-files", *(f"{each}/*.py" for each in folders)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("not a git checkout")
    files = [path for each in found.stdout.split() if (path := ROOT / each).exists()]
    lines = sum(path.read_bytes().count(b"\n") for path in files)
    assert lines <= ceiling, f"{part}: {lines} lines; delete something, or state why in the issue"
