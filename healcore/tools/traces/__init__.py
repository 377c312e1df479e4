"""Reads the logs of recorded runs, which replays and probes then judge.

A trace is the log of one run, joined from its files.

traces, unreadable = open_traces(["run.csv", "trainer_state.json", "logs/"])
rows = traces[0].rows
rows.step, rows.values["loss"], rows.logged["loss"]
"""

from healcore.tools.traces.names import TraceError
from healcore.tools.traces.opening import open_traces, parse_columns
from healcore.tools.traces.trace import Trace, lineage

__all__ = ["Trace", "TraceError", "lineage", "open_traces", "parse_columns"]
