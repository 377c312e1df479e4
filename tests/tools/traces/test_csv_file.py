"""CSV files: their dialects, their cells, and the row numbers that pandas gives."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from healcore.tools.cli import app
from healcore.tools.traces import open_traces
from tests.tools.traces.opened_traces import column, open_one, problems_of, refusal, write


@pytest.mark.parametrize(
    "text",
    [
        "step,loss\n1,2.5\n2,2.25\n",
        "\ufeffstep,loss\r\n1,2.5\r\n2,2.25\r\n",
        '\n"step","loss"\n"1","2.5"\n\n"2","2.25"\n',
        'note,global_step,lm loss\n"two\nlines",1,2.5\n"a ""quote""",2,2.25\n',
        "step,loss\r1,2.5\r2,2.25\r",
        "step,loss\n1,2.5,\n2,2.25,,\n",
        "step;train_loss\n1;2.5\n2;2.25\n",
        "step\ttrain_loss\n1\t2.5\n2\t2.25\n",
        "step|train_loss\n1|2.5\n2|2.25\n",
        "step,loss,note\n1,2.5,\n2,2.25,saw {'x': 3}\n",  # a note like a record
        '"Step","lr=1|size=2|a - loss"\n"1","2.5"\n"2","2.25"\n',  # a name with bars
    ],
)
def test_csv_dialects_give_the_same_rows(tmp_path, text):
    table = open_one(write(tmp_path / "run.csv", text)).rows
    assert table.step.tolist() == [1, 2]
    assert table.values["loss"].tolist() == [2.5, 2.25]


def test_a_table_may_have_one_column(tmp_path):
    table = open_one(write(tmp_path / "run.csv", "train_loss\n2.5\n2.25\n")).rows
    assert table.values["loss"].tolist() == [2.5, 2.25]


def test_bad_lines_are_reported_by_number(tmp_path):
    text = "step,loss\n1,2\n2,abc\n\n3,\nx,3\n5\n6,1,2\n7,1\n,4\nnan,4\n8,1_0\n"
    usable = "".join(f"{step},1\n" for step in range(9, 60))
    trace = open_one(write(tmp_path / "run.csv", text + usable))
    table = trace.rows.select(np.arange(5))
    assert table.step.tolist() == [1, 2, 3, 7, 8]
    assert column(table.values["loss"]) == [2, "nan", "nan", 1, "nan"]
    assert table.logged["loss"].tolist() == [True, False, False, True, False]
    assert [line for line, _ in problems_of(trace)] == [3, 6, 7, 8, 10, 11, 12]
    problem = "'loss': 'abc' is not a number: the row is read without loss"
    assert problems_of(trace)[0] == (3, problem)


def test_a_column_can_be_named(tmp_path):
    path = write(tmp_path / "run.csv", "t,a,b\n5,1,2\n6,3,4\n")
    assert "--column loss=NAME" in refusal(path)
    table = open_one(path, columns={"loss": "b", "step": "t"}).rows
    assert (table.step.tolist(), table.values["loss"].tolist()) == ([5, 6], [2, 4])
    assert "it has 't', 'a', 'b'" in refusal(path, columns={"loss": "c"})


HEADER = "epoch,acc,loss\n"


def run_of(rows, losses=(), first=0):
    """Rows `epoch,acc,loss`: a falling loss, or the losses that are given."""
    values = list(losses) or [3 / (at + 1) for at in range(rows)]
    return "".join(f"{first + at},0.5,{value}\n" for at, value in enumerate(values))


def test_a_header_that_is_repeated_is_no_row(tmp_path):
    text = HEADER + run_of(30) + HEADER + run_of(0, [1.0] * 17 + ["nan"] * 13, 30)
    trace = open_one(write(tmp_path / "run.csv", text))
    assert (trace.unit, len(trace.rows.step), trace.problems) == ("epoch", 60, ())
    assert trace.rows.step[np.isnan(trace.rows.values["loss"])][0] == 47


