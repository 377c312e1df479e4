"""trainer_state.json and lists of records."""

from __future__ import annotations

import json

import numpy as np
import pytest

from healcore.tools.traces import load
from tests.traces.reading import column, one, refused, told, write

HISTORY = [
    {"epoch": 0.1, "grad_norm": 1.5, "learning_rate": 1e-3, "loss": 2.5, "step": 10},
    {"epoch": 0.1, "eval_loss": 2.25, "eval_runtime": 0.1, "step": 10},
    {"epoch": 0.2, "grad_norm": float("nan"), "learning_rate": 1e-3, "loss": 0.0, "step": 20},
    {"epoch": 0.3, "eval_loss": 2.0, "step": 25},
    {"train_runtime": 3.0, "train_loss": 1.25, "total_flos": 0.0, "step": 25},
]


def check(trace):
    table = load(trace)
    assert table.step.tolist() == [10, 20, 25]
    assert table.index.tolist() == [0, 1, 2]
    assert column(table.values["loss"]) == [2.5, 0.0, "nan"]
    assert table.given["loss"].tolist() == [True, True, False]
    assert column(table.values["grad_norm"]) == [1.5, "nan", "nan"]
    assert table.given["grad_norm"].tolist() == [True, True, False]
    assert column(table.values["eval_loss"]) == [2.25, "nan", 2.0]
    assert trace.survey().problem_count == 0
    (note,) = trace.survey().notes
    assert note.problem == "1 record is not a step's (trainer_state.json): passed over"


@pytest.mark.parametrize("indent", [2, None])
def test_the_state_of_the_trainer(tmp_path, indent):
    state = {"best_metric": None, "log_history": HISTORY, "stateful_callbacks": {"a": [1]}}
    check(one(write(tmp_path / "trainer_state.json", json.dumps(state, indent=indent))))


def test_the_state_as_transformers_writes_it(tmp_path):
    callback = pytest.importorskip("transformers.trainer_callback")
    folder = tmp_path / "out" / "checkpoint-25"
    folder.mkdir(parents=True)
    callback.TrainerState(log_history=HISTORY, global_step=25).save_to_json(
        str(folder / "trainer_state.json")
    )
    older = tmp_path / "out" / "checkpoint-9"
    older.mkdir()
    write(older / "trainer_state.json", "{}")
    check(one(tmp_path / "out"))  # the newest checkpoint's


def test_a_plain_list_of_records(tmp_path):
    check(one(write(tmp_path / "log.json", json.dumps(HISTORY))))


def test_a_torn_state_gives_what_it_has(tmp_path):
    text = json.dumps({"log_history": HISTORY}, indent=2)
    cut = text.index("0.3")
    trace = one(write(tmp_path / "trainer_state.json", text[:cut]))
    assert load(trace).step.tolist() == [10, 20]
    ((line, problem),) = told(trace)
    assert line == text[: text.rindex("{", 0, cut)].count("\n") + 1
    assert problem.startswith("the document breaks off at '{")


def test_a_long_state_passes_through_the_window(tmp_path):
    history = [{"step": at, "loss": at / 8, "note": "x" * (at % 700)} for at in range(3000)]
    trace = one(write(tmp_path / "state.json", json.dumps({"log_history": history})))
    table = load(trace)
    assert table.step.tolist() == list(range(3000))
    np.testing.assert_array_equal(table.values["loss"], np.arange(3000, dtype=np.float32) / 8)


def test_json_that_is_no_log(tmp_path):
    assert "has no 'log_history'" in refused(write(tmp_path / "a.json", '{"a": 1,\n"b": 2}'))
    assert refused(write(tmp_path / "b.json", '{"log_history": []}')) == (
        "it has no record that could be read"
    )


def test_a_real_training(tmp_path):
    pytest.importorskip("accelerate")  # the Trainer refuses to start without it
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.line = torch.nn.Linear(2, 1)

        def forward(self, x, labels):
            return {"loss": ((self.line(x)[:, 0] - labels) ** 2).mean()}

    data = [{"x": torch.tensor([i / 10, 1.0]), "labels": torch.tensor(i / 5)} for i in range(32)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        logging_steps=1,
        save_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model=Line(), args=arguments, train_dataset=data)
    trainer.train()
    table = load(one(tmp_path))
    assert table.step.tolist() == [1, 2, 3, 4]
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    np.testing.assert_array_equal(table.values["loss"], np.array(logged, np.float32))
    assert table.given["grad_norm"].all()
