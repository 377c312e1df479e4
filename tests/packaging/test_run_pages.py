"""The snippets of data-and-resume, stores and ranks run as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def text(page: str) -> str:
    return (DOCS / page).read_text()


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text(page), flags=re.M | re.S)


@pytest.mark.parametrize("page", ["data-and-resume.md", "stores.md"])
def test_the_snippets_one_after_the_other(page, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("torchdata")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    for block in blocks(page):
        exec(block, scope)


def test_the_lines_after_a_kill(tmp_path):
    """The page quotes the lines of the second start."""
    import signal
    import subprocess
    import sys

    pytest.importorskip("torchdata")
    program = blocks("data-and-resume.md")[0]
    killed = f"{program}        if healer.step == 151 and KILL:\n"
    killed += "            healer.store.wait()\n            os.kill(os.getpid(), 9)\n"
    lines = ""
    for kill, status in ((True, -signal.SIGKILL), (False, 0)):
        code = f"import os\nKILL = {kill}\n{killed}"
        run = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert run.returncode == status, run.stderr
        lines = run.stderr
    found = re.findall(r"^healcore: .*$", lines, flags=re.M)
    quoted = re.findall(r"^    (healcore: .*)$", text("data-and-resume.md"), flags=re.M)
    assert [line.replace(str(tmp_path), "/home/me") for line in found] == quoted


def test_the_ranks_snippet_on_one_rank(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "0")
    (block,) = blocks("ranks.md")
    exec(block, {})
    assert not torch.distributed.is_initialized()
    assert list((tmp_path / "checkpoints").glob("step-*"))
