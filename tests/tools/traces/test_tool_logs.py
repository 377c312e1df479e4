"""Logs in the forms of public tools: their steps, and logs that are read only in part."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from healcore.tools.cli import app
from healcore.tools.replay import replay
from tests.tools.traces.opened_traces import open_one, refusal, write
from tests.tools.traces.tool_logs import FIRST, TOOLS, log_of, rows_of

LOSSES = np.round(2 + 3 * np.exp(-np.arange(60) / 20), 4)
LOSSES[45:] = np.nan  # in the fifth epoch of ten rows


@pytest.mark.parametrize("tool", TOOLS)
def test_each_row_has_the_step_of_the_run(tmp_path, tool):
    """Over epochs, between evaluations and means, and with the first alarm at the step of NaN."""
    trace = open_one(write(tmp_path / "run.log", log_of(tool, LOSSES.tolist())))
    rows = rows_of(LOSSES.tolist())
    expected = [row.step - FIRST.get(tool, 0) for row in rows]
    logged = trace.rows.logged["loss"]
    assert trace.rows.step[logged].tolist() == expected
    assert np.isnan(trace.rows.values["loss"][logged]).tolist() == [r.loss != r.loss for r in rows]
    assert (trace.unit, trace.problems, len(trace.attempts)) == ("step", (), 1)
    assert replay(trace, "default").summary.first_alarm == expected[45]


def test_an_epoch_that_the_log_does_not_begin_with_is_counted(tmp_path):
    lines = "".join(f"Epoch: [{e}] [{b}/1299] loss: 2.5\n" for e in (110, 111) for b in (0, 1200))
    trace = open_one(write(tmp_path / "run.log", lines))
    assert trace.rows.step.tolist() == [142890, 144090, 144189, 145389]
    lines = "".join(f"Epoch [{e}][{b}/100] loss: 2.5\n" for e in (7, 8) for b in (50, 100))
    trace = open_one(write(tmp_path / "run.log", lines))
    assert trace.rows.step.tolist() == [650, 700, 750, 800]


@pytest.mark.parametrize(
    ("line", "unit", "first"),
    [
        ("loss: {:.3f}", "row", 45),
        ("{{'loss': {:.3f}, 'epoch': 0.0{}}}", "row", 45),
        ("Epoch: {1} loss: {0:.3f}", "epoch", 46),
    ],
)
def test_the_alarm_of_a_log_without_steps_says_row_or_epoch(tmp_path, line, unit, first):
    text = "".join(line.format(loss, at) + "\n" for at, loss in enumerate(LOSSES, 1))
    path = write(tmp_path / "run.log", text)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["replay", str(path)])
    assert f"first alarm at {unit} {first}" in result.output
    assert "at step" not in result.output
    result = CliRunner().invoke(app, ["replay", str(path), "--jsonl", "-"])
    *decided, summary = map(json.loads, result.stdout.splitlines())
    assert (decided[0][unit], summary["unit"]) == (first, unit)
    assert not any("step" in each for each in decided)


PARTLY = {
    "step": ["step:{hex} loss:{loss}"] * 100,
    "rounded steps": ["step:1.{at}K loss:{loss}"] * 100,
    "ends in N/A": ["step:{at} loss:2.5"] * 80 + ["step:{at} loss=N/A"] * 20,
    "no step": ["step:{at} loss:2.5", "loss:2.5"] * 50,
    "JSON": ['{{"step": {at}, "loss": 2.5}}', '{{"step": {at}, "lo'] * 50,
    "table": ["step,loss", *(["{at},2.5"] * 80 + ["{at},error"] * 20)],
    "ends empty": ["step,loss", *(["{at},2.5"] * 80 + ["{at},"] * 20)],
}


@pytest.mark.parametrize("kind", PARTLY)
def test_a_log_of_which_more_than_a_tenth_cannot_be_used_is_not_judged(tmp_path, kind):
    lines = [
        line.format(at=at, hex=hex(at) if at > 9 else at, loss=2.5)
        for at, line in enumerate(PARTLY[kind])
    ]
    path = write(tmp_path / "run.log", "\n".join(lines) + "\n")
    result = CliRunner().invoke(app, ["replay", str(path)])
    assert result.exit_code == 1
    assert "not judged: " in result.output
    assert ("line " in result.output) != kind.startswith("ends")


def test_a_torn_line_and_a_few_bad_lines_do_not_forbid_a_verdict(tmp_path):
    lines = ["step,loss", *(f"{at},{'error' if at in (3, 4, 5) else 2.5}" for at in range(100))]
    path = write(tmp_path / "run.csv", "\n".join(lines))
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["replay", str(path)])
    assert result.exit_code == 0
    assert "line 5: 'loss': 'error' is not a number: the row is read" in result.output
    path = write(tmp_path / "run.jsonl", '{"step": 1, "loss": 2}\n' * 4 + '{"step": 2, "lo')
    assert len(open_one(path).rows.step) == 4


TABLES = {
    "W&B": [
        "Name,State,Created,lr,_step,loss",
        *(f"sunny-{i},finished,2024-01-01,0.1,99,2.5" for i in range(9)),
    ],
    "W&B, equal names": [
        "Name,State,Created,lr,_step,loss",
        *(f"base,finished,2024-01-01,0.1,{9 * i},2.5" for i in range(9)),
    ],
    "MLflow": ["Run ID,Status,lr,loss", *(f"a{i}f,FINISHED,0.1,2.5" for i in range(9))],
    "Ray": ["trial_id,training_iteration,loss", *(f"f{i}_0,100,2.5" for i in range(9))],
    "by hand": ["model,loss", *(f"net-{i},2.5" for i in range(9))],
    "JSON Lines": [json.dumps({"name": f"r{i}", "loss": 2.5}) for i in range(9)],
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_of_runs_is_no_curve(tmp_path, kind):
    path = write(tmp_path / "runs", "\n".join(TABLES[kind]) + "\n")
    assert "it is a table of runs, with one run in each row" in refusal(path)
    result = CliRunner().invoke(app, ["replay", str(path)])
    assert (result.exit_code, "not judged: it is a table of runs" in result.output) == (1, True)


def test_a_curve_may_have_an_id_in_each_row_and_the_name_of_its_run(tmp_path):
    for text in (
        "id,step,loss\n" + "".join(f"x{at}f,{at},2.5\n" for at in range(9)),
        "Name,step,loss\n" + "".join(f"sunny-1,{at},2.5\n" for at in range(9)),
        "id,loss\n" + "".join(f"{at},2.5\n" for at in range(9)),
    ):
        assert len(open_one(write(tmp_path / "run.csv", text)).rows.step) == 9


def test_folders_of_runs_are_found_in_a_folder(tmp_path):
    csv = "step,loss\n1,2.5\n2,2.25\n"
    for folder in ("b/version_10", "b/version_9", "a", "a/checkpoint-3", "code", ".git"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("b/version_10/metrics.csv", "b/version_9/metrics.csv", "a/log.csv", ".git/x.csv"):
        write(tmp_path / name, csv)
    write(tmp_path / "README.md", "# Runs\n")
    write(tmp_path / "code/train.py", "loss = 1\n")
    result = CliRunner().invoke(app, ["replay", str(tmp_path), "--jsonl", "-"])
    traces = [json.loads(line)["trace"] for line in result.stdout.splitlines()]
    assert [each.removeprefix(f"{tmp_path}/") for each in traces] == [
        "a",
        "b/version_9",
        "b/version_10",
    ]
    assert result.exit_code == 0


def test_a_store_is_read_from_its_metrics_and_says_if_it_has_none(tmp_path):
    write(tmp_path / "healcore.events.jsonl", '{"schema":1,"kind":"start","run":"r"}\n')
    write(tmp_path / "healcore.lock", "process 1\n")
    assert "healcore's own is *.metrics.jsonl" in refusal(tmp_path)
    step = '{{"schema":1,"kind":"step","run":"r","step":{},"loss":2.5}}\n'
    write(tmp_path / "healcore.metrics.jsonl", step.format(0) + step.format(1))
    (tmp_path / "step-0000000020.1").mkdir()
    assert open_one(tmp_path).rows.step.tolist() == [0, 1]


SUMMARIES = {
    "text with a norm": (
        "step {} | my_loss {}",
        "epoch {} done | mean my loss 2.0 | grad_norm 0.5",
    ),
    "text without a step": ("[{}/120] loss_G: {}", "==> train loss: 2.0, of {}"),
    "JSON with a norm": ('{{"step": {}, "my_loss": {}}}', '{{"epoch": {}, "grad_norm": 0.5}}'),
    "JSON with a loss": ('{{"step": {}, "my_loss": {}}}', '{{"epoch": {}, "loss": 0.5}}'),
}


@pytest.mark.parametrize("kind", SUMMARIES)
def test_a_summary_of_each_epoch_without_the_column_costs_no_verdict(tmp_path, kind):
    line, summary = SUMMARIES[kind]
    lines: list[str] = []
    for at in range(120):
        lines.append(line.format(at, "NaN" if at > 90 else 2.5))
        if at % 8 == 7:
            lines.append(summary.format(at // 8))
    path = write(tmp_path / "run.log", "\n".join(lines) + "\n")
    column = "loss=loss_G" if "loss_G" in line else "loss=my_loss"
    result = CliRunner().invoke(app, ["replay", str(path), "--column", column])
    assert (result.exit_code, "first alarm at step 91" in result.output) == (0, True)


def test_a_text_between_records_is_no_lost_record(tmp_path):
    lines: list[str] = []
    for at in range(80):
        lines.append(f'{{"step": {at}, "loss": 2.5}}')
        if at % 5 == 4:
            lines.append(f"epoch {at // 5} is done, mean loss 2.5")
    assert len(open_one(write(tmp_path / "run.jsonl", "\n".join(lines))).rows.step) == 80
