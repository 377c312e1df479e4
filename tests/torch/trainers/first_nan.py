"""A policy for short runs: it goes back at the first NaN, and a checkpoint is good two steps on."""

from __future__ import annotations

from healcore import policy

ROLLS_BACK = policy.loads(
    """
schema = 1
name = "first-nan"
[detect.nonfinite]
[[respond]]
to = ["nonfinite"]
do = ["skip", "rollback", "cut_lr"]
[incident]
quiet_steps = 2
patience = 5
[rollback]
probation = 2
[lr]
hold_steps = 3
ramp_steps = 4
"""
)
