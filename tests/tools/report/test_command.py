"""healcore report, from the command line."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from healcore.tools.cli import app


@pytest.mark.parametrize("target", ["run.events.jsonl", "run.metrics.jsonl"])
def test_a_report_never_replaces_the_records(healed, tmp_path, target):
    for file in healed.parent.glob("*.json*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    before = (tmp_path / target).read_bytes()
    for given in (tmp_path, tmp_path / healed.name):
        done = CliRunner().invoke(app, ["report", str(given), "-o", str(tmp_path / target)])
        assert done.exit_code == 2
        assert "is one of the files that are read" in done.output
    assert (tmp_path / target).read_bytes() == before
    for _ in range(2):  # the page of before is no record
        assert CliRunner().invoke(app, ["report", str(tmp_path)]).exit_code == 0
