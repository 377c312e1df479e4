"""docs/reports.md: its programs run; its example is of the present version and default policy."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import healcore
from healcore.policy import fingerprint, load

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


def test_the_example_is_of_this_version_and_its_default_policy():
    example = (DOCS / "report-example.html").read_text()
    advice = (
        "run `healcore demo --framework torch` in a folder such as /home/me/project, copy the page "
        "of the healed run to docs/report-example.html, and make docs/report.png of it in a browser"
    )
    assert fingerprint(load("default")) in example, advice
    assert f"Made by healcore {healcore.__version__}." in example, advice
    assert "/tmp/" not in example, advice
    assert (DOCS / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_trackers_of_the_page_are_those_of_the_code():
    from healcore.runtime.trackers.selection import NAMES

    named = re.findall(r'^\| `"(\w+)"', PAGE, re.M)
    assert set(named) == set(NAMES)