LATER = {
    "a column more": ("epoch,acc,lr,loss\n", "{0},0.5,0.1,{1}\n"),
    "a column less": ("epoch,loss\n", "{0},{1}\n"),
    "the same columns in another order": ("loss,acc,epoch\n", "{1},0.5,{0}\n"),
    "a norm too": ("epoch,grad_norm,loss\n", "{0},0.5,{1}\n"),
}


@pytest.mark.parametrize("kind", LATER)
def test_rows_below_another_header_are_read_by_it(tmp_path, kind):
    header, row = LATER[kind]
    below = "".join(row.format(at, 2.0 if at < 47 else "nan") for at in range(30, 60))
    trace = open_one(write(tmp_path / "run.csv", HEADER + run_of(30) + header + below))
    assert (len(trace.rows.step), trace.problems) == (60, ())
    assert trace.rows.logged["loss"].all()
    assert trace.rows.step[np.isnan(trace.rows.values["loss"])].tolist() == [*range(47, 60)]
    norms = trace.rows.logged.get("grad_norm", np.zeros(60, bool))
    assert norms[30:].all() == (kind == "a norm too")


UNREAD = {
    "half have a column more": run_of(40) + "".join(f"{at},0.5,1,7\n" for at in range(40, 80)),
    "a fifth have a column less": run_of(40) + "".join(f"{at},1.5\n" for at in range(40, 50)),
    "the last few have a column more": run_of(400) + "400,0.5,1,7\n401,0.5,1,7\n402,0.5,1,7\n",
}
BELOW = {
    "a header without a loss": run_of(40) + "epoch,acc,lr\n" + run_of(40, first=40),
    "the last few below it": run_of(400) + "epoch,acc,lr\n" + run_of(4, first=400),
    "another name of the loss": run_of(40) + "epoch,acc,train_loss\n" + run_of(40, first=40),
}


@pytest.mark.parametrize("kind", BELOW)
def test_rows_below_a_header_without_the_loss_are_not_passed_over(tmp_path, kind):
    path = write(tmp_path / "run.csv", HEADER + BELOW[kind])
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["replay", str(path)])
    assert (result.exit_code, "no alarm" in result.output) == (1, False)
    assert re.search("not judged: the loss is missing from row (40|400) on", result.output)


@pytest.mark.parametrize("kind", UNREAD)
def test_rows_of_another_form_are_not_passed_over(tmp_path, kind):
    path = write(tmp_path / "run.csv", HEADER + UNREAD[kind])
    message = refusal(path)
    assert re.search("lines cannot be used, first in line (42|402): ", message)
    if kind == "half have a column more":
        assert "40 of 80 lines cannot be used, first in line 42: 4 cells where the" in message
    for command in (["replay"], ["probe", "loss"]):
        result = CliRunner().invoke(app, [*command, str(path)])
        assert result.exit_code in (1, 3)
        assert "no alarm" not in result.output


SUMMARIES = {
    "text": "epoch {0}: mean loss 2.5\n",
    "no step": ",2.5,\n",
    "another step": "epoch {0},2.5,\n",
}


