"""JSON Lines: healcore's own, typed records, anything with a step and a loss."""

from __future__ import annotations

import json

import pytest

from healcore.events import Log
from healcore.tools.traces import lineage, open_traces
from tests.tools.traces.opened_traces import column, open_one, problems_of, refusal, write


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def test_metrics_of_a_healed_run(tmp_path):
    text = lines(
        *(
            {"schema": 1, "kind": "step", "run": "r", "lr": None, "cause": [], **step}
            for step in (
                {"step": 0, "loss": 2.5, "grad_norm": 1.0, "threshold": 3.0},
                {"step": 1, "loss": "nan", "grad_norm": "inf", "cause": ["NONFINITE_LOSS"]},
                {"step": 2, "loss": 2.25, "grad_norm": 1.5, "threshold": "inf"},
                {"step": 1, "loss": 2.0, "grad_norm": 1.0, "skip": False},
            )
        )
    )
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
    trace = open_one(write(tmp_path / "train-20260101.jsonl", text))
    table = trace.rows
    assert table.step.tolist() == [1, 2, 5, 6]
    assert column(table.values["loss"]) == [2, "nan", "nan", 1.5]
    assert table.logged["loss"].tolist() == [True, True, False, True]
    assert column(table.values["grad_norm"]) == [1, "nan", "nan", "nan"]
    assert problems_of(trace) == [
        (4, 'not JSON: \'{"type":"step","st\': skipped'),
        (6, 'not JSON: \'{"type":"step","step":3,"loss":"-inf"...\': skipped'),
        (7, "not a JSON object: '[1, 2]': skipped"),
        (8, "'step': missing: the row is skipped"),
        (9, "'loss': 'True' is not a number: the row is read without loss"),
        (11, 'not JSON (the last line is truncated): \'{"type":"step","step":7,"lo\': skipped'),
    ]


def test_each_of_several_optimizers_is_a_trace(tmp_path):
    text = lines(
        *(
            {"schema": 1, "kind": "step", "step": step, "engine": engine, "loss": loss}
            for step in range(3)
            for engine, loss in (("gen", 2.0), ("disc", 0.5))
        )
    )
    path = write(tmp_path / "run.metrics.jsonl", text)
    traces, failed = open_traces([str(path)])
    assert not failed
    assert [trace.name for trace in traces] == [f"{path}#gen", f"{path}#disc"]
    for trace, loss in zip(traces, (2.0, 0.5), strict=True):
        assert trace.rows.values["loss"].tolist() == [loss] * 3
        assert not trace.notes


# -- documents: trainer_state.json and lists of records --------------------------------------------


HISTORY = [
    {"epoch": 0.1, "grad_norm": 1.5, "learning_rate": 1e-3, "loss": 2.5, "step": 10},
    {"epoch": 0.1, "eval_loss": 2.25, "eval_runtime": 0.1, "step": 10},
    {"epoch": 0.2, "grad_norm": float("nan"), "learning_rate": 1e-3, "loss": 0.0, "step": 20},
    {"epoch": 0.3, "eval_loss": 2.0, "step": 25},
    {"train_runtime": 3.0, "train_loss": 1.25, "total_flos": 0.0, "step": 25},
]


def check(trace):
    table = trace.rows
    assert table.step.tolist() == [10, 20, 25]
    assert column(table.values["loss"]) == [2.5, 0.0, "nan"]
    assert table.logged["loss"].tolist() == [True, True, False]
    assert column(table.values["grad_norm"]) == [1.5, "nan", "nan"]
    assert table.logged["grad_norm"].tolist() == [True, True, False]
    assert column(table.values["eval_loss"]) == [2.25, "nan", 2.0]
    assert len(trace.problems) == 0


@pytest.mark.parametrize("indent", [2, None])
def test_the_state_of_the_trainer(tmp_path, indent):
    state = {"best_metric": None, "log_history": HISTORY, "stateful_callbacks": {"a": [1]}}
    check(open_one(write(tmp_path / "trainer_state.json", json.dumps(state, indent=indent))))


def test_the_state_as_transformers_writes_it(tmp_path):
    callback = pytest.importorskip("transformers.trainer_callback")
    state = callback.TrainerState(log_history=HISTORY, global_step=25)
    for step in (9, 25):
        path = tmp_path / "out" / f"checkpoint-{step}" / "trainer_state.json"
        path.parent.mkdir(parents=True)
        state.save_to_json(str(path)) if step == 25 else write(path, "{}")
    check(open_one(tmp_path / "out"))  # the newest checkpoint's


def test_a_torn_state_is_an_error(tmp_path):
    text = json.dumps({"log_history": HISTORY}, indent=2)
    path = write(tmp_path / "trainer_state.json", text[: text.index("0.3")])
    assert "the document is damaged" in refusal(path)
