"""`Trouble`: why a run goes back, and `RollbackRecord`: a try that was made for it.

Whatever notices trouble makes a `Trouble`: a rule of the policy, a hook, NaN, a run without finite
steps, a comparison of weights. `remedy` decides what is done, and `recovery` has it carried out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from pydantic import ConfigDict, NonNegativeInt

from healcore.core.decision import Action
from healcore.runtime.data import BatchId
from healcore.runtime.run.envelope import Envelope


class TroubleCause(StrEnum):
    """What has shown the trouble. Checkpoints and events hold the values."""

    RULE = "rule"
    """A rule of the policy."""
    HOOK = "hook"
    """A hook of the program has asked for a rollback or a stop that no rule orders."""
    WEIGHTS = "weights"
    """The weights have NaN or Inf."""
    STATE = "state"
    """An array that a checkpoint saves has NaN or Inf."""
    NO_FINITE_STEP = "nonfinite_steps"
    """No step is finite any more, although the weights are finite."""
    BETTER_WEIGHTS = "earlier_weights"
    """Earlier weights are better on the same batches."""
    INTENDED = "intended_numbers"
    """The program keeps a number that is held outside of its healthy range: it is intended."""


_ABOUT_LOSSES = (
    TroubleCause.NO_FINITE_STEP,
    TroubleCause.BETTER_WEIGHTS,
    TroubleCause.INTENDED,
)


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Why the run goes back. The same value for every cause.

        newest sound snapshot         onset               found_at
    --------------|----------------------|---- trouble -------|--> the remedy is chosen
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    cause: TroubleCause = TroubleCause.RULE
    """What has shown it."""
    onset: int
    """First step that may be damaged. A checkpoint of a later step may hold the damage."""
    found_at: int
    """Step whose records have shown it."""
    since: int
    """First step of the trouble as the log names it. It is later than `onset` if the incident began
    with another cause, and earlier if only a save has shown the trouble."""
    action: int = int(Action.ROLLBACK)
    """`Action` flags: what a rule or a hook asks for."""
    flags: int = 0
    """`Cause` flags of the alarms."""
    depth: int = 1
    """Known-good checkpoint that a rule asks for: 1 is the newest before the onset."""
    finite: bool = False
    """Whether the present weights can be kept: they are finite, and no rule or hook forbids it."""
    sound_before: bool = False
    """Whether the state is known to be sound up to the onset, so that a checkpoint need not be
    known-good."""
    batches: tuple[BatchId, ...] = ()
    """Batches whose own loss or gradient was not finite, or that a rule skips."""
    arrays: tuple[str, ...] = ()
    """Names of the arrays with NaN or Inf, if a save has shown the trouble."""
    exact: bool = False
    """Whether `batches` is the one batch that makes the arrays NaN or Inf."""
    better_step: int | None = None
    """Step of the better earlier weights, or None."""
    loss_before: float | None = None
    """The mean loss when these weights were saved, or None if it is not known."""
    intended: str = ""
    """The held numbers that are intended, and their values; or empty."""

    @property
    def recovers_until(self) -> int:
        """Step until which a run with better earlier weights has time to recover.

        The wait begins at the onset, and has as many steps as lie between the better weights and
        the onset. A run that recovers during the wait loses fewer steps than by the rollback. A run
        that does not recover loses about twice as many (rent or buy: Karlin et al. 1988,
        "Competitive snoopy caching"). Thus a learning rate that is raised on purpose gets time to
        recover.
        """
        return self.onset + (self.onset - (self.better_step or 0))

    @property
    def is_in_budget(self) -> bool:
        """Whether the policy's budget limits the rollbacks: for rules, hooks, NaN and Inf."""
        return self.cause not in _ABOUT_LOSSES or not self.finite

    @property
    def is_asked_for(self) -> bool:
        """Whether a rule or a hook asks for the rollback, and no evidence of damage."""
        return self.cause in (TroubleCause.RULE, TroubleCause.HOOK)


@dataclass(frozen=True, kw_only=True)
class RollbackRecord:
    """A try for a trouble: a rollback that was carried out. The ledger and the report keep it."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    trouble: Trouble
    """Why."""
    accepts: bool = False
    """Whether this rollback has undone the tries before it, see `Outcome.ACCEPT`."""
    limits_rate: bool = False
    """Whether a ceiling of the learning rate was set."""
    before: Envelope = field(default_factory=Envelope)
    """What was held before."""
    after: Envelope = field(default_factory=Envelope)
    """What is held since."""
    number: int = 0
    """Number of the rollback, from 1 over the whole run."""
    step: int = 0
    """Steps done when the rollback began."""
    checkpoint: NonNegativeInt = 0
    """Steps done where the run continues: the step of the restored checkpoint."""
    repeated: int = 0
    """Number of undone steps that the run repeats."""
    lost: int = 0
    """Number of undone steps that the run does not repeat, because the data was not rewound."""
    why_lost: str = ""
    """Why the data was not rewound, in short, or an empty string if no step is lost."""
    rewind_obstacle: str = ""
    """Why the data continues forward, with what to write instead, or an empty string if it was
    rewound."""
    lr: float | None = None
    """The schedule's learning rate when the rollback began, or None if unknown. This and the next
    three are of the optimizer with the lowest multiplier, preferably with a limit."""
    lr_at_fault: float | None = None
    """The rate that a ceiling answers, or None without a new one."""
    lr_limit: float | None = None
    """Upper limit of the rate, or None without a limit or if unknown."""
    lr_scale: float = 1.0
    """The multiplier at `checkpoint`: 1 where the schedule is below the limit."""
    lr_scale_before: float = 1.0
    """The lowest multiplier of all optimizers when the rollback began."""

    @property
    def onset(self) -> int:
        """First step of the trouble."""
        return self.trouble.onset

    @property
    def batches(self) -> tuple[BatchId, ...]:
        """Batches that this rollback leaves out."""
        return self.after.beyond(self.before).left_out

    @property
    def holds(self) -> bool:
        """Whether anything is held or limited that was not before."""
        return bool(self.after.beyond(self.before)) or self.limits_rate

    def outline(self) -> RollbackRecord:
        """A copy without the envelopes, for a trouble of long ago."""
        return replace(self, before=Envelope(), after=Envelope())

    def to_dict(self) -> dict[str, Any]:
        """The rollback as one flat dict, for `HealingReport.to_dict`."""
        found = {**asdict(self.trouble), **asdict(self), "batches": self.batches}
        for name in ("trouble", "before", "after"):
            del found[name]
        return {**found, "held": self.after.sentences()}
