"""The pages for developers name what exists."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
walks = SimpleNamespace(**runpy.run_path(str(ROOT / ".ci" / "walks.py")))


@pytest.fixture(scope="module")
def code():
    return walks.Definitions()


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "tests/README.md"])
def test_the_files_and_functions_that_a_page_for_developers_names_exist(code, page):
    """`engine.py:step`, or a file of the tests or of the root."""
    wrong = []
    for file, name, _ in walks.QUOTED.findall((ROOT / page).read_text()):
        if file and not code.has(file, name) and not (ROOT / file).is_file():
            wrong.append(f"{file}:{name}")
    assert wrong == []
