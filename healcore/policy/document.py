"""`Policy`, the content of a policy file: its tables, its engine, its text, and differences.

The tables for the answers of a run to trouble come first: the rules, how a run recovers, and how
often. A rule of `[[respond]]` names causes of detectors, or faults. Only the host detects faults:
exceptions, and steps that hang. `Policy.config` therefore omits the rules for faults, and the
runtime applies them. `[rollback]` and `[budget]` add keys of the host to the engine's. `[retry]`,
`[skip_batch]` and `[hang]` are for faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import tomli_w

from healcore.core.clipping import AdaGCConfig, AutoClipConfig, FixedConfig, ZClipConfig
from healcore.core.decision import NONFINITE, Action, Cause
from healcore.core.detectors import CAUSES
from healcore.core.detectors.loss_records import InstabilityConfig, RecordsConfig
from healcore.core.detectors.spikes import GradSpikeConfig, LossSpikeConfig
from healcore.core.detectors.thresholds import (
    GradCeilingConfig,
    LossCeilingConfig,
    NonFiniteConfig,
    VanishingConfig,
)
from healcore.core.detectors.trends import DivergenceConfig, OverfitConfig, PlateauConfig
from healcore.core.detectors.windows import (
    GradEmaConfig,
    GradWindowConfig,
    LossRatioConfig,
    LossWindowConfig,
)
from healcore.core.engine import (
    BudgetConfig,
    Engine,
    EngineConfig,
    IncidentConfig,
    LrConfig,
    RollbackConfig,
    RuleConfig,
)
from healcore.core.ranges import (
    OnOff,
    Positive,
    Ratio,
    Steps,
    StepsOrZero,
    listed,
    number,
    one_of,
    text,
    whole,
)
from healcore.policy.tables import Conflict, dotted, rounded, written

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


def _all_actions() -> tuple[str, ...]:
    """Every action of a rule, for detectors first and then for faults."""
    names = [SKIP, *ACTIONS]
    for _, fault_actions in FAULTS.values():
        for name in fault_actions:
            if name not in names:
                names.append(name)
    return tuple(names)


class When(NamedTuple):
    """The condition of a rule: all given keys must hold.

    A *hit* is a step with one of the causes of the rule. Without keys the rule fires at each hit.

        when = { consecutive = 3 }              # three hits in a row
        when = { count = 5, within = 100 }      # five hits among the last 100 steps
    """

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
        if self.count and not self.within:
            present, absent = "count", "within"
        elif self.within and not self.count:
            present, absent = "within", "count"
        else:
            return
        rule = f"together with {absent}: a number of hits, and a window in steps"
        yield (present,), getattr(self, present), rule, "when = { count = 5, within = 100 }"


@dataclass(frozen=True)
class Respond:
    """One rule, either for causes of detectors or for faults.

    A detector judges a step, so its rule is part of the engine and is the same on all backends. A
    fault is an exception or a step that hangs: no engine sees it, and the host applies its rule.

        [[respond]]
        to = ["nonfinite"]
        do = ["skip"]
    """

    to: Annotated[tuple[str, ...], listed(one_of(*CAUSES, *FAULTS))]
    """Causes to which the rule responds. A cause of a detector needs the table of its detector."""
    do: Annotated[tuple[str, ...], listed(one_of(*_all_actions()))]
    """Actions of the rule."""
    when: When = When()
    """When the rule fires."""

    @property
    def for_faults(self) -> bool:
        """Whether the rule is for faults; the engine does not see such rules."""
        return self.to[0] in FAULTS

    def conflicts(self) -> Iterator[Conflict]:
        """Yields mixed kinds of causes, and actions that do not fit all causes."""
        for j, cause in enumerate(self.to):
            if (cause in FAULTS) is self.for_faults:
                continue
            if self.for_faults:
                sources = "one comes from a step, the other from an exception"
            else:
                sources = "one comes from an exception, the other from a step"
            rule = f"of the same kind as {self.to[0]!r}: {sources}"
            yield ("to", j), cause, rule, f"a separate rule for {cause!r}"
            return  # the actions fit one kind or the other
        for cause in self.to:
            allowed = (SKIP, *ACTIONS)
            if self.for_faults:
                _, allowed = FAULTS[cause]
            for j, action in enumerate(self.do):
                if action not in allowed:
                    choices = ", ".join(f'"{name}"' for name in allowed)
                    rule = f"an action for {cause!r}: one of {choices}"
                    yield ("do", j), action, rule, f"drop {action!r}"
        if self.for_faults and self.when != When():
            changed = dict(set(self.when._asdict().items()) - set(When()._asdict().items()))
            rule = "in rules for detectors; faults have [retry], [skip_batch], [hang] and [budget]"
            yield ("when",), changed, rule, "drop when"

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


# -- recovery --------------------------------------------------------------------------------------

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
    shows the first ten alerts of each cause, then the 16th, the 32nd, the 64th and so on, and each
    loss that is twice as high as all losses shown before."""


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
    confirm: OnOff = False
    """Whether the `Healer` rolls back only if the weights are not finite or earlier weights are
    better. Other rollbacks are refused, and do not use the budget. The `Healer` itself applies the
    rules that roll back for NaN and Inf, because `attach` and `protect` cannot inspect weights."""
    evidence: Annotated[float, number(at_least=10)] = 1e4
    """With a `loss_fn`: lower bound of the mean number of comparisons per false rollback."""
    nonfinite_state: Annotated[str, one_of("alert", "rollback", "stop")] = "rollback"
    """Response to a save that finds NaN or Inf in weights, moments or other saved arrays,
    although no step raised an alarm. If the policy has no rule that rolls back or stops for NaN and
    Inf, as `zclip`, also the response to weights that are not finite: they are checked after 10
    such steps in a row. Arrays in `nonfinite_ok` are not checked."""
    reset_moments: OnOff = False
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
    jitter: Annotated[float, number(at_least=0, at_most=1)] = 0.5
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
    between_steps: OnOff = False
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


