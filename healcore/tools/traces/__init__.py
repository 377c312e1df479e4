"""Reading the logs of runs that already happened.

traces, unreadable = open_traces(["run.csv", "trainer_state.json", "logs/"])
for rows in traces[0].rows():
    rows.step, rows.values["loss"], rows.given["loss"]
"""

from healcore.tools.traces.lineage import lineage
from healcore.tools.traces.opening import open_traces
from healcore.tools.traces.trace import (
    CHUNK,
    SIGNALS,
    Attempt,
    Problem,
    Rows,
    Survey,
    Table,
    Trace,
    TraceError,
    Unreadable,
    load,
)

__all__ = [
    "CHUNK",
    "SIGNALS",
    "Attempt",
    "Problem",
    "Rows",
    "Survey",
    "Table",
    "Trace",
    "TraceError",
    "Unreadable",
    "lineage",
    "load",
    "open_traces",
]
