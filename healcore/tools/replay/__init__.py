"""Replays a policy over recorded runs.

A replay answers what a policy would have done in a run that has ended, from its log alone: which
rows it would have skipped or clipped, and where it would have rolled back.

    traces, unreadable = healcore.tools.traces.open_traces(["run.csv"])
    result = healcore.tools.replay.replay(traces[0], "default")
    for row in result:  # only rows with a decision that is not neutral
        print(row.step, row.cause, row.action)
    print(result.summary)
"""

from __future__ import annotations

from healcore.tools.replay.replayed import (
    DecidedRow,
    Replay,
    ReplayError,
    Summary,
    replay,
)

__all__ = ["DecidedRow", "Replay", "ReplayError", "Summary", "replay"]
