"""Console output of a Trainer, and tables of many runs, which are no log."""

from __future__ import annotations

import json

import pytest

from tests.tools.traces.opened_traces import column, load, open_one, problems_of, refusal, write

BAR = " 10%|█         | 6/60 [00:03<00:27,  1.9it/s]"
LINES = {
    "dicts alone": "{}\n{}\n{}\n",
    "bars between the lines": f"Loading…\n{BAR}\n{{}}\r{BAR}\r    \r{{}}\n{BAR}{{}}\n",
    "a logger": "2026-01-01 12:00:00 INFO [rank0]: {}\nINFO saved, it's at /tmp\n{}\n{}\n",
}
DICTS = {
    "floats": [
        "{'loss': 2.5, 'note': \"it's\"}",
        "{'loss': 0.0, 'grad_norm': nan}",
        "{'loss': -inf}",
    ],
    "texts": [
        "{'loss': '2.5', 'ok': True}",
        "{'loss': '0.0', 'grad_norm': 'nan'}",
        "{'loss': '-inf'}",
    ],
    "NumPy": [
        "{'loss': np.float64(2.5), 'x': None}",
        "{'loss': tensor(0.), 'grad_norm': np.float32(nan)}",
        "{'loss': np.float64(-inf)}",
    ],
}


@pytest.mark.parametrize("lines", LINES)
@pytest.mark.parametrize("dicts", DICTS)
def test_the_lines_of_a_trainer(tmp_path, lines, dicts):
    end = "{'train_runtime': 3.2, 'train_loss': 1.0}\n{'loss': 2.1, 'gra\n"
    path = write(tmp_path / "run.log", LINES[lines].format(*DICTS[dicts]) + end)
    trace = open_one(path)
    rows = load(trace)
    assert column(rows.values["loss"]) == [2.5, 0.0, -float("inf")]
    assert rows.logged["grad_norm"].tolist() == [False, True, False]
    assert [text[:10] for _, text in problems_of(trace)] == ["not a dict"]


RUNS = [{"Name": f"brave-fox-{at}", "State": "finished", "loss": 2.0 - at / 10} for at in range(12)]
TABLES = {
    "of W&B": "\n".join(
        ["Name,State,loss", *(f"{each['Name']},finished,{each['loss']}" for each in RUNS)]
    ),
    "of MLflow": "run_id,metrics.loss,params.lr\na1,2.5,0.1\nb2,2.25,0.2\nc3,nan,0.3\n",
    "of records": "\n".join(map(json.dumps, RUNS)),
    "in a list": json.dumps([{"trial_id": at, "loss": 1.0} for at in range(5)]),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_many_runs_is_refused(tmp_path, name):
    assert "table of many runs, one row each" in refusal(write(tmp_path / "runs", TABLES[name]))


def test_a_log_that_names_its_run_is_read(tmp_path):
    text = "step,run,loss\n" + "".join(f"{at},first,1.5\n" for at in range(6))
    assert open_one(write(tmp_path / "a.csv", text)).survey().rows == 6
    checkpoints = write(tmp_path / "b.csv", text.replace("first", "x", 1).replace("step", "steps"))
    assert open_one(checkpoints, columns={"step": "steps"}).survey().rows == 6
