"""The public runs next to the repository: every row has the number that pandas gives it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from healcore.tools.traces import open_traces

TRACES = Path(__file__).parents[4] / "shared" / "traces"


@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.stress)])
def test_every_row_of_every_public_run(every):
    pandas = pytest.importorskip("pandas")
    paths = sorted(map(str, TRACES.glob("**/*.csv")))[::every]
    if not paths:
        pytest.skip(f"{TRACES} is not there: the recorded runs are not part of the repository")
    traces, unreadable = open_traces(paths)
    assert not unreadable
    assert [trace.name for trace in traces] == paths
    for trace in traces:
        frame, table = pandas.read_csv(trace.name), trace.rows
        assert table.step.tolist() == frame["step"].tolist()
        np.testing.assert_array_equal(table.values["loss"], frame["loss"].astype(np.float32))
        assert (len(trace.problems), trace.notes, len(trace.attempts)) == (0, (), 1)
