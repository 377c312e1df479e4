"""Resumed runs: attempts, stale tails, and the final lineage of the run."""

from __future__ import annotations

import os
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from healcore.tools.traces import open_traces
from tests.tools.traces.opened_traces import lineage_of, open_one, write


def csv(steps, first=0):
    return "step,loss\n" + "".join(f"{step},{first + at}\n" for at, step in enumerate(steps))


def test_a_step_back_begins_an_attempt_that_replaces_the_tail(tmp_path):
    trace = open_one(write(tmp_path / "run.csv", csv([1, 2, 3, 4, 5, 3, 4, 5, 6])))
    attempts = [(each.first_row, each.first_step, each.resumes_after) for each in trace.attempts]
    assert attempts == [(0, 1, None), (5, 3, 1)]
    assert trace.rows.attempt.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert trace.stale == 3
    assert lineage_of(trace) == [0, 1, 5, 6, 7, 8]
    (note,) = trace.notes
    assert note.endswith("run.csv: the run was resumed: attempt 1 begins at step 3")


def test_rows_of_one_step_with_different_signals_are_one_row(tmp_path):
    """Also if an evaluation is written late, which is no resume."""
    text = "step,loss,eval_loss\n1,5,\n1,,4\n2,4,\n3,3,\n2,,9\n4,2,\n3,,8\n"
    trace = open_one(write(tmp_path / "run.csv", text))
    table = trace.rows
    assert table.step.tolist() == [1, 2, 3, 4]
    assert table.values["loss"].tolist() == [5, 4, 3, 2]
    assert table.values["eval_loss"].tolist()[:3] == [4, 9, 8]
    assert (len(trace.attempts), trace.notes) == (1, ())


def test_tables_in_one_folder_are_runs(tmp_path):
    for name in ("run-2", "run-10", "seedA"):
        write(tmp_path / f"{name}.csv", csv([1, 2, 3]))
    traces, failed = open_traces([str(tmp_path)])
    assert not failed
    names = [os.path.basename(trace.name) for trace in traces]
    assert names == ["run-2.csv", "run-10.csv", "seedA.csv"]
    (whole,), _ = open_traces([str(tmp_path)], join=True)
    assert len(whole.rows.step) == 9


@settings(max_examples=100)
@given(
    steps=st.lists(st.integers(0, 12), min_size=1, max_size=40), cuts=st.sets(st.integers(0, 40))
)
def test_the_lineage_is_that_of_a_list_that_is_cut_back(tmp_path_factory, steps, cuts):
    """The oracle keeps the whole run in a list and cuts it where the run goes back."""
    folder = tmp_path_factory.mktemp("run")
    edges = sorted({0, len(steps), *(cut for cut in cuts if cut < len(steps))})
    parts = {f"{low}.csv": csv(steps[low:high], low) for low, high in pairwise(edges)}
    paths = [str(write(folder / name, text)) for name, text in parts.items()]
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
    assert [attempt.resumes_after for attempt in trace.attempts] == ancestors
    assert trace.stale == replaced
    last = dict(run)  # of a repeated step the last row stays
    assert lineage_of(trace) == sorted(last.values())
    assert len(trace.rows.step) == len(steps)
