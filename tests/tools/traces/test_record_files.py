"""JSON Lines (healcore's own, typed records, any with a step and a loss), and a Trainer's lines."""

import json

import numpy as np
import pytest

from healcore.events import Log
from healcore.tools.traces import lineage, open_traces
from tests.tools.traces.opened_traces import column, open_one, problems_of, refusal, write


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def test_metrics_of_a_healed_run(tmp_path):
    steps = [
        {"step": 0, "loss": 2.5, "grad_norm": 1.0, "threshold": 3.0},
        {"step": 1, "loss": "nan", "grad_norm": "inf", "cause": ["NONFINITE_LOSS"]},
        {"step": 2, "loss": 2.25, "grad_norm": 1.5, "threshold": "inf"},
        {"step": 1, "loss": 2.0, "grad_norm": 1.0, "skip": False},
    ]
    common = {"schema": 1, "kind": "step", "run": "r", "lr": None, "cause": []}
    text = lines(*({**common, **step} for step in steps))
    trace = open_one(write(tmp_path / "run.metrics.jsonl", text))
    table = trace.rows
    assert column(table.values["loss"]) == [2.5, "nan", 2.25, 2.0]
    assert table.attempt.tolist() == [0, 0, 0, 1]
    assert trace.signals == {"loss", "grad_norm"}  # a null is not logged
    assert lineage(trace).values["loss"].tolist() == [2.5, 2.0]


def test_a_directory_of_metrics_and_events_is_read_from_the_metrics(tmp_path):
    rows = [{"schema": 1, "kind": "step", "run": "r", "step": i, "loss": 2.5} for i in (1, 2)]
    write(tmp_path / "run.metrics.jsonl", lines(*rows))
    log = Log(tmp_path / "run.events.jsonl")
    log.write("alarm", step=7, cause=["LOSS_SPIKE"], readings={"loss": 9.0, "grad_norm": 2.0})
    trace = open_one(tmp_path)
    assert (trace.rows.step.tolist(), trace.problems) == ([1, 2], ())


def test_typed_records_torn_lines_and_other_types(tmp_path):
    text = (
        '{"type":"config","step":0,"loss":7}\n'
        '{"type":"step","step":1,"loss":2.0,"metrics":{"grad_norm":1}}\n'
        '{"type":"step","step":2,"loss":NaN}\n'
        '{"type":"step","st\n'
        "\n"
        '{"type":"step","step":3,"loss":"-inf"}{"type":"step"}\n'
        "[1, 2]\n"
        '{"type":"step","loss":1.0}\n'
        '{"type":"step","step":5,"loss":true}\n'
        '{"type":"step","step":6,"loss":"1.5"}\n'
        '{"type":"step","step":7,"lo'
    )
    usable = "".join(f'{{"type":"step","step":{step},"loss":2}}\n' for step in range(-60, 1))
    path = write(tmp_path / "train-20260101.jsonl", text)
    assert "5 of 9 lines cannot be used, first in line 4: not a JSON object" in refusal(path)
    trace = open_one(write(path, text.replace('{"type":"config"', usable + '{"type":"config"')))
    table = trace.rows.select(np.arange(61, 65))
    assert table.step.tolist() == [1, 2, 5, 6]
    assert column(table.values["loss"]) == [2, "nan", "nan", 1.5]
    assert table.logged["loss"].tolist() == [True, True, False, True]
    assert column(table.values["grad_norm"]) == [1, "nan", "nan", "nan"]
    assert [line for line, _ in problems_of(trace)] == [65, 67, 68, 69, 70, 72]
    assert "not a JSON object" in problems_of(trace)[-1][1]


def test_each_of_several_optimizers_is_a_trace(tmp_path):
    rows = [
        {"schema": 1, "kind": "step", "step": step, "engine": engine, "loss": loss}
        for step in range(3)
        for engine, loss in (("gen", 2.0), ("disc", 0.5))
    ]
    path = write(tmp_path / "run.metrics.jsonl", lines(*rows))
    traces, failed = open_traces([str(path)])
    assert not failed
    assert [trace.name for trace in traces] == [f"{path}#gen", f"{path}#disc"]
    for trace, loss in zip(traces, (2.0, 0.5), strict=True):
        assert trace.rows.values["loss"].tolist() == [loss] * 3
        assert trace.notes == (f"{path}: 'engine' names 2 runs, and each is read by itself",)