# -- the policy ------------------------------------------------------------------------------------

SCHEMA = 1
"""Version of the file format that this release reads and writes."""

_BUDGET_KEYS = (("rollback", "recoveries"), ("cut_lr", "lr_cuts"), ("shrink_microbatch", "shrinks"))


class NoClip(NamedTuple):
    """No clipping."""

    kind = "none"
    limits_every_step = False


class Detect(NamedTuple):
    """`[detect]`: the thresholds of each detector, or None for a detector that is off.

    A detector is on if the file has its table, also if the table is empty: `[detect.plateau]`. The
    fields have the names and the order of `healcore.core.detectors.DETECTORS`.
    """

    nonfinite: NonFiniteConfig | None = None
    loss_spike: LossSpikeConfig | None = None
    grad_spike: GradSpikeConfig | None = None
    divergence: DivergenceConfig | None = None
    instability: InstabilityConfig | None = None
    records: RecordsConfig | None = None
    vanishing: VanishingConfig | None = None
    plateau: PlateauConfig | None = None
    overfit: OverfitConfig | None = None
    loss_ratio: LossRatioConfig | None = None
    loss_ceiling: LossCeilingConfig | None = None
    loss_window: LossWindowConfig | None = None
    grad_window: GradWindowConfig | None = None
    grad_ema: GradEmaConfig | None = None
    grad_ceiling: GradCeilingConfig | None = None


