"""The tables of a policy file for the answers of a run to trouble.

They are the rules, how a run recovers, and how often. A rule of `[[respond]]` names causes of
detectors, or faults. Only the host detects faults: exceptions, and steps that hang. `Policy.config`
therefore omits the rules for faults, and the runtime applies them. `[rollback]` and `[budget]` add
keys of the host to the keys of the engine. `[retry]`, `[skip_batch]` and `[hang]` are for faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

from pydantic import GetPydanticSchema, Strict
from pydantic_core.core_schema import literal_schema

from healcore.core.decision import Action, Cause
from healcore.core.detectors import CAUSES
from healcore.core.engine import BudgetConfig, IncidentConfig, RollbackConfig, RuleConfig
from healcore.core.ranges import Positive, Range, Ratio, Steps, StepsOrZero, whole
from healcore.policy.problems import Path

FAULTS: dict[str, tuple[Cause, tuple[str, ...]]] = {
    "oom": (Cause.OOM, ("shrink_microbatch", "clear_cache", "save")),
    "data": (Cause.DATA, ("skip_batch", "save")),
    "network": (Cause.NETWORK, ("retry", "save")),
    "hang": (Cause.HANG, ("alert", "stop")),
    "unknown": (Cause.UNKNOWN, ("save",)),
}
"""Flag and allowed actions of each fault that `to` may name. Every fault is logged."""

SKIP = "skip"
ACTIONS = {action.name.lower(): action for action in Action if action.name}
"""Actions that `do` may name in addition to "skip", which the device performs within the step."""


ALL_ACTIONS = tuple(
    dict.fromkeys((SKIP, *ACTIONS, *(name for _, names in FAULTS.values() for name in names)))
)
"""Every action of a rule, for detectors first and then for faults."""
Conflict = tuple[Path, str, str]
"""A value that does not fit the others: its path, the rule that it violates, and what to write."""

_Cause = Annotated[str, GetPydanticSchema(lambda *_: literal_schema([*CAUSES, *FAULTS]))]
_Action = Annotated[str, GetPydanticSchema(lambda *_: literal_schema([*ALL_ACTIONS]))]


class When(NamedTuple):
    """The condition of a rule: all given keys must hold.

    A *hit* is a step with one of the causes of the rule. Without keys the rule fires at each hit.

        when = { consecutive = 3 }              # three hits in a row
        when = { count = 5, within = 100 }      # five hits among the last 100 steps
    """

    sustained: bool = False
    """Only alarms that the detector calls sustained are hits."""
    consecutive: Annotated[int, whole(1, 1_000_000)] = 1
    """Hits in a row from which the rule fires."""
    # The window is an int32 ring in the engine's state, so its length takes memory in checkpoints.
    count: Annotated[int, whole(0, 4096)] = 0
    """Hits within the last `within` steps from which the rule fires. At most `within`."""
    within: Annotated[int, whole(0, 4096)] = 0
    """Length of the window for `count`, in steps. Set both or neither."""


class Respond(NamedTuple):
    """One rule, either for causes of detectors or for faults.

    A detector judges a step, so its rule is part of the engine and is the same on all backends. A
    fault is an exception or a step that hangs: no engine sees it, and the host applies its rule.

        [[respond]]
        to = ["nonfinite"]
        do = ["skip"]
    """

    to: Annotated[tuple[_Cause, ...], Strict(strict=False)]
    """Causes to which the rule responds. A cause of a detector needs the table of its detector."""
    do: Annotated[tuple[_Action, ...], Strict(strict=False)]
    """Actions of the rule."""
    when: When = When()
    """When the rule fires."""

    @property
    def for_faults(self) -> bool:
        """Whether the rule is for faults; the engine does not see such rules."""
        return any(cause in FAULTS for cause in self.to)

    def conflicts(self) -> Iterator[Conflict]:
        """Yields mixed kinds of causes, actions that do not fit, and conditions without effect."""
        for name, example in (("to", "nonfinite"), ("do", "skip")):
            if not getattr(self, name):
                yield (name,), "a non-empty list", f'{name} = ["{example}"]'
        for i, cause in enumerate(self.to):
            _, allowed = FAULTS.get(cause, (None, (SKIP, *ACTIONS)))
            if (cause in FAULTS) != self.for_faults:
                rule = "of the same kind as the others: a cause of a step, or of an exception"
                yield ("to", i), rule, f"a separate rule for {cause!r}"
                return  # the actions fit one kind or the other
            for j, action in enumerate(self.do):
                if action not in allowed:
                    rule = f"an action for {cause!r}: one of {', '.join(allowed)}"
                    yield ("do", j), rule, f"drop {action!r}"
        if self.for_faults and self.when != When():
            rule = "in rules for detectors; faults have [retry], [skip_batch], [hang] and [budget]"
            yield ("when",), rule, "drop when"
        elif bool(self.when.count) != bool(self.when.within) or self.when.count > self.when.within:
            rule = "count and within together, and count at most within"
            yield ("when", "count"), rule, "when = { count = 5, within = 100 }"

    def config(self) -> RuleConfig:
        """The core's rule, with flags instead of names; only for rules without faults."""
        causes = 0
        for name in self.to:
            causes |= int(CAUSES[name])
        actions = 0
        for name in self.do:
            if name != SKIP:
                actions |= int(ACTIONS[name])
        return RuleConfig(causes, SKIP in self.do, actions, **self.when._asdict())


