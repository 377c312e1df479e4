"""The table of tests/README.md that names the tests of each module of a run."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = ROOT / "healcore" / "runtime" / "run"
TITLE = "## Where a module of a run is tested"
SECTION = (ROOT / "tests" / "README.md").read_text().partition(TITLE)[2].partition("\n## ")[0]
ROWS = {
    module: re.findall(r"`([^`]+)`", cell)
    for module, cell in re.findall(r"^\| `([^`]+)` \| (.+) \|$", SECTION, re.M)
}
"""Module, relative to `RUN` -> test files, relative to `ROOT`."""


def test_each_module_has_one_row():
    modules = {str(path.relative_to(RUN)) for path in RUN.rglob("*.py")}
    modules = {each for each in modules if not each.endswith("__init__.py")}
    assert modules - {*ROWS} == set(), "add rows to tests/README.md"
    assert {*ROWS} - modules == set(), "remove these rows of tests/README.md"


def test_the_test_files_exist_and_one_with_the_name_of_its_module_is_named():
    for module, files in ROWS.items():
        assert files, module
        for file in files:
            assert (ROOT / file).is_file(), f"{module}: {file}"
        folder, _, name = module.rpartition("/")
        own = "/".join(filter(None, ["tests/runtime/run", folder, f"test_{name}"]))
        if (ROOT / own).is_file():
            assert own in files, module