@pytest.mark.parametrize("kind", SUMMARIES)
def test_a_summary_of_each_epoch_costs_no_verdict(tmp_path, kind):
    text = "step,acc,mine\n"
    for at in range(120):
        text += f"{at},0.5,{'nan' if at > 90 else 2.5}\n"
        if at % 8 == 7:
            text += SUMMARIES[kind].format(at // 8)
    path = write(tmp_path / "run.csv", text)
    result = CliRunner().invoke(app, ["replay", str(path), "--column", "loss=mine"])
    assert (result.exit_code, "first alarm at step 91" in result.output) == (0, True)


WORDS = ("", "nan", "NaN", "inf", "-inf", "Infinity", "None", "n/a", "x", " 1.5 ", "1e400")
CELLS = st.one_of(
    st.sampled_from(WORDS),
    st.floats(width=32).map(repr),
    st.text(alphabet='01.,;"-_e\n\r\t nax', max_size=6),
)


@pytest.mark.slow
@settings(max_examples=150)
@given(cells=st.lists(CELLS, min_size=1, max_size=12), quoting=st.integers(0, 1))
def test_any_cells_keep_the_numbers_that_pandas_gives(tmp_path_factory, cells, quoting):
    """Every row that is read has pandas' row number, and the float of its cell."""
    import csv

    pandas = pytest.importorskip("pandas")
    written = io.StringIO()
    writer = csv.writer(written, quoting=csv.QUOTE_ALL if quoting else csv.QUOTE_MINIMAL)
    writer.writerow(["step", "loss"])
    # Enough usable rows for a verdict, whatever comes.
    writer.writerows([[step, "1.5"] for step in range(-200, 1)])
    writer.writerows([[step, cell] for step, cell in enumerate(cells, 1)])
    writer.writerows([[len(cells) + 1, "1.5"]])
    path = write(tmp_path_factory.mktemp("cells") / "run.csv", written.getvalue())
    frame = pandas.read_csv(path, dtype=str, keep_default_na=False)
    trace = open_one(path)
    table = trace.rows
    assert table.step.tolist() == frame["step"].astype(float).tolist()
    unread = 0
    for at, cell in enumerate(frame["loss"]):
        try:
            number = float(cell) if "_" not in cell else None
        except ValueError:
            number = None
        assert table.logged["loss"][at] == (number is not None)
        if number is None:
            unread += cell.strip().lower() not in ("", "none", "na", "n/a")  # no problem
        else:
            with np.errstate(over="ignore"):
                np.testing.assert_array_equal(table.values["loss"][at], np.float32(number))
    assert len(trace.problems) == unread


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
    assert (unreadable, big.name, small.name) == ([], f"{path}#big - 7b", f"{path}#small")
    assert (big.rows.step.tolist(), big.rows.values["loss"].tolist()) == ([10, 30], [2.5, 2])
    assert small.signals == {"loss", "grad_norm"}
    assert "several runs ('big - 7b', 'small')" in open_traces([str(path)], join=True)[1][0].problem


LONG = {
    "one after the other": [(run, at) for run in "ab" for at in range(9)],
    "in turn": [(run, at) for at in range(9) for run in "ab"],
}


@pytest.mark.parametrize("order", LONG)
@pytest.mark.parametrize("names", [{"a": "lr=1", "b": "lr=2"}, {"a": "0", "b": "1"}])
def test_rows_with_the_names_of_several_runs_are_several_traces(tmp_path, order, names):
    losses = {"a": 2.5, "b": 3.5}
    rows = [f"{names[run]},{at},{losses[run]}\n" for run, at in LONG[order]]
    path = write(tmp_path / "runs.csv", "run,_step,loss\n" + "".join(rows))
    traces, failed = open_traces([str(path)])
    assert ([each.name for each in traces], failed) == ([f"{path}#{n}" for n in names.values()], [])
    for trace, loss in zip(traces, losses.values(), strict=True):
        assert trace.rows.step.tolist() == [*range(9)]
        assert set(trace.rows.values["loss"].tolist()) == {loss}
        assert trace.notes == (f"{path}: 'run' names 2 runs, and each is read by itself",)


def test_a_step_that_begins_again_is_said_to_be_another_attempt(tmp_path):
    rows = [f"base,{at},2.5\n" for _ in range(2) for at in range(9)]
    trace = open_one(write(tmp_path / "runs.csv", "Name,_step,loss\n" + "".join(rows)))
    assert len(trace.attempts) == 2
    assert "attempt 1 begins at step 0" in trace.notes[0]


@pytest.mark.parametrize("kind", [str, Path])
def test_one_path_is_one_path_and_not_its_letters(tmp_path, kind):
    """Of a text each letter would be a path, and "/" the whole disk."""
    path = write(tmp_path / "run.csv", "step,loss\n0,2.0\n1,1.5\n2,1.25\n")
    (trace,), failed = open_traces(kind(path))
    assert (trace.name, failed) == (str(path), [])
