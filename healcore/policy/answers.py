"""Tables for the answers of a run to trouble: the rules, how a run recovers, and how often.

A rule of `[[respond]]` names causes of detectors, or faults. Only the host detects faults:
exceptions, and steps that hang. `Policy.config` therefore omits the rules for faults, and the
runtime applies them. `[rollback]` and `[budget]` add keys of the host to the engine's. `[retry]`,
`[skip_batch]` and `[hang]` are for faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from healcore.core.decision import Action, Cause
from healcore.core.detectors import CAUSES
from healcore.core.engine import BudgetConfig, RollbackConfig, RuleConfig
from healcore.core.ranges import (
    OnOff,
    Positive,
    Ratio,
    Steps,
    StepsOrZero,
    listed,
    number,
    one_of,
    whole,
)
from healcore.policy.tables import Conflict

FAULTS: dict[str, tuple[Cause, tuple[str, ...]]] = {
    "oom": (Cause.OOM, ("shrink_microbatch", "clear_cache", "save")),
    "data": (Cause.DATA, ("skip_batch", "save")),
    "network": (Cause.NETWORK, ("retry", "save")),
    "hang": (Cause.HANG, ("alert", "stop")),
    "unknown": (Cause.UNKNOWN, ("save",)),
}
"""Flag and allowed actions of each fault that `to` may name. Every fault is logged."""

_FAULT_ACTIONS = tuple(dict.fromkeys(name for _, names in FAULTS.values() for name in names))

SKIP = "skip"
ACTIONS = {action.name.lower(): action for action in Action if action.name}
"""Actions that `do` may name, besides "skip", which the device performs within the step."""
_DO = tuple(dict.fromkeys((SKIP, *ACTIONS, *_FAULT_ACTIONS)))


class When(NamedTuple):
    """The condition of a rule: all given keys must hold."""

    sustained: OnOff = False
    """Only alarms that the detector calls sustained are hits."""
    consecutive: Annotated[int, whole(1, 1_000_000)] = 1
    """Hits in a row from which the rule fires."""
    # The window is an int32 ring in the engine's state, so its length takes memory in checkpoints.
    count: Annotated[int, whole(0, 4096)] = 0
    """Hits within the last `within` steps from which the rule fires."""
    within: Annotated[int, whole(0, 4096)] = 0
    """Length of the window for `count`, in steps. Set both or neither."""

    AT_MOST = (("count", "within"),)

    def conflicts(self) -> Iterator[Conflict]:
        """Yields a conflict if `count` or `within` is set alone."""
        if bool(self.count) != bool(self.within):
            present, absent = ("count", "within") if self.count else ("within", "count")
            rule = f"together with {absent}: a number of hits, and a window in steps"
            example = "when = { count = 5, within = 100 }"
            yield (present,), getattr(self, present), rule, example


@dataclass(frozen=True)
class Respond:
    """One rule, either for causes of detectors or for faults."""

    to: Annotated[tuple[str, ...], listed(one_of(*CAUSES, *FAULTS))]
    """Causes to which the rule responds. A cause of a detector needs the table of its detector."""
    do: Annotated[tuple[str, ...], listed(one_of(*_DO))]
    """Actions of the rule."""
    when: When = When()

    @property
    def for_faults(self) -> bool:
        """Whether the rule is for faults; the engine does not see such rules."""
        return self.to[0] in FAULTS

    def conflicts(self) -> Iterator[Conflict]:
        """Yields mixed kinds of causes, and actions that do not fit all causes."""
        for j, cause in enumerate(self.to):
            if (cause in FAULTS) is not self.for_faults:
                kinds = ("a step", "an exception")
                here, there = kinds if self.for_faults else kinds[::-1]
                rule = f"of the same kind as {self.to[0]!r}: one comes from {here}, the other from "
                yield ("to", j), cause, rule + there, f"a separate rule for {cause!r}"
                return
        for cause in self.to:
            allowed = FAULTS[cause][1] if self.for_faults else (SKIP, *ACTIONS)
            for j, action in enumerate(self.do):
                if action not in allowed:
                    choices = ", ".join(f'"{each}"' for each in allowed)
                    rule = f"an action for {cause!r}: one of {choices}"
                    yield ("do", j), action, rule, f"drop {action!r}"
        if self.for_faults and self.when != When():
            given = dict(set(self.when._asdict().items()) - set(When()._asdict().items()))
            rule = "in rules for detectors; faults have [retry], [skip_batch], [hang] and [budget]"
            yield ("when",), given, rule, "drop when"

    def config(self) -> RuleConfig:
        """The core's rule, with flags instead of names; only for rules without faults."""
        causes = action = 0
        for name in self.to:
            causes |= int(CAUSES[name])
        for name in self.do:
            action |= 0 if name == SKIP else int(ACTIONS[name])
        return RuleConfig(causes, SKIP in self.do, action, **self.when._asdict())


