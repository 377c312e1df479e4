"""The example is rolled back under DeepSpeed, and completes; so do the snippets of the page."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.quoted_lines import check_lines
from tests.packaging.page_text import blocks
from tests.torch.forked_ranks import free_port

pytest.importorskip("deepspeed", reason="run by make test-deepspeed")

ROOT = Path(__file__).parents[2]


def run(*command: str, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if "RANK" not in name}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = (sys.executable, *command)
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def test_the_example_rolls_back_and_ends_with_a_low_loss(tmp_path: Path):
    out = run("examples/deepspeed_engine.py", str(tmp_path), cwd=ROOT)
    match = re.search(r"^loss (\S+), steps 400, rollbacks [1-9]", out, re.MULTILINE)
    assert match, out
    assert float(match[1]) < 0.45  # guessing the mean of sin() gives 0.5


LAUNCHED = f"""
import os
os.environ |= {{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}}
os.environ["MASTER_PORT"] = "{free_port()}"
"""


@pytest.mark.parametrize("library", ["deepspeed", "arctic_training"])
def test_the_snippet_of_the_page_prints_what_the_page_says(library: str, tmp_path: Path):
    pytest.importorskip(library)
    page = f"trainers/{library.partition('_')[0]}.md"
    (program,) = blocks(page)
    (tmp_path / "program.py").write_text(LAUNCHED + program)
    out = run("program.py", cwd=tmp_path)
    if library == "deepspeed":  # ArcticTraining's class trains nothing by itself
        check_lines(page, out)
