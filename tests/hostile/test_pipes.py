"""Pipes in the place of files that are read: each reader refuses them without waiting."""

from __future__ import annotations

import ast
import os
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from healcore import regular_file
from healcore.policy import PolicyError, load
from healcore.runtime.postmortem import postmortem
from healcore.tools.cli import app
from tests.hostile.test_events import EVENT

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")

OF_THE_SYSTEM = {
    "healcore/events/process.py", "healcore/runtime/store/host_memory.py",
}  # fmt: skip
"""They read /proc, /sys and /etc only."""
OF_THE_INSTALLATION = {
    "adapters/torch/trainers/huggingface/dry_run.py",
    "healcore/tools/report/page.py", "healcore/demo/scenario.py"
}  # fmt: skip
"""They read what is part of Python or healcore, or what they have just written."""


@pytest.fixture
def pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


@pytest.fixture(autouse=True)
def ends():
    """A reader that waits fails its test instead of the whole run."""
    signal.alarm(120)
    yield
    signal.alarm(0)


def healcore(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.mark.parametrize(
    "command",
    [("policy", "check"), ("events", "show"), ("report",)],
    ids=" ".join,
)
def test_a_command_refuses_a_pipe(command, pipe):
    done = healcore(*command, pipe)
    assert done.exit_code == 2
    assert "pipe or a device" in done.output


def test_a_report_leaves_out_pipes_next_to_the_events(tmp_path):
    (tmp_path / "healcore.events.jsonl").write_bytes(EVENT)
    os.mkfifo(tmp_path / "healcore.metrics.jsonl")
    os.mkfifo(tmp_path / "healcore.postmortem.a.json")
    done = healcore("report", tmp_path)
    assert done.exit_code == 0
    assert (tmp_path / "healcore.report.html").is_file()


def test_functions_refuse_a_pipe(pipe):
    with pytest.raises(PolicyError, match="pipe or a device"):
        load(pipe)
    with pytest.raises(OSError, match="pipe or a device"):
        postmortem.read(pipe)


def test_a_directory_and_a_file_that_is_too_large(tmp_path):
    with pytest.raises(IsADirectoryError):
        regular_file.read(tmp_path)
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(6 << 30)
    with pytest.raises(OSError, match="limit is 1000"):
        regular_file.read(tmp_path / "sparse", 1000)


@pytest.mark.parametrize("name", ["healcore", "adapters"])
def test_every_reader_opens_regular_files_only(name):
    """By the source: `open` has the opener; `read_text` and `read_bytes` are not used."""
    others = []
    for path in sorted((ROOT / name).rglob("*.py")):
        at = path.relative_to(ROOT).as_posix()
        if path.is_symlink() or at in OF_THE_SYSTEM | OF_THE_INSTALLATION:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            text = ast.unparse(node)
            plain = called.endswith((".read_text", ".read_bytes"))
            opened = (called == "open" or called.endswith(".open")) and "'rb'" in text
            if plain or (opened and "opener=" not in text and "os.open(" not in text):
                others.append(f"{at}:{node.lineno} {text[:60]}")
    assert others == []
