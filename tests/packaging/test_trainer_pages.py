"""The programs of docs/trainers run, and docs/evidence.md has the pinned versions."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests import forked_programs
from tests.packaging.test_pages import DOCS, snippet, text

ROOT = DOCS.parent
IMPORTS = (*forked_programs.TRANSFORMERS, "lightning", "torchdata.stateful_dataloader")
PROGRAMS = {
    "Trainer": ("trainers/huggingface.md", "from transformers import Trainer"),
    "Lightning": ("trainers/others.md", "import lightning\n"),
    "Fabric": ("trainers/others.md", "from lightning.fabric import Fabric"),
    "Accelerate": ("trainers/others.md", "from accelerate import Accelerator"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_runs(name: str, tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(snippet(*PROGRAMS[name]))
    done = forked_programs.run(program, cwd=tmp_path, imports=IMPORTS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "healcore: completed after step" in done.stderr
    if name == "Trainer":  # one epoch of 125 steps with 8 rows each
        assert "completed after step 125: skipped 1 step" in done.stderr


def test_the_versions_are_the_pinned_ones():
    page = text("evidence.md")
    table = re.findall(r"^([\w-]+) \| ([\d.]+) \| ([\d.]+)$", page, flags=re.M)
    (others,) = re.findall(r"^Also run: (.*)\.$", page, flags=re.M)
    pins = {}
    for file in ("requirements/lock.txt", ".ci/deepspeed.txt"):
        pins |= dict(re.findall(r"^([\w-]+)==([^\s\\;]+)", (ROOT / file).read_text(), flags=re.M))
    stated = {name: version for name, version, _ in table}
    stated |= dict(each.split() for each in others.split(", "))
    assert len(stated) > 15
    assert stated == {name: pins[name] for name in stated}
    project: Any = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = [extras[name] for name in extras if name not in ("dev", "all", "report")]
    bounds = dict(line.split(">=") for lines in named for line in lines if ">=" in line)
    assert {name: lowest for name, _, lowest in table} == bounds
