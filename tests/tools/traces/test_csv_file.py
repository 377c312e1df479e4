"""CSV files: their dialects, their cells, and the row numbers that pandas gives."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healcore.tools.traces import open_traces
from healcore.tools.traces.columns import SIGNALS
from healcore.tools.traces.tables import MAX_LINE
from tests.tools.traces.opened_traces import column, load, open_one, problems_of, refusal, write


def test_a_plain_file(tmp_path):
    trace = open_one(
        write(tmp_path / "run.csv", "step,loss,grad_norm\n1,2.5,0.5\n2,nan,inf\n3,2.25,\n")
    )
    table = load(trace)
    assert table.index.tolist() == [0, 1, 2]
    assert table.step.tolist() == [1, 2, 3]
    assert column(table.values["loss"]) == [2.5, "nan", 2.25]
    assert column(table.values["grad_norm"]) == [0.5, np.inf, "nan"]
    assert table.logged["loss"].all()  # the text nan is a value
    assert table.logged["grad_norm"].tolist() == [True, True, False]  # an empty cell is not
    assert trace.signals == {"loss", "grad_norm"}
    assert trace.problem_count == len(trace.notes) == 0


@pytest.mark.parametrize(
    "text",
    [
        "step,loss\n1,2.5\n2,2.25\n",
        "\ufeffstep,loss\r\n1,2.5\r\n2,2.25\r\n",
        '\n"step","loss"\n"1","2.5"\n\n"2","2.25"\n',
        "epoch,_step,train/loss,note\n0,1,2.5,hello\n0,2,2.25,\n",
        'note,global_step,lm loss\n"two\nlines",1,2.5\n"a ""quote""",2,2.25\n',
        "step,loss\r1,2.5\r2,2.25\r",
        "step,loss\n1,2.5,\n2,2.25,,\n",
    ],
)
def test_dialects(tmp_path, text):
    table = load(open_one(write(tmp_path / "run.csv", text)))
    assert table.step.tolist() == [1, 2]
    assert table.values["loss"].tolist() == [2.5, 2.25]


def test_bad_lines_are_reported_by_number_and_keep_their_index(tmp_path):
    text = (
        "step,loss\n1,2\n2,abc\n\n3,\nx,3\n5\n6,1,2\n7,1\n,4\nnan,4\n8,1_0\n"  # line 12 is the last
    )
    trace = open_one(write(tmp_path / "run.csv", text))
    table = load(trace)
    assert table.index.tolist() == [0, 1, 2, 6, 9]
    assert table.step.tolist() == [1, 2, 3, 7, 8]
    assert column(table.values["loss"]) == [2, "nan", "nan", 1, "nan"]
    assert table.logged["loss"].tolist() == [True, False, False, True, False]
    assert problems_of(trace) == [
        (3, "column 'loss': 'abc' is not a number: the row is read without loss"),
        (6, "column 'step': 'x' is not a number: the row is skipped"),
        (7, "1 cell where the header has 2: the row is skipped"),
        (8, "3 cells where the header has 2: the row is skipped"),
        (10, "column 'step': missing: the row is skipped"),
        (11, "column 'step': nan: the row is skipped"),
        (12, "column 'loss': '1_0' is not a number: the row is read without loss"),
    ]


def test_a_quote_that_is_never_closed_costs_a_part_of_the_file(tmp_path):
    rows = "".join(f"{step},1.5,\n" for step in range(2, 60_000))
    trace = open_one(write(tmp_path / "run.csv", f'step,loss,note\n0,1,\n1,2,"oops\n{rows}'))
    assert trace.problem_count == 1
    assert "field larger than field limit" in trace.problems[0]
    assert len(trace.rows.index) > 40_000
    assert trace.rows.step[-1] == 59_999


def test_a_line_without_an_end_is_skipped(tmp_path):
    text = "step,loss\n0,1\n1," + "9" * (MAX_LINE + 5) + "\n2,3\n"
    trace = open_one(write(tmp_path / "run.csv", text))
    assert trace.rows.step.tolist() == [0, 2]
    assert problems_of(trace) == [(3, "the line is longer than 1 MB: skipped")]


@pytest.mark.parametrize("line", ["2,3,4", "2", '"2",3', "2,", " ", "2,x", "nan,1", "inf,1"])
def test_plain_numbers_are_read_as_csv_reads_them(tmp_path, line):
    """A file of plain numbers has the same rows as the same file with one other line."""
    numbers = ["1e-3", "-0.0", "nan", "inf", " 2.5 ", "1e400", "9007199254740993", "1E+5"]
    rows = "".join(f"{step},{number}\n" for step, number in enumerate(numbers))
    plain = open_one(write(tmp_path / "a.csv", f"step,loss\n{rows}"))
    other = open_one(write(tmp_path / "b.csv", f"step,loss\n{rows}{line}\n"))
    assert plain.problem_count == 0
    first = slice(len(numbers))
    assert len(plain.rows.index) == len(numbers)
    for name in ("index", "step"):
        mine, theirs = getattr(plain.rows, name), getattr(other.rows, name)
        np.testing.assert_array_equal(mine, theirs[first])
    np.testing.assert_array_equal(plain.rows.values["loss"], other.rows.values["loss"][first])


