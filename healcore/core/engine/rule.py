"""Rules: which hits of a cause lead to which actions.

A hit is a step with one of the rule's causes. A rule fires at once, after several hits in a row, or
after several hits within a window. The window is needed because a run in which every other step is
NaN never has ten hits in a row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from healcore.core.array_namespace import Flag, Int, Number, xp
from healcore.core.trees import zeros

_NEVER = 1 << 30


class RuleConfig(NamedTuple):
    """One `[[respond]]` entry: the causes, the actions, and the condition.

    A step with one of the causes is a hit. The condition says how many hits are needed until the
    actions are ordered: one, several in a row, or several within a window.
    """

    causes: int
    """`Cause` flags that are hits of the rule. Static."""
    skip: bool = False
    """Whether the rule skips the step. Static."""
    action: int = 0
    """`Action` flags that the rule orders. Static."""
    sustained: bool = False
    """Whether only sustained alarms are hits. Static."""
    consecutive: Number = 1
    """Hits in a row from which the rule fires."""
    count: Number = 0
    """Hits within the last `within` steps from which the rule fires; 0 = no such condition."""
    within: int = 0
    """Length of the window for `count`, in steps. Static."""


class RuleState(NamedTuple):
    """Hits of one rule, and its last firing."""

    streak: Int
    """Hits in a row."""
    window: Int
    """(within,): ring of the last steps, 1 for a hit; (0,) without a window."""
    age: Int
    """Steps since the rule last fired."""


def init_rule(config: RuleConfig) -> RuleState:
    """The state of a rule without hits."""
    window = np.zeros((config.within,), np.int32)
    return zeros(RuleState)._replace(window=window, age=np.full((), _NEVER, np.int32))


def update_rule(
    config: RuleConfig, state: RuleState, hit: Flag, step: Int, quiet_steps: Number
) -> tuple[RuleState, Flag, Flag]:
    """Counts one step for a rule, and decides whether the rule fires.

    Args:
        config: the rule.
        state: earlier hits.
        hit: whether a cause of the rule is present.
        step: number of the step, which gives its slot in the window.
        quiet_steps: steps without firing after which the next firing counts as new.

    Returns:
        The new state; whether the rule fires; and whether it fires for the first time in
        `quiet_steps` steps. A skip needs the first at each step. An alert at each step of a long
        fault would be noise, so alerts, saves and stops are ordered by the second.
    """
    streak, age, fired = state.streak, state.age, hit
    if type(config.consecutive) is not int or config.consecutive > 1:
        streak = xp.where(hit, streak + 1, 0)
        fired = hit & (streak >= config.consecutive)
    window = state.window
    if config.within:
        window = xp.with_slot(window, step % config.within, xp.as_int(hit))
        fired = fired & (xp.sum(window, -1) >= config.count)
    newly_fired = fired & (age >= quiet_steps)
    age = xp.where(fired, 0, age + 1)
    return RuleState(streak, window, age), fired, newly_fired
