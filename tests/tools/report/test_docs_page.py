"""docs/reports.md: its programs run; its example is of the present version and default policy."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "reports.md").read_text()


def programs(*parts: str) -> list[str]:
    """The programs of the page that contain one of these texts."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    return [block for block in blocks if any(part in block for part in parts)]


def test_the_programs_run(healed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copy(healed, "run.events.jsonl")
    found = programs("read_reports", "runs_of")
    assert len(found) == 2
    for program in found:
        exec(program, {})
    assert "</html>" in Path("run.html").read_text()
    assert "completed" in capsys.readouterr().out.lower()