@dataclass(frozen=True)
class Policy:
    """The detectors, the responses to them, and the limits of recovery.

        policy = healcore.policy.load("zclip", clip={"max_norm": 1.0})
        policy.clip.kind, policy.clip.max_norm  # ('zclip', 1.0)
        engine = policy.engine()

    A policy is data: it has no code and names no framework, so the same policy decides alike in JAX
    and in torch. Policies are frozen and hashable, and compare by value. `healcore.policy.load` and
    `from_dict` validate the values; the constructor does not.
    """

    schema: Annotated[int, whole(SCHEMA, SCHEMA)]
    """Version of the file format."""
    name: Annotated[str, text(empty=False)]
    """Name of the policy in logs and errors."""
    description: Annotated[str, text()] = ""
    """One sentence for `healcore policy list`."""
    references: Annotated[tuple[str, ...], listed(text(empty=False), empty=True)] = ()
    """Papers and projects from which the numbers come."""
    mode: Annotated[str, one_of("heal", "observe")] = "heal"
    """`observe` judges everything and changes nothing."""
    max_skips: StepsOrZero = EngineConfig().max_skips
    """Limit of consecutive finite steps that are skipped. Then steps are only clipped, until a
    step without an alarm."""
    grace_steps: StepsOrZero = EngineConfig().grace_steps
    """Steps after an expected change (`expect_change()`) in which only NaN and Inf are alarms."""
    clip: ZClipConfig | FixedConfig | AutoClipConfig | AdaGCConfig | NoClip = NoClip()
    """The clipping rule."""
    detect: Detect = Detect()
    """The detectors that are on."""
    respond: tuple[Respond, ...] = ()
    """The rules, in the order of the file."""
    incident: IncidentTable = IncidentTable()
    """Where incidents end."""
    rollback: Rollback = Rollback()
    """Which checkpoint a rollback restores."""
    lr: LrConfig = LrConfig()
    """Cuts of the learning rate."""
    budget: Budget = Budget()
    """How often a run may recover."""
    retry: Retry = Retry()
    """How a failed network call is repeated."""
    skip_batch: SkipBatch = SkipBatch()
    """How many unreadable batches are skipped."""
    hang: Hang = Hang()
    """When a step counts as hung."""

    def conflicts(self) -> Iterator[Conflict]:
        """Yields rules that could never fire, or whose actions have no budget."""
        for i, rule in enumerate(self.respond):
            if not rule.for_faults:
                for j, cause in enumerate(rule.to):
                    yield from self._cause_conflicts(("respond", i, "to", j), cause, rule)
            for action, budget in _BUDGET_KEYS:
                if action in rule.do and getattr(self.budget, budget) == 0:
                    condition = f"an action with a budget above 0; budget.{budget} is 0"
                    write = f"budget.{budget} = 3, or drop {action!r} from the rule"
                    yield ("respond", i, "do", rule.do.index(action)), action, condition, write

    def _cause_conflicts(
        self, path: tuple[str | int, ...], cause: str, rule: Respond
    ) -> Iterator[Conflict]:
        """Yields the conflicts of one cause of a rule with the detectors that are on."""
        detector = detector_of(cause)
        if getattr(self.detect, detector) is None:
            condition = f"a cause whose detector is on; [detect.{detector}] is missing"
            write = f"a table [detect.{detector}], or drop {cause!r} from the rule"
            yield path, cause, condition, write
        # Some detectors raise alarms of the same cause, which the engine cannot distinguish.
        for other, config in self.detect._asdict().items():
            if config is None or other == detector or other in rule.to:
                continue
            if CAUSES[other] & CAUSES[cause]:
                condition = f"named with [detect.{other}], whose alarms have its cause too"
                write = f'to = ["{cause}", "{other}"], or only one of the two tables'
                yield path, cause, condition, write

    def config(self) -> EngineConfig:
        """Makes the core's config.

        Returns:
            The config without the parts that only the host uses. Floats are rounded to float32
            once, for all backends.
        """
        clip = None
        if not isinstance(self.clip, NoClip):
            clip = rounded(self.clip)
        detectors = []
        for name, table in self.detect._asdict().items():
            if table is not None:
                detectors.append((name, rounded(table)))
        return EngineConfig(
            mode=self.mode,
            clip=clip,
            detectors=tuple(detectors),
            rules=tuple(rule for rule in self._rules() if rule.skip or rule.action),
            incident=rounded(self.incident, IncidentConfig),
            rollback=rounded(self.rollback, RollbackConfig),
            lr=rounded(self.lr),
            budget=rounded(self.budget, BudgetConfig),
            max_skips=self.max_skips,
            grace_steps=self.grace_steps,
        )

    def _detector_rules(self) -> Iterator[RuleConfig]:
        for rule in self.respond:
            if not rule.for_faults:
                yield rule.config()

    def _rules(self) -> Iterator[RuleConfig]:
        """The rules of the engine, without the actions of `host_rules`."""
        for rule in self._detector_rules():
            if self._is_for_host(rule):
                yield rule._replace(action=rule.action & ~int(Action.ROLLBACK))
            else:
                yield rule

    def host_rules(self) -> tuple[RuleConfig, ...]:
        """Finds the rules whose rollback the host orders instead of the engine.

        With `rollback.confirm`, a rollback for NaN or Inf needs evidence that the weights are
        damaged. The engine is a pure function of the signals and cannot look at the weights.

        Returns:
            The rules for only NaN and Inf, each with only its rollback; empty without `confirm`.
        """
        rules = []
        for rule in self._detector_rules():
            if self._is_for_host(rule):
                rules.append(rule._replace(skip=False, action=int(Action.ROLLBACK)))
        return tuple(rules)

    def _is_for_host(self, rule: RuleConfig) -> bool:
        only_nonfinite = not rule.causes & ~int(NONFINITE)
        return self.rollback.confirm and only_nonfinite and bool(rule.action & Action.ROLLBACK)

    def fault_actions(self) -> dict[Cause, frozenset[str]]:
        """Collects the actions for faults, which the host performs.

        Returns:
            Cause of each fault that the rules name -> names of the actions of all its rules.
        """
        actions: dict[Cause, frozenset[str]] = {}
        for rule in self.respond:
            if not rule.for_faults:
                continue
            for fault in rule.to:
                cause, _ = FAULTS[fault]
                actions[cause] = actions.get(cause, frozenset()) | set(rule.do)
        return actions

    def engine(self) -> Engine:
        """A new engine of this policy; equal policies give equal `Engine.fingerprint`s."""
        return Engine(self.config())


