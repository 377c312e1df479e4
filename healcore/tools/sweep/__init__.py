"""Tries thousands of settings of one policy on recorded runs, and ranks them by an objective.

traces, unreadable = healcore.tools.traces.open_traces(["runs/"])
found = healcore.tools.sweep.sweep(traces, "pretraining", vary=["detect.divergence.rise=5..12"])
Path("mine.toml").write_text(healcore.policy.dumps(found.policy))
"""

from __future__ import annotations

from healcore.tools.sweep.scores import Costs
from healcore.tools.sweep.search import Plan, Sweep, sweep
from healcore.tools.sweep.space import SweepError

__all__ = ["Costs", "Plan", "Sweep", "SweepError", "sweep"]
