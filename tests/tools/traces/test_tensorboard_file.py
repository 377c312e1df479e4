"""Event files, written by torch's SummaryWriter."""

import os

import numpy as np
import pytest

from healcore.tools.traces import lineage
from tests.tools.traces.opened_traces import open_one, problems_of

pytest.importorskip("tensorboard")
writer = pytest.importorskip("torch.utils.tensorboard")


def log(folder, first, last, *, suffix="", evaluations=()):
    with writer.SummaryWriter(str(folder), filename_suffix=suffix) as board:
        for step in range(first, last):
            board.add_scalar("train/loss", 3 - step / 64, step)
            board.add_scalar("train/grad_norm", 1.0, step, new_style=True)
            board.add_scalar("perf/speed", 9.0, step)
            if step in evaluations:
                board.add_scalar("eval/loss", 2.5, step - 1)
        board.add_text("note", "hello")
        board.add_histogram("weights", np.arange(5.0))


def file_in(folder):
    (name,) = os.listdir(folder)
    return folder / name


def test_scalars_and_tensors_of_one_step_are_one_row(tmp_path):
    log(tmp_path, 0, 50, evaluations={20})
    trace = open_one(file_in(tmp_path))
    table = trace.rows
    assert table.step.tolist() == list(range(50))
    np.testing.assert_array_equal(table.values["loss"], 3 - np.arange(50, dtype=np.float32) / 64)
    assert table.logged["grad_norm"].all()
    assert np.flatnonzero(table.logged["eval_loss"]).tolist() == [19]  # written a step late
    assert (trace.problems, trace.notes, len(trace.attempts)) == ((), (), 1)


def test_a_resumed_run_in_one_directory(tmp_path):
    log(tmp_path, 0, 30, suffix=".a")
    log(tmp_path, 20, 40, suffix=".b")
    trace = open_one(tmp_path)
    assert [(a.first_step, a.resumes_after) for a in trace.attempts] == [(0, None), (20, 19)]
    assert lineage(trace).step.tolist() == list(range(40))


def test_a_torn_record_and_a_damaged_one(tmp_path):
    log(tmp_path, 0, 40)
    path = file_in(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:-7])
    trace = open_one(path)
    assert trace.rows.step.tolist() == list(range(40))
    ((line, problem),) = problems_of(trace)
    assert line is None
    assert problem.startswith("truncated or damaged after ")
    path.write_bytes(content[:4000] + b"?" + content[4001:])
    trace = open_one(path)
    rows = len(trace.rows.step)
    assert 10 < rows < 40
    assert trace.rows.step.tolist() == list(range(rows))
    ((_, problem),) = problems_of(trace)
    assert "damaged after" in problem
