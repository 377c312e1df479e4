"""`Policy`: the content of a policy file, its engine, and its text.

The tables for the answers of a run to trouble come first: the rules, how a run recovers, and how
often. A rule of `[[respond]]` names causes of detectors, or faults. Only the host detects faults:
exceptions, and steps that hang. `Policy.config` therefore omits the rules for faults, and the
runtime applies them. `[rollback]` and `[budget]` add keys of the host to the keys of the engine.
`[retry]`, `[skip_batch]` and `[hang]` are for faults.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, get_args

import tomli_w
from pydantic import BeforeValidator, Field, GetPydanticSchema, Strict
from pydantic_core import core_schema

from healcore.core.clipping import AdaGCConfig, AutoClipConfig, FixedConfig, ZClipConfig
from healcore.core.decision import NONFINITE, Action, Cause
from healcore.core.detectors import CAUSES, Detect
from healcore.core.engine import (
    BudgetConfig,
    Engine,
    EngineConfig,
    IncidentConfig,
    LrConfig,
    RollbackConfig,
    RuleConfig,
)
from healcore.core.engine.config import differences
from healcore.core.ranges import (
    NONE,
    Positive,
    Range,
    Ratio,
    Steps,
    StepsOrZero,
    to_float32,
    whole,
)

SCHEMA = 1
"""Version of the file format that this release reads and writes."""

# -- the answers to trouble -----------------------------------------------------------------------

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
Path = tuple[str | int, ...]
"""The keys from the top of a document to a value; a number for an entry of a list."""
Conflict = tuple[Path, str, str]
"""A value that does not fit the others: its path, the rule that it violates, and what to write."""

_Cause = Annotated[
    str, GetPydanticSchema(lambda *_: core_schema.literal_schema([*CAUSES, *FAULTS]))
]
_Action = Annotated[str, GetPydanticSchema(lambda *_: core_schema.literal_schema([*ALL_ACTIONS]))]


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

    to: Annotated[tuple[_Cause, ...], Strict(strict=False), Field(min_length=1)]
    """Causes to which the rule responds. A cause of a detector needs the table of its detector."""
    do: Annotated[tuple[_Action, ...], Strict(strict=False), Field(min_length=1)]
    """Actions of the rule."""
    when: When = When()
    """When the rule fires."""

    @property
    def for_faults(self) -> bool:
        """Whether the rule is for faults; the engine does not see such rules."""
        return any(cause in FAULTS for cause in self.to)

    def conflicts(self) -> Iterator[Conflict]:
        """Yields mixed kinds of causes, actions that do not fit, and conditions without effect."""
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
    """Deprecated: leave it out. Steps that a cause must be absent before the `Healer` alerts on it
    again. With 1 each isolated spike is a fault of its own. With 0 these are `quiet_steps`. Alerts
    are the first ten faults of each cause, then the 16th, the 32nd, the 64th and so on."""


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
    better. Other rollbacks are refused, and do not use the budget. The rules that roll
    back for NaN and Inf say after how many such steps the `Healer` looks at the weights: `attach`
    and `protect` cannot."""
    evidence: Annotated[float, Range(ge=10)] = 1e4
    """With a `loss_fn`: lower bound of the mean number of comparisons per false rollback."""
    nonfinite_state: Literal["alert", "rollback", "stop"] = "rollback"
    """Response to a save that finds NaN or Inf in weights, moments or other saved arrays,
    although no step raised an alarm. If the policy has no rule that rolls back or stops for NaN and
    Inf, as `zclip`, also the response to weights that are not finite: they are checked after 10
    such steps in a row. Arrays in `nonfinite_ok` are not checked."""


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


# -- a policy ------------------------------------------------------------------------------------


class NoClip(NamedTuple):
    """No clipping."""

    kind = "none"
    limits_every_step = False


def _by_kind(source: Any, handler: Any) -> Any:
    """How pydantic reads one of several tables: the key `kind`, which they lack, says which."""
    tables = {}
    for table in get_args(source):
        read = handler(table)
        tables[table.kind] = core_schema.no_info_before_validator_function(_without_kind, read)
    return core_schema.tagged_union_schema(tables, discriminator=_kind)


def _kind(clip: Any) -> Any:
    if isinstance(clip, Mapping):
        return clip.get("kind", ZClipConfig.kind)
    if clip is None or clip == NONE:
        return NONE
    return None


def _without_kind(clip: Any) -> dict[str, Any]:
    if isinstance(clip, Mapping):
        entries = clip.items()
    else:
        entries = ()
    return {key: value for key, value in entries if key != "kind"}


def _without_absent(detect: Any) -> Any:
    """The table `detect` without the detectors that are None, or "none" on the command line."""
    if not isinstance(detect, Mapping):
        return detect
    return {name: table for name, table in detect.items() if table is not None and table != NONE}


_Line = Annotated[str, Field(pattern=r"^[^\r\n]*\S[^\r\n]*$")]