def detector_of(cause: str) -> str:
    """The table under [detect] for a cause; NaN in loss and in gradient share a table."""
    if cause.startswith("nonfinite_"):
        return "nonfinite"
    return cause


def dumps(policy: Policy) -> str:
    """Writes a policy as TOML with every key, so that changed defaults do not affect the file.

        text = healcore.policy.dumps(healcore.policy.load("default"))
        Path("mine.toml").write_text(text)

    Args:
        policy: the policy.

    Returns:
        The text of a policy file, without comments. `loads(dumps(policy)) == policy`: numbers keep
        all digits and are not rounded to float32.
    """
    return tomli_w.dumps(to_dict(policy))


def to_dict(policy: Policy) -> dict[str, Any]:
    """Converts a policy to plain mappings, lists, strings, bools and numbers; JSON-safe.

        document = healcore.policy.to_dict(healcore.policy.load("default"))
        document["incident"]["quiet_steps"]  # 10

    Args:
        policy: the policy.

    Returns:
        The document with every key, as `from_dict` reads it. An absent limit is the string "none",
        a detector that is off is absent.
    """
    return written(policy)


class Difference(NamedTuple):
    """A key with different values in two policies.

    Attributes:
        key: dotted key, for example `clip.z_threshold`.
        left: value in the first policy, or None if that policy lacks the key.
        right: value in the second policy, or None if that policy lacks the key.
    """

    key: str
    left: Any
    right: Any


def diff(left: Policy, right: Policy) -> tuple[Difference, ...]:
    """Compares two policies key by key, defaults included.

        left, right = load("default"), load("default", mode="observe")
        healcore.policy.diff(left, right)  # (Difference(key='mode', left='heal', right='observe'),)

    Args:
        left: a policy.
        right: another policy.

    Returns:
        The keys with different values, in the order of the file. Rules are compared by position. If
        only one policy has a table, each key of the table is listed, or the table itself if it is
        empty.
    """
    left_values = dict(_flat(to_dict(left)))
    right_values = dict(_flat(to_dict(right)))
    differences = []
    for key in {**left_values, **right_values}:  # a dict as an ordered set
        left_value = left_values.get(key)
        right_value = right_values.get(key)
        if left_value != right_value:
            differences.append(Difference(key, left_value, right_value))
    return tuple(differences)


def _flat(data: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yields the dotted key and the value of each entry of nested tables and lists of tables."""
    if isinstance(data, dict):
        entries = list(data.items())
    elif isinstance(data, list) and data and isinstance(data[0], dict):
        entries = list(enumerate(data))
    else:
        yield dotted(path), data
        return
    if not entries:
        yield dotted(path), {}
    for key, value in entries:
        yield from _flat(value, (*path, key))


def fingerprint(policy: Policy) -> str:
    """Identifies a policy by what it decides, within one release of healcore.

        policy = healcore.policy.load("default")
        same = healcore.policy.load("default", description="with other words")
        healcore.policy.fingerprint(policy) == healcore.policy.fingerprint(same)  # True

    Name, description and references do not count. Numbers count as float32: 0.97 and 0.9700000001
    give the same fingerprint. Equals `Engine.fingerprint`.

    Args:
        policy: the policy.

    Returns:
        Sixteen hex digits, equal for equal numbers in the core.
    """
    digest = policy.engine().fingerprint
    assert digest is not None, "a policy has Python numbers, not arrays"
    return digest