HISTORY = [
    {"epoch": 0.1, "grad_norm": 1.5, "learning_rate": 1e-3, "loss": 2.5, "step": 10},
    {"epoch": 0.1, "eval_loss": 2.25, "eval_runtime": 0.1, "step": 10},
    {"epoch": 0.2, "grad_norm": float("nan"), "learning_rate": 1e-3, "loss": 0.0, "step": 20},
    {"epoch": 0.3, "eval_loss": 2.0, "step": 25},
    {"train_runtime": 3.0, "train_loss": 1.25, "total_flos": 0.0, "step": 25},
]


@pytest.mark.parametrize("indent", [2, None])
def test_a_trainer_state_is_read_from_the_newest_checkpoint(tmp_path, indent):
    """A folder is read through its newest checkpoint."""
    state = {"best_metric": None, "log_history": HISTORY, "stateful_callbacks": {"a": [1]}}
    texts = {"checkpoint-9": "{}", "checkpoint-25": json.dumps(state, indent=indent)}
    for folder, text in texts.items():
        (tmp_path / folder).mkdir()
        path = write(tmp_path / folder / "trainer_state.json", text)
    if indent and (callback := pytest.importorskip("transformers.trainer_callback")):
        callback.TrainerState(log_history=HISTORY, global_step=25).save_to_json(str(path))
    trace = open_one(tmp_path)
    table = trace.rows
    assert table.step.tolist() == [10, 20, 25]
    assert column(table.values["loss"]) == [2.5, 0.0, "nan"]
    assert column(table.values["grad_norm"]) == [1.5, "nan", "nan"]
    assert column(table.values["eval_loss"]) == [2.25, "nan", 2.0]
    for name in ("loss", "grad_norm"):
        assert table.logged[name].tolist() == [True, True, False]
    assert len(trace.problems) == 0
    whole = path.read_text()
    path.write_text(whole[: whole.rindex('"step"')])
    assert "the document is damaged" in refusal(path)


BAR = " 10%|█         | 6/60 [00:03<00:27,  1.9it/s]"
LINES = {
    "dicts alone": "{}\n{}\n{}\n",
    "bars between the lines": f"Loading…\n{BAR}\n{{}}\r{BAR}\r    \r{{}}\n{BAR}{{}}\n",
    "a logger": (
        '[INFO|trainer.py:2134] ***** Running training *****\n{{"a": 1}}\n'
        "2026-01-01 12:00:00 INFO [rank0]: {}\nINFO saved, it's at /tmp\n{}\n{}\n"
    ),
}
NUMBERS = {
    "floats": ("2.5", "0.0", "nan", "-inf"),
    "texts": ("'2.5'", "'0.0'", "'nan'", "'-inf'"),
    "NumPy": ("np.float64(2.5)", "tensor(0.)", "np.float32(nan)", "np.float64(-inf)"),
}


@pytest.mark.parametrize(("lines", "numbers"), list(zip(LINES, NUMBERS, strict=True)))
def test_the_lines_of_a_trainer_are_read(tmp_path, lines, numbers):
    first, second, norm, third = NUMBERS[numbers]
    dicts = (
        f"{{'loss': {first}, 'note': \"it's\", 'ok': True, 'x': None}}",
        f"{{'loss': {second}, 'grad_norm': {norm}}}",
        f"{{'loss': {third}}}",
    )
    end = "{'train_runtime': 3.2, 'train_loss': 1.0}\n{'loss': 2.1, 'gra\n"
    trace = open_one(write(tmp_path / "run.log", LINES[lines].format(*dicts) + end))
    assert column(trace.rows.values["loss"]) == [2.5, 0.0, -float("inf")]
    assert trace.rows.logged["grad_norm"].tolist() == [False, True, False]
    assert [text[:10] for _, text in problems_of(trace)] == ["not a dict"]
    assert "rows are counted" in trace.notes[0]
