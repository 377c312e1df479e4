"""Reads the logs of recorded runs.

traces, unreadable = open_traces(["run.csv", "trainer_state.json", "logs/"])
for rows in traces[0].rows():
    rows.step, rows.values["loss"], rows.logged["loss"]
"""

from healcore.tools.traces.log_files import open_traces
from healcore.tools.traces.trace import Attempt, Rows, Trace, TraceError, Unreadable, lineage

__all__ = [
    "Attempt",
    "Rows",
    "Trace",
    "TraceError",
    "Unreadable",
    "lineage",
    "open_traces",
]