class Policy(NamedTuple):
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
    name: _Line
    """Name of the policy in logs and errors."""
    description: str = ""
    """One sentence for `healcore policy list`."""
    references: Annotated[tuple[_Line, ...], Strict(strict=False)] = ()
    """Papers and projects from which the numbers come."""
    mode: Literal["heal", "observe"] = "heal"
    """`observe` judges everything and changes nothing."""
    max_skips: StepsOrZero = EngineConfig().max_skips
    """Limit of consecutive finite steps that are skipped. Then steps are only clipped, until a
    step without an alarm."""
    grace_steps: StepsOrZero = EngineConfig().grace_steps
    """Steps after an expected change (`expect_change()`) in which only NaN and Inf are alarms."""
    clip: Annotated[
        ZClipConfig | FixedConfig | AutoClipConfig | AdaGCConfig | NoClip,
        GetPydanticSchema(_by_kind),
    ] = NoClip()
    """The clipping rule."""
    detect: Annotated[Detect, BeforeValidator(_without_absent)] = Detect()
    """The detectors that are on."""
    respond: Annotated[tuple[Respond, ...], Strict(strict=False)] = ()
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
        """Yields what is wrong with a rule, or with its detectors."""
        for i, rule in enumerate(self.respond):
            for path, needed, write in rule.conflicts():
                yield ("respond", i, *path), needed, write
            for j, cause in enumerate(rule.to):
                detector = detector_of(cause)
                if not rule.for_faults and getattr(self.detect, detector) is None:
                    needed = f"a cause whose detector is on; [detect.{detector}] is missing"
                    write = f"a table [detect.{detector}], or drop {cause!r} from the rule"
                    yield ("respond", i, "to", j), needed, write

    def config(self) -> EngineConfig:
        """Makes the core's config.

        Returns:
            The config without the parts that only the host uses. Floats are rounded to float32
            once, for all backends.
        """
        if isinstance(self.clip, NoClip):
            clip = None
        else:
            clip = rounded(self.clip)
        rules = []
        for rule in self._detector_rules():
            if self._is_for_host(rule):
                rule = rule._replace(action=rule.action & ~int(Action.ROLLBACK))
            if rule.skip or rule.action:
                rules.append(rule)
        detectors = []
        for name, table in self.detect._asdict().items():
            if table is not None:
                detectors.append((name, rounded(table)))
        return EngineConfig(
            mode=self.mode,
            clip=clip,
            detectors=tuple(detectors),
            rules=tuple(rules),
            incident=rounded(self.incident, IncidentConfig),
            rollback=rounded(self.rollback, RollbackConfig),
            lr=rounded(self.lr),
            budget=rounded(self.budget, BudgetConfig),
            max_skips=self.max_skips,
            grace_steps=self.grace_steps,
        )

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

    def _detector_rules(self) -> list[RuleConfig]:
        return [rule.config() for rule in self.respond if not rule.for_faults]

    def _is_for_host(self, rule: RuleConfig) -> bool:
        only_nonfinite = not rule.causes & ~int(NONFINITE)
        needs_evidence = self.rollback.confirm and self.mode != "observe"
        return needs_evidence and only_nonfinite and bool(rule.action & Action.ROLLBACK)

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
    return _plain(policy)


def _plain(table: Any) -> dict[str, Any]:
    document: dict[str, Any] = {}
    if hasattr(table, "kind"):
        document["kind"] = table.kind
    for name, value in table._asdict().items():
        if is_table(value):
            document[name] = _plain(value)
        elif isinstance(value, tuple):
            document[name] = [_plain(each) if is_table(each) else each for each in value]
        elif value is not None:
            document[name] = value
        elif not isinstance(table, Detect):
            document[name] = NONE
    return document


def is_table(value: object) -> bool:
    """Whether a class, or the class of an object, declares a table: it is a NamedTuple."""
    return hasattr(value, "_fields")


def rounded(table: Any, core: Any = None) -> Any:
    """Makes the core's config of a table.

    Floats are rounded to float32 here, once for all backends. Otherwise JAX would round them in the
    jitted step and NumPy would not, and the backends could decide differently.

    Args:
        table: a table, or a value of it.
        core: class of the config, whose fields the table has too. None for the class of the table,
            if the core uses the table itself.

    Returns:
        The config, or the rounded value.
    """
    if is_table(table):
        core = core or type(table)
        return core(*(rounded(getattr(table, name)) for name in core._fields))
    if isinstance(table, float):
        return to_float32(table)
    return table


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
    return policy.engine().fingerprint


class Difference(NamedTuple):
    """A key with different values in two policies.

    Attributes:
        key: dotted key, for example `clip.z_threshold` or `respond[0].do`.
        left: value in the first policy, or None if that policy lacks the key.
        right: value in the second policy, or None if that policy lacks the key.
    """

    key: str
    left: Any
    right: Any


def diff(left: Policy, right: Policy) -> tuple[Difference, ...]:
    """Compares two policies key by key, defaults included, and rules by their number.

        left, right = load("default"), load("default", mode="observe")
        healcore.policy.diff(left, right)  # (Difference(key='mode', left='heal', right='observe'),)

    Args:
        left: a policy.
        right: another policy.

    Returns:
        The keys with different values, the rules last. If only one policy has a table,
        each key of the table is listed, or the table itself if it is empty.
    """
    return tuple(Difference(*each) for each in differences(_numbered(left), _numbered(right)))


def _numbered(policy: Policy) -> dict[str, Any]:
    """The document with a key for each rule."""
    document = to_dict(policy)
    rules = document.pop("respond")
    return document | {f"respond[{number}]": rule for number, rule in enumerate(rules)}
