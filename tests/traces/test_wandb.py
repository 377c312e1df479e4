"""Charts exported from Weights & Biases."""

from __future__ import annotations

from healcore.tools.traces import load, open_traces
from tests.traces.reading import refused, write


def test_several_runs_are_several_traces(tmp_path):
    header = ["Step"]
    for run in ("big - 7b", "small"):
        header += [f"{run} - train/{kind}" for kind in ("loss", "loss__MIN", "loss__MAX")]
    header += ["small - train/grad_norm", "small - _step"]
    rows = [
        ["10", "2.5", "2.25", "2.75", "", "", "", "", ""],
        ["20", "", "", "", "3.5", "3", "4", "1.5", "20"],
        ["30", "2", "2", "2", "nan", "nan", "nan", "inf", "30"],
    ]
    text = "\n".join(",".join(f'"{cell}"' for cell in row) for row in [header, *rows])
    path = write(tmp_path / "wandb_export.csv", text)
    (big, small), unreadable = open_traces([str(path)])
    assert not unreadable
    assert (big.name, small.name) == (f"{path}#big - 7b", f"{path}#small")
    table = load(big)
    assert table.step.tolist() == [10, 30]
    assert table.index.tolist() == [0, 2]  # the file's rows
    assert table.values["loss"].tolist() == [2.5, 2]
    assert small.survey().signals == {"loss", "grad_norm"}
    assert load(small).index.tolist() == [1, 2]
    assert "several runs ('big - 7b', 'small')" in open_traces([str(path)], join=True)[1][0].problem


def test_one_run_keeps_its_rows_and_its_name(tmp_path):
    text = "Step,r - train/loss,r - train/loss__MIN,r - train/loss__MAX\n1,2,2,2\n2,,,\n3,1,1,1\n"
    path = write(tmp_path / "export.csv", text)
    (trace,), _ = open_traces([str(path)])
    assert trace.name == str(path)
    assert load(trace).index.tolist() == [0, 1, 2]
    assert load(trace).given["loss"].tolist() == [True, False, True]


def test_runs_of_one_name_and_runs_without_a_loss(tmp_path):
    text = "Step,r - loss,r - loss,s - accuracy\n1,2,3,4\n"
    path = write(tmp_path / "export.csv", text)
    traces, _ = open_traces([str(path)])
    assert [trace.name.split("#")[1] for trace in traces] == ["r", "r (2)"]
    assert [load(trace).values["loss"].tolist() for trace in traces] == [[2], [3]]
    (note,) = traces[0].survey().notes
    assert note.problem.startswith("run 's': nothing in it is called like a loss")


def test_a_metric_of_another_name(tmp_path):
    path = write(tmp_path / "export.csv", "Step,r - total,s - total\n1,2,3\n")
    assert "--column loss=NAME" in refused(path)
    traces, _ = open_traces([str(path)], columns={"loss": "total"})
    assert len(traces) == 2
    (trace,), _ = open_traces([str(path)], columns={"loss": "s - total"})
    assert (trace.name, load(trace).values["loss"].tolist()) == (f"{path}#s", [3])
