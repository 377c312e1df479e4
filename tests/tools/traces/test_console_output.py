"""Console output of a Trainer."""

from __future__ import annotations

import pytest

from tests.tools.traces.opened_traces import column, open_one, problems_of, write

BAR = " 10%|█         | 6/60 [00:03<00:27,  1.9it/s]"
LINES = {
    "dicts alone": "{}\n{}\n{}\n",
    "bars between the lines": f"Loading…\n{BAR}\n{{}}\r{BAR}\r    \r{{}}\n{BAR}{{}}\n",
    "a logger": (
        '[INFO|trainer.py:2134] ***** Running training *****\n{{"a": 1}}\n'
        "2026-01-01 12:00:00 INFO [rank0]: {}\nINFO saved, it's at /tmp\n{}\n{}\n"
    ),
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


@pytest.mark.parametrize(("lines", "dicts"), list(zip(LINES, DICTS, strict=True)))
def test_the_lines_of_a_trainer(tmp_path, lines, dicts):
    end = "{'train_runtime': 3.2, 'train_loss': 1.0}\n{'loss': 2.1, 'gra\n"
    path = write(tmp_path / "run.log", LINES[lines].format(*DICTS[dicts]) + end)
    trace = open_one(path)
    rows = trace.rows
    assert column(rows.values["loss"]) == [2.5, 0.0, -float("inf")]
    assert rows.logged["grad_norm"].tolist() == [False, True, False]
    assert [text[:10] for _, text in problems_of(trace)] == ["not a dict"]
