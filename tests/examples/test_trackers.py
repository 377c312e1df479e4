"""The example's trackers get every step, and TensorBoard's files can be replayed."""

from __future__ import annotations

import numpy as np

from examples import trackers
from healcore.tools.traces import open_traces


def test_example(tmp_path, capsys):
    trackers.main(str(tmp_path))
    out = capsys.readouterr().out
    assert out.startswith("steps 120, skipped 1, clipped 1: alarm alert end ")
    (trace,), unreadable = open_traces([str(tmp_path)])
    assert not unreadable
    table = trace.rows
    assert table.step.tolist() == list(range(120))
    assert np.flatnonzero(np.isnan(table.values["loss"])).tolist() == [trackers.RUINED]
    assert np.argmax(np.nan_to_num(table.values["grad_norm"])) == trackers.LARGE
