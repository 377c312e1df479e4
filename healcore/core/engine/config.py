"""Configuration of the engine; `healcore.policy` makes it from a TOML file.

Fields marked static are Python values. All others may be arrays, so that one vmapped scan runs
thousands of variants.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from healcore.core.ranges import Fraction, OnOff, Steps, StepsOrZero, number


class RuleConfig(NamedTuple):
    """One `[[respond]]` entry: the causes, the actions, and the condition."""

    causes: int
    """`Cause` flags that are hits of the rule. Static."""
    skip: bool = False
    """Skip the step. Static."""
    action: int = 0
    """`Action` flags it orders. Static."""
    sustained: bool = False
    """Only sustained alarms are hits. Static."""
    consecutive: Any = 1
    """Hits in a row from which the rule fires."""
    count: Any = 0
    """Hits within the last `within` steps from which the rule fires; 0 = no such condition."""
    within: int = 0
    """Length of the window for `count`, in steps. Static."""


class IncidentConfig(NamedTuple):
    """Where one incident ends and the next begins."""

    quiet_steps: Steps = 20
    """Steps without an alarm that close an incident."""
    patience: Steps = 50
    """Alarms after an order, in the same incident, until recovery escalates."""


class RollbackConfig(NamedTuple):
    """Which checkpoint a rollback restores."""

    depth: Any = 1
    """Known-good checkpoint that the first rollback restores; 1 = newest."""
    deepen: Any = 1
    """Increase of the depth per further rollback in the same region."""
    region: Any = 500
    """Distance in steps below which two onsets are in the same region."""


class LrConfig(NamedTuple):
    """Cuts of the learning rate, and the ramp after a cut."""

    factor: Fraction = 0.5
    """Factor of one cut, in (0, 1)."""
    floor: Annotated[Any, number(above=0, most=1)] = 0.1
    """Lower limit of the multiplier."""
    hold_steps: StepsOrZero = 100
    """Healthy steps at the cut rate before the ramp."""
    ramp_steps: StepsOrZero = 200
    """Healthy steps of the linear ramp to exactly 1.0, or to the ceiling."""
    ceiling: Annotated[Any, number(least=0, most=1)] = 0.0
    """Upper limit of the ramp as a fraction of the rate at the cut; long health raises it. With 0
    the ramp ends at the full schedule, even if that rate broke the run."""
    reset_moments: OnOff = False
    """A cut also resets the optimizer's moments and the counters of their bias correction.
    Static."""

    AT_MOST = (("floor", "factor"),)


class BudgetConfig(NamedTuple):
    """How often a run may recover."""

    recoveries: Any = 3
    """Rollbacks. When exhausted, NaN and Inf (with `confirm`: in the weights) stop the run."""
    lr_cuts: Any = 4
    """Cuts of the learning rate."""
    refund_after: Any = 1000
    """Steps without an incident that refund one rollback and one cut."""


class EngineConfig(NamedTuple):
    """A whole policy in the form that the engine runs."""

    mode: str = "heal"
    """`heal`, or `observe`, which judges everything and changes nothing. Static."""
    clip: tuple[str, Any] | None = None
    """(name in `clipping.RULES`, its config), or None."""
    detectors: tuple[tuple[str, Any], ...] = ()
    """(name in `detectors.DETECTORS`, its config), in the order in which they run."""
    rules: tuple[RuleConfig, ...] = ()
    incident: IncidentConfig = IncidentConfig()
    rollback: RollbackConfig = RollbackConfig()
    lr: LrConfig = LrConfig()
    budget: BudgetConfig = BudgetConfig()
    max_skips: Any = 10
    """Limit of consecutive finite steps skipped; a step without an alarm resets it."""
    grace_steps: Any = 50
    """Steps after an expected change in which only non-finite values are alarms."""
