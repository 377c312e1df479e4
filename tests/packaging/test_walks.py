"""The walks of CONTRIBUTING.md name what exists, and what a real run calls."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
walks = SimpleNamespace(**runpy.run_path(str(ROOT / ".ci" / "walks.py")))


@pytest.fixture(scope="module")
def code():
    return walks.Definitions()


def test_each_walk_of_the_text_has_a_run():
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("walks through the code\n")[2]
    section = section.partition("\n## ")[0]
    assert re.findall(r"^\*\*(.*)\*\*$", section, flags=re.M) == list(walks.WALKS)


@pytest.mark.parametrize("heading", walks.WALKS)
def test_what_a_walk_names_exists(code, heading):
    assert len(list(walks.named(heading))) > 5
    assert walks.not_defined(heading, code) == []


def test_a_wrong_name_is_noticed(code):
    assert code.has("loop.py", "Loop.after_step")
    assert not code.has("loop.py", "Loop.no_such_method")
    assert not code.has("no_such_file.py", "")
    assert not code.has("", "no_such_function")
    trace = walks.Trace()
    trace.functions[
        "adapters/jax/optimizer_step.py", "OptimizerStep.take_or_skip.<locals>.keep"
    ] = None
    assert trace.has_called("optimizer_step.py", "OptimizerStep.take_or_skip")
    assert not trace.has_called("commit.py", "commit")
    assert not trace.has_called("transform.py", "OptimizerStep.take_or_skip")


@pytest.mark.slow  # five runs in torch and JAX, and one that is killed: 15 s of CPU time
def test_what_the_walks_name_is_called():
    done = subprocess.run(
        [sys.executable, ".ci/walks.py"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "tests/README.md"])
def test_the_files_and_functions_that_a_page_for_developers_names_exist(code, page):
    """`engine.py:step`, or a file of the tests or of the root."""
    wrong = []
    for file, name, _ in walks.QUOTED.findall((ROOT / page).read_text()):
        if file and not code.has(file, name) and not (ROOT / file).is_file():
            wrong.append(f"{file}:{name}")
    assert wrong == []
