"""`healcore replay`, through the real command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from healcore.policy import preset_text
from healcore.tools.cli import app
from tests.tools.replay import logs

ROOT = Path(__file__).parents[3]


def healcore_replay(*arguments: str | Path):
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["replay", *map(str, arguments)])


@pytest.fixture
def run(tmp_path):
    return logs.write(tmp_path / "run.csv", logs.eventful(300))


@pytest.fixture
def spiked(tmp_path):
    """A spike of 25 rows from row 150 on, and nothing else."""
    run = logs.noisy(300)
    run["loss"][150:175] = [8.0] * 25
    return logs.write(tmp_path / "spiked.csv", run)


def cells(output: str, name: str) -> list[str]:
    """The row of a table that begins with the name, cut at wide gaps."""
    (row,) = (line for line in output.splitlines() if line.strip().startswith(f"{name} "))
    return row.split()


def test_the_table_and_the_page(run, spiked, tmp_path):
    page = tmp_path / "r.html"
    done = healcore_replay(spiked, "-p", "pretraining", "--report", page)
    assert done.exit_code == 0, done.output
    assert cells(done.output, "spiked.csv")[:4] == ["spiked.csv", "300", "25", "1"]
    assert "0.25 (1)" in done.output
    assert "spiked.csv" in page.read_text()
    both = healcore_replay(spiked, run)
    assert cells(both.output, "all 2")[2] == "600"


def test_lines_of_json(run, tmp_path):
    out = tmp_path / "out.jsonl"
    assert healcore_replay(run, "--jsonl", out).exit_code == 0

    def refuse(token: str):
        raise AssertionError(f"{token} is no JSON")

    *rows, summary = (json.loads(line, parse_constant=refuse) for line in out.open())
    first = rows[0]
    assert list(first)[:9] == [
        *("trace", "index", "step", "cause", "action", "skip", "grad_scale", "lr_scale", "z"),
    ]
    assert first["trace"] == str(run)
    assert not any(row.get("summary") for row in rows)
    assert [row["index"] for row in rows] == sorted({row["index"] for row in rows})
    assert summary["summary"] is True
    assert summary["rows"] == 300 == summary["steps"] + summary["unjudged"]
    neutral = {"cause": [], "action": [], "skip": False, "grad_scale": 1.0, "lr_scale": 1.0}
    assert not [row for row in rows if neutral.items() <= row.items()]


def test_comparing_policies(spiked, tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text(preset_text("pretraining").replace('"rollback", "cut_lr"', '"rollback"'))
    out = tmp_path / "out.jsonl"
    done = healcore_replay(spiked, "-p", "pretraining", "-p", mine, "-p", "zclip", "--jsonl", out)
    assert done.exit_code == 0, done.output
    summaries = [each for each in map(json.loads, out.open()) if each.get("summary")]
    assert [each["policy"] for each in summaries] == ["pretraining", str(mine), "zclip"]
    assert [each["rollbacks"] - each["repeats"] for each in summaries] == [1, 1, 0]
    assert [each["lowest_lr_first"] for each in summaries] == [0.25, 1, 1]
    assert len({each["fingerprint"] for each in summaries}) == 3


def test_a_value_is_replaced_in_every_policy(spiked):
    done = healcore_replay(spiked, "-p", "pretraining", "--set", "lr.factor=0.5")
    assert "0.5 (1)" in done.output
    done = healcore_replay(spiked, "--set", "lr.factor=2")
    assert done.exit_code == 2
    assert "lr.factor = 2" in done.stderr


def test_some_traces_cannot_be_read(spiked, tmp_path):
    empty = tmp_path / "empty.csv"
    empty.touch()
    gone = tmp_path / "gone.csv"
    done = healcore_replay(empty, spiked, gone)
    assert done.exit_code == 1
    assert f"{empty}: it is empty" in done.output
    assert f"{gone}: it cannot be read" in done.output
    assert cells(done.output, str(spiked.name))[1] == "300"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "--policy", "defualt"], "did you mean 'default'"),
        (["RUN", "--policy", "no.toml"], "No such file"),
        (["RUN", "-p", "zclip", "-p", "zclip"], "a policy is repeated"),
        (["RUN", "--column", "loss"], "SIGNAL=NAME, like loss=train/ce, got 'loss'"),
        (["RUN", "--column", "los=b"], "'los' is not a signal"),
        (["RUN", "--jsonl", "RUN"], "is an input: write to another file"),
        (["RUN", "--report", "no/such/r.html"], "the folder no/such does not exist"),
        (["RUN", "--report", "."], "is a folder"),
        (["gone.csv"], "no trace could be replayed"),
        ([], "Missing argument"),
    ],
)
def test_invalid_arguments(run, arguments, message):
    before = run.read_bytes()
    done = healcore_replay(*(str(run) if each == "RUN" else each for each in arguments))
    assert done.exit_code == 2
    assert message in done.output
    assert run.read_bytes() == before
