"""Rules: which hits of a cause lead to which actions.

A hit is a step with one of the rule's causes. A rule fires at once, after several hits in a row, or
after several hits within a window. The window is needed because a run in which every other step is
NaN never has ten hits in a row.
"""

from __future__ import annotations

from healcore.core.array_namespace import Flag, Int, Number, xp
from healcore.core.engine.config import RuleConfig
from healcore.core.engine.state import RuleState


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
    streak = (state.streak + 1) * hit
    fired = hit & (streak >= config.consecutive)
    window = state.window
    if config.within:
        window = xp.with_slot(window, step % config.within, xp.as_int(hit))
        fired = fired & (xp.sum(window, -1) >= config.count)
    newly_fired = fired & (state.age >= quiet_steps)
    age = xp.where(fired, 0, state.age + 1)
    return RuleState(streak, window, age), fired, newly_fired
