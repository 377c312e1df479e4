"""docs/replay.md quotes the output of the commands, and its program runs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from typer.testing import CliRunner

from healcore.tools.cli import app
from tests.parity import recorded_runs

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "replay.md").read_text()
LOG = "llama31_8b__Cisco__hpf_n16__result_4.csv"


def block(language: str, part: str) -> str:
    (found,) = [
        each
        for each in re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)
        if part in each
    ]
    return found


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if line.strip()]


@recorded_runs.needed
def test_the_table_is_what_the_command_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(recorded_runs.FOLDER / "mlperf_v5.1" / LOG, "llama.csv")
    options = ["-p", "default", "-p", "pretraining", "--jsonl", "out.jsonl"]
    done = CliRunner().invoke(app, ["replay", "llama.csv", *options], env={"COLUMNS": "110"})
    assert done.exit_code == 0
    table = lines(block("text", "alarms"))
    assert lines(done.output)[: len(table)] == table
    assert block("json", '"index"').strip() in Path("out.jsonl").read_text().splitlines()


def test_the_program_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    losses = [2.0 + 0.01 * (step % 7) for step in range(60)]
    losses[50] = float("nan")
    rows = [f"{step},{loss}" for step, loss in enumerate(losses)]
    Path("run.csv").write_text("\n".join(["step,loss", *rows]))
    exec(block("python", "open_traces"), {})
    assert "NONFINITE_LOSS" in capsys.readouterr().out
