"""Resumed runs: attempts, stale tails, and the final lineage of the run."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healcore.tools.traces import TraceError, open_traces
from healcore.tools.traces.trace import CHUNK
from tests.tools.traces.opened_traces import lineage_of, load, open_one, write


def csv(steps, first=0):
    return "step,loss\n" + "".join(f"{step},{first + at}\n" for at, step in enumerate(steps))


def test_a_step_back_begins_an_attempt_that_replaces_the_tail(tmp_path):
    trace = open_one(write(tmp_path / "run.csv", csv([1, 2, 3, 4, 5, 3, 4, 5, 6])))
    survey = trace.survey()
    assert [(a.first_index, a.first_step, a.resumes_after) for a in survey.attempts] == [
        (0, 1, None),
        (5, 3, 1),
    ]
    assert load(trace).attempt.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert survey.stale == 3
    assert lineage_of(trace) == [0, 1, 5, 6, 7, 8]
    (note,) = survey.notes
    assert str(note).endswith(
        "run.csv, line 7: step 3 follows step 5: the run was resumed, and attempt 1 begins"
    )


def test_files_are_joined_in_the_order_given(tmp_path):
    first = write(tmp_path / "a.csv", csv([10, 20, 30, 40]))
    second = write(tmp_path / "b.csv", csv([50, 60]))  # goes on: no new attempt
    third = write(tmp_path / "c.csv", csv([40, 50, 60, 70]))  # its first step was the last but two
    (trace,), unreadable = open_traces([str(first), str(second), str(third)], join=True)
    assert not unreadable
    assert trace.sources == (str(first), str(second), str(third))
    assert trace.name == f"{first} (+2)"
    assert [(a.source, a.first_index, a.resumes_after) for a in trace.survey().attempts] == [
        (str(first), 0, None),
        (str(third), 6, 2),
    ]
    assert lineage_of(trace) == [0, 1, 2, 6, 7, 8, 9]


def test_unreadable_rows_of_a_file_count_in_the_next(tmp_path):
    first = write(tmp_path / "a.csv", "step,loss\n1,2\nx,2\n3\n")
    second = write(tmp_path / "b.csv", csv([4, 5]))
    (trace,), _ = open_traces([str(first), str(second)], join=True)
    assert load(trace).index.tolist() == [0, 3, 4]


def test_a_repeated_step_is_reported_and_the_later_row_stays(tmp_path):
    trace = open_one(write(tmp_path / "run.csv", csv([1, 2, 2, 2, 3, 3])))
    survey = trace.survey()
    assert (survey.rows, survey.note_count) == (6, 1)
    assert len(survey.attempts) == 1
    assert survey.notes[0].line == 4
    assert lineage_of(trace) == [0, 3, 5]


def test_rows_of_one_step_with_different_signals_are_one_row(tmp_path):
    text = "step,loss,eval_loss\n1,5,\n1,,4\n2,,3\n2,4,\n3,3,\n"
    trace = open_one(write(tmp_path / "run.csv", text))
    table = load(trace)
    assert table.step.tolist() == [1, 2, 3]
    assert table.values["loss"].tolist() == [5, 4, 3]
    assert table.values["eval_loss"][:2].tolist() == [4, 3]
    assert table.index.tolist() == [0, 3, 4]  # the row with the loss gives the number
    assert not trace.survey().notes


def test_an_evaluation_that_is_written_late_is_no_resume(tmp_path):
    text = "step,loss,eval_loss\n1,5,\n2,4,\n3,3,\n2,,9\n4,2,\n1,,8\n"
    trace = open_one(write(tmp_path / "run.csv", text))
    table = load(trace)
    assert len(trace.survey().attempts) == 1
    assert table.step.tolist() == [1, 2, 3, 4]
    assert table.index.tolist() == [0, 1, 2, 4]
    assert table.values["eval_loss"].tolist()[:2] == [8, 9]


def test_evaluations_of_all_checkpoints_afterwards_are_rows_of_their_own(tmp_path):
    steps = range(1, 5 * CHUNK)
    text = "step,loss,eval_loss\n" + "".join(f"{step},{step % 7},\n" for step in steps)
    text += "1000,,5\n2000,,4\n1000,,3\n"
    trace = open_one(write(tmp_path / "run.csv", text))
    survey = trace.survey()
    assert len(survey.attempts) == 1
    assert survey.rows == len(steps) + 3
    assert lineage_of(trace) == list(range(len(steps) + 3))


def test_signals_that_are_written_one_after_the_other_meet(tmp_path):
    text = "step,loss,grad_norm\n" + "".join(f"{step},2,\n" for step in range(200))
    text += "".join(f"{step},,1\n" for step in range(200))
    trace = open_one(write(tmp_path / "run.csv", text))
    assert trace.survey().combinations == {frozenset({"loss", "grad_norm"})}
    assert trace.survey().rows == 200


def test_tables_in_one_folder_are_runs_and_continuations_are_not(tmp_path):
    write(tmp_path / "run-2.csv", csv([1, 2, 3]))
    write(tmp_path / "run-3.csv", csv([3, 4]))
    write(tmp_path / "run-10.csv", csv([1, 2]))
    write(tmp_path / "seedA.csv", csv([10, 20]))
    write(tmp_path / "seedB.csv", csv([15, 20]))
    traces, failed = open_traces([str(tmp_path)])
    assert not failed
    names = [[source.rsplit("/")[-1] for source in trace.sources] for trace in traces]
    assert names == [["run-2.csv", "run-3.csv"], ["run-10.csv"], ["seedA.csv"], ["seedB.csv"]]
    assert [trace.name for trace in traces][:2] == [
        f"{tmp_path}/run-2.csv (+1)",
        f"{tmp_path}/run-10.csv",
    ]
    (whole,), _ = open_traces([str(tmp_path)], join=True)
    assert whole.survey().rows == 11


def test_a_directory_of_directories_is_all_of_them(tmp_path):
    for name in ("b", "a/c"):
        (tmp_path / name).mkdir(parents=True)
        write(tmp_path / name / "log.csv", csv([1, 2]))
    write(tmp_path / "labels.json", "[]")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    write(tmp_path / "bad" / "log.csv", "step,loss\n")
    traces, failed = open_traces([str(tmp_path)])
    assert [os.path.relpath(path, tmp_path) for path, _ in failed] == ["bad"]
    assert [os.path.relpath(trace.name, tmp_path) for trace in traces] == ["a/c", "b"]


def test_fresh_starts_of_one_run_are_reported(tmp_path):
    paths = [write(tmp_path / "run-2.csv", csv([1, 2, 3])), write(tmp_path / "x.csv", csv([1, 2]))]
    (trace,), _ = open_traces([str(path) for path in paths], join=True)
    notes = [note.text for note in trace.survey().notes]
    assert any("If these are several runs, name the files" in note for note in notes)


def test_many_writers_in_one_file_are_refused(tmp_path):
    trace = open_one(write(tmp_path / "run.csv", csv(list(range(3000, 0, -1)))))
    with pytest.raises(TraceError, match=r"line \d+: the steps decrease for the 1,000th time"):
        trace.survey()


@settings(max_examples=100)
@given(
    steps=st.lists(st.integers(0, 12), min_size=1, max_size=40), cuts=st.sets(st.integers(0, 40))
)
def test_the_lineage_is_that_of_a_list_that_is_cut_back(tmp_path_factory, steps, cuts):
    """The oracle keeps the whole run in a list and cuts it where the run goes back."""
    folder = tmp_path_factory.mktemp("run")
    edges = sorted({0, len(steps), *(cut for cut in cuts if cut < len(steps))})
    paths = [
        str(write(folder / f"{low}.csv", csv(steps[low:high]))) for low, high in pairwise(edges)
    ]
    (trace,), _ = open_traces(paths, join=True)
    run: list[tuple[int, int]] = []
    ancestors: list[int | None] = [None]
    replaced = 0
    for index, step in enumerate(steps):
        back = run and (step < run[-1][0] or (step == run[-1][0] and index in edges))
        if back:
            stays = [row for row in run if row[0] < step]
            replaced += len(run) - len(stays)
            run = stays
            ancestors.append(run[-1][1] if run else None)
        run.append((step, index))
    survey = trace.survey()
    assert [attempt.resumes_after for attempt in survey.attempts] == ancestors
    assert survey.stale == replaced
    last = dict(run)  # of a repeated step the last row stays
    assert lineage_of(trace) == sorted(last.values())
    assert survey.rows == len(steps)