_incident = IncidentConfig()
_rollback = RollbackConfig()
_budget = BudgetConfig()
_Few = Annotated[int, whole(0, 1000)]


class IncidentTable(NamedTuple):
    """`[incident]`: where one incident ends and the next begins, and how often it is alerted.

    An incident is a contiguous run of alarms. It spends one attempt of the budget, however many
    steps it lasts.
    """

    quiet_steps: Steps = _incident.quiet_steps
    """Steps without an alarm that close an incident."""
    patience: Steps = _incident.patience
    """Alarms, within one incident, after which the policy repeats its rollback or its cut. The
    repeated rollback goes further back if `deepen` is above 0."""
    alert_steps: StepsOrZero = 0
    """Steps that a cause must be absent before the `Healer` alerts on it again. With 1 you see each
    isolated spike. With 0 these are `quiet_steps`, and the log is short: outside of incidents it
    shows the first ten alerts of each cause, then the 16th, the 32nd, the 64th and so on."""


class Rollback(NamedTuple):
    """`[rollback]`: which checkpoint a rollback restores, and under which conditions.

    A rollback restores a *known-good* checkpoint: its bytes verify, its arrays are finite, and
    `probation` healthy steps have followed it.
    """

    depth: Annotated[int, whole(1, 1000)] = _rollback.depth
    """Known-good checkpoint that the first rollback restores; 1 = newest."""
    deepen: _Few = _rollback.deepen
    """Increase of the depth per further rollback in the same region."""
    region: StepsOrZero = _rollback.region
    """Distance in steps below which two onsets are in the same region."""
    probation: Steps = 100
    """Healthy steps after a checkpoint until the checkpoint counts as known-good."""
    skip_batches: StepsOrZero = 0
    """Batches that a rollback skips after the batches of the incident."""
    confirm: bool = False
    """Whether the `Healer` rolls back only if the weights are not finite or earlier weights are
    better. Other rollbacks are refused, and do not use the budget. The `Healer` itself applies the
    rules that roll back for NaN and Inf, because `attach` and `protect` cannot inspect weights."""
    evidence: Annotated[float, Range(ge=10)] = 1e4
    """With a `loss_fn`: lower bound of the mean number of comparisons per false rollback."""
    nonfinite_state: Literal["alert", "rollback", "stop"] = "rollback"
    """Response to a save that finds NaN or Inf in weights, moments or other saved arrays,
    although no step raised an alarm. If the policy has no rule that rolls back or stops for NaN and
    Inf, as `zclip`, also the response to weights that are not finite: they are checked after 10
    such steps in a row. Arrays in `nonfinite_ok` are not checked."""
    reset_moments: bool = False
    """Whether a rollback also resets the optimizer's moments and the counters of their bias
    correction."""


class Budget(NamedTuple):
    """`[budget]`: how often a run may recover.

    Without a limit, a run whose fault returns at each attempt would repeat the same steps forever.
    When the budget is exhausted, a non-finite step stops the run.
    """

    recoveries: _Few = _budget.recoveries
    """Number of rollbacks. When they are exhausted, NaN and Inf stop the run; with `confirm`, only
    NaN and Inf in the weights do."""
    lr_cuts: _Few = _budget.lr_cuts
    """Cuts of the learning rate."""
    shrinks: _Few = 6
    """Halvings of a micro-batch that does not fit into memory."""
    refund_after: Steps = _budget.refund_after
    """Steps without an incident that refund one rollback and one cut."""


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
    jitter: Annotated[float, Range(ge=0, le=1)] = 0.5
    """Random share of a wait, so that many processes do not retry at once."""
    attempts: Annotated[int, whole(1, 1000)] = 8
    """Attempts in total; then the last error is raised."""

    AT_MOST = (("base_delay_s", "max_delay_s"),)


class Hang(NamedTuple):
    """`[hang]`: after which time a step counts as hung.

    The limit is at least three times the longest step so far, so that a run with slow steps is not
    taken for hung.
    """

    timeout_s: Positive = 300.0
    """Seconds for one step, or for one batch to arrive."""
    first_step_s: Positive = 7200.0
    """The same for the first step of a process, which compiles; at least `timeout_s`."""
    between_steps: bool = False
    """Whether the time between the optimizer's step and the next batch counts too, for example
    your evaluation, your checkpoints, or `loss.item()`."""


class SkipBatch(NamedTuple):
    """`[skip_batch]`: how many unreadable batches are skipped before the error is raised.

    A few damaged records should not end a run. Many of them mean that the data is not readable at
    all, and a run that skips everything would train on nothing.
    """

    consecutive: Annotated[int, whole(1, 1000)] = 3
    """Unreadable batches in a row that may be skipped."""
    count: Annotated[int, whole(1, 100_000)] = 10
    """Unreadable batches among the last `within` that may be skipped."""
    within: Steps = 1000
    """Length of the window for `count`, in batches."""

    AT_MOST = (("consecutive", "count"), ("count", "within"))