def test_without_steps_the_rows_are_counted(tmp_path):
    table = load(open_one(write(tmp_path / "run.csv", "loss\n3\n2\nx\n1\n")))
    assert table.step.tolist() == table.index.tolist() == [0, 1, 2, 3]


def test_a_column_can_be_named(tmp_path):
    path = write(tmp_path / "run.csv", "t,a,b\n5,1,2\n6,3,4\n")
    assert "--column loss=NAME" in refusal(path)
    table = load(open_one(path, columns={"loss": "b", "step": "t"}))
    assert (table.step.tolist(), table.values["loss"].tolist()) == ([5, 6], [2, 4])
    assert "it has 't', 'a', 'b'" in refusal(path, columns={"loss": "c"})


def test_whole_numbers_of_a_step_are_exact(tmp_path):
    table = load(open_one(write(tmp_path / "run.csv", "step,loss\n9007199254740991,1e39\n")))
    assert table.step[0] == 9007199254740991
    assert table.values["loss"][0] == np.inf  # as it would be in a float32 training


CELLS = st.one_of(
    st.just(""),
    st.sampled_from(
        ["nan", "NaN", "inf", "-inf", "Infinity", "None", "n/a", "x", " 1.5 ", "1e400"]
    ),
    st.floats(width=32).map(repr),
    st.text(alphabet='01.,;"-_e\n\r\t nax', max_size=6),
)


@settings(max_examples=150)
@given(cells=st.lists(CELLS, min_size=1, max_size=12), quoting=st.integers(0, 1))
def test_any_cells_keep_the_numbers_that_pandas_gives(tmp_path_factory, cells, quoting):
    """Every row that is read has pandas' row number, and the float of its cell."""
    import csv

    pandas = pytest.importorskip("pandas")
    written = io.StringIO()
    writer = csv.writer(written, quoting=csv.QUOTE_ALL if quoting else csv.QUOTE_MINIMAL)
    writer.writerow(["step", "loss"])
    writer.writerow([0, "1.5"])  # a usable row, whatever comes
    writer.writerows([[step, cell] for step, cell in enumerate(cells, 1)])
    path = write(tmp_path_factory.mktemp("cells") / "run.csv", written.getvalue())
    frame = pandas.read_csv(path, dtype=str, keep_default_na=False)
    trace = open_one(path)
    table = load(trace)
    assert table.index.tolist() == list(range(len(frame)))
    assert table.step.tolist() == frame["step"].astype(float).tolist()
    unread = 0
    for at, cell in enumerate(frame["loss"]):
        try:
            number = float(cell) if "_" not in cell else None
        except ValueError:
            number = None
        assert table.logged["loss"][at] == (number is not None)
        if number is None:
            unread += cell.strip().lower() not in ("", "none", "n/a", "na")
        else:
            with np.errstate(over="ignore"):
                np.testing.assert_array_equal(table.values["loss"][at], np.float32(number))
    assert trace.problem_count == unread


def test_names_of_signals_are_the_cores():
    from healcore.core.signals import Signals

    assert set(SIGNALS) - {"lr"} <= set(Signals._fields)


# -- charts exported from Weights & Biases ---------------------------------------------------------


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
    assert small.signals == {"loss", "grad_norm"}
    assert load(small).index.tolist() == [1, 2]
    assert "several runs ('big - 7b', 'small')" in open_traces([str(path)], join=True)[1][0].problem


def test_one_run_keeps_its_rows_and_its_name(tmp_path):
    text = "Step,r - train/loss,r - train/loss__MIN,r - train/loss__MAX\n1,2,2,2\n2,,,\n3,1,1,1\n"
    path = write(tmp_path / "export.csv", text)
    (trace,), _ = open_traces([str(path)])
    assert trace.name == str(path)
    assert load(trace).index.tolist() == [0, 1, 2]
    assert load(trace).logged["loss"].tolist() == [True, False, True]


def test_runs_of_one_name_and_runs_without_a_loss(tmp_path):
    text = "Step,r - loss,r - loss,s - accuracy\n1,2,3,4\n"
    path = write(tmp_path / "export.csv", text)
    traces, _ = open_traces([str(path)])
    assert [trace.name.split("#")[1] for trace in traces] == ["r", "r (2)"]
    assert [load(trace).values["loss"].tolist() for trace in traces] == [[2], [3]]
    (note,) = traces[0].notes
    assert "run 's': no column or key has the name of a loss" in note


def test_a_metric_of_another_name(tmp_path):
    path = write(tmp_path / "export.csv", "Step,r - total,s - total\n1,2,3\n")
    assert "--column loss=NAME" in refusal(path)
    traces, _ = open_traces([str(path)], columns={"loss": "total"})
    assert len(traces) == 2
    (trace,), _ = open_traces([str(path)], columns={"loss": "s - total"})
    assert (trace.name, load(trace).values["loss"].tolist()) == (f"{path}#s", [3])