# -- recovery --------------------------------------------------------------------------------------

_rollback, _budget = RollbackConfig(), BudgetConfig()
_Few = Annotated[int, whole(0, 1000)]


class Rollback(NamedTuple):
    """Which checkpoint a rollback restores, and under which conditions."""

    depth: Annotated[int, whole(1, 1000)] = _rollback.depth
    deepen: _Few = _rollback.deepen
    region: StepsOrZero = _rollback.region
    probation: Steps = 100
    """Healthy steps after a checkpoint until the checkpoint counts as known-good."""
    skip_batches: StepsOrZero = 0
    """Batches that a rollback skips after the batches of the incident."""
    confirm: OnOff = False
    """A rollback needs evidence: weights that are not finite, or earlier weights that are
    better. An order without evidence is declined and does not use the budget. The `Healer` itself
    applies the rules that roll back for NaN and Inf: only it can look at the weights."""
    evidence: Annotated[float, number(least=10)] = 1e4
    """With a `loss_fn`: lower bound of the mean number of comparisons per false rollback."""
    nonfinite_state: Annotated[str, one_of("alert", "rollback", "stop")] = "rollback"
    """Response to a save that finds NaN or Inf in weights, moments or other saved arrays,
    although no step raised an alarm. Arrays in `nonfinite_ok` are not checked."""
    reset_moments: OnOff = False
    """A rollback also resets the optimizer's moments and the counters of their bias correction."""


class Budget(NamedTuple):
    """How often a run may recover; when exhausted, a non-finite step stops the run."""

    recoveries: _Few = _budget.recoveries
    lr_cuts: _Few = _budget.lr_cuts
    shrinks: _Few = 6
    """Halvings of a micro-batch that does not fit into memory."""
    refund_after: Steps = _budget.refund_after


class Retry(NamedTuple):
    """`[retry]`: how a failed network call is repeated.

    The wait after attempt n is `base_delay_s * factor ** (n - 1)`, at most `max_delay_s`. A random
    part of up to the share `jitter` is subtracted, so that many processes do not retry at once.
    """

    base_delay_s: Positive = 1.0
    """Seconds before the second attempt."""
    factor: Ratio = 2.0
    """Ratio of each wait to the previous wait."""
    max_delay_s: Positive = 60.0
    """Longest wait in seconds."""
    jitter: Annotated[float, number(least=0, most=1)] = 0.5
    """Random share of a wait, so that many processes do not retry at once."""
    attempts: Annotated[int, whole(1, 1000)] = 8
    """Attempts in total; then the last error is raised."""

    AT_MOST = (("base_delay_s", "max_delay_s"),)


class Hang(NamedTuple):
    """`[hang]`: after which time a step counts as hung.

    The limit is at least three times the longest step so far.
    """

    timeout_s: Positive = 300.0
    """Seconds for one step, or for one batch to arrive."""
    first_step_s: Positive = 7200.0
    """The same for the first step of a process, which compiles; at least `timeout_s`."""
    between_steps: OnOff = False
    """Whether the time between the optimizer's step and the next batch counts too, for example
    your evaluation, your checkpoints, or `loss.item()`."""


class SkipBatch(NamedTuple):
    """`[skip_batch]`: how many unreadable batches are skipped before the error is raised."""

    consecutive: Annotated[int, whole(1, 1000)] = 3
    """Unreadable batches in a row that may be skipped."""
    count: Annotated[int, whole(1, 100_000)] = 10
    """Unreadable batches among the last `within` that may be skipped."""
    within: Steps = 1000
    """Length of the window for `count`, in batches."""

    AT_MOST = (("consecutive", "count"), ("count", "within"))
