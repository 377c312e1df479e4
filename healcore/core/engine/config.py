"""The engine's configuration, made from a TOML file by `healcore.policy`.

Names, masks, modes and window lengths are static. Every other number may be an array, so that
thousands of variants run in one vmapped scan.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from healcore.core.clipping.zclip import UpdateClipConfig


class RuleConfig(NamedTuple):
    """One `[[respond]]` entry: to which causes, with what, and when."""

    causes: int
    """`Cause` flags it listens to. Static."""
    skip: bool = False
    """Skip the step. Static."""
    action: int = 0
    """`Action` flags it orders. Static."""
    sustained: bool = False
    """Only when the detector calls the trouble sustained. Static."""
    consecutive: Any = 1
    """Only at the n-th hit in a row and after."""
    count: Any = 0
    """Only with this many hits within the last `within` steps; 0 = no such condition."""
    within: int = 0
    """Length of that window in steps. Static."""


class IncidentConfig(NamedTuple):
    """Where one incident ends and the next begins."""

    quiet_steps: Any = 20
    """Steps without an alarm that close an incident."""
    patience: Any = 50
    """Alarms after an order, in the same incident, until recovery escalates."""


class RollbackConfig(NamedTuple):
    """Which checkpoint a rollback restores."""

    depth: Any = 1
    """Known-good checkpoints to go back the first time."""
    deepen: Any = 1
    """Extra checkpoints to go back for each further rollback in the same region."""
    region: Any = 500
    """Onsets fewer steps apart than this are in the same region."""


class LrConfig(NamedTuple):
    """The cut of the learning rate and the ramp after it."""

    factor: Any = 0.5
    """Multiplier of one cut, in (0, 1)."""
    floor: Any = 0.1
    """The multiplier never goes below this."""
    hold_steps: Any = 100
    """Healthy steps at the cut rate."""
    ramp_steps: Any = 200
    """Steps of the linear ramp, which ends at exactly 1.0, or at the ceiling."""
    ceiling: Any = 0.0
    """Upper limit of the ramp, as a fraction of the rate at the cut; long health raises it. 0: the
    ramp ends at the full schedule, even if that rate broke the run."""
    soft_step: Any = 0.1
    """Fraction of the update that SOFT_STEP leaves of one step, in (0, 1)."""
    reset_moments: bool = False
    """A cut also sets the optimizer's moments back to the start, which the adapters do. Static."""


class BudgetConfig(NamedTuple):
    """How often a run may recover."""

    recoveries: Any = 3
    """Rollbacks. With no rollback left a run that is not finite is stopped; otherwise an alert."""
    lr_cuts: Any = 4
    """Cuts of the learning rate."""
    refund_after: Any = 1000
    """Steps without an incident that give one of each back."""


class EngineConfig(NamedTuple):
    """A whole policy, as the core runs it."""

    mode: str = "heal"
    """heal, or observe: judge everything and change nothing. Static."""
    clip: tuple[str, Any] | None = None
    """(name in `clipping.RULES`, its config), or None."""
    update_clip: UpdateClipConfig | None = None
    """Clip of the update that the optimizer makes, or None."""
    detectors: tuple[tuple[str, Any], ...] = ()
    """(name in `detectors.DETECTORS`, its config), in that order."""
    rules: tuple[RuleConfig, ...] = ()
    incident: IncidentConfig = IncidentConfig()
    rollback: RollbackConfig = RollbackConfig()
    lr: LrConfig = LrConfig()
    budget: BudgetConfig = BudgetConfig()
    max_skips: Any = 10
    """Finite steps skipped or softened in a row; then they pass until an alarm-free one."""
    grace_steps: Any = 50
    """Steps after an expected change in which only non-finite values are alarms."""
