"""`Policy`: the content of a policy file, its engine, and its text.

`responses` has the tables for the answers of a run to trouble.
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
from healcore.core.ranges import NONE, StepsOrZero, to_float32, whole
from healcore.policy.problems import Path
from healcore.policy.responses import (
    FAULTS,
    Budget,
    Conflict,
    Hang,
    IncidentTable,
    Respond,
    Retry,
    Rollback,
    SkipBatch,
)

SCHEMA = 1
"""Version of the file format that this release reads and writes."""

_BUDGET_KEYS = (("rollback", "recoveries"), ("cut_lr", "lr_cuts"), ("shrink_microbatch", "shrinks"))


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
    return NONE if clip is None or clip == NONE else None


def _without_kind(clip: Any) -> dict[str, Any]:
    entries = clip.items() if isinstance(clip, Mapping) else ()
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
        """Yields what is wrong with a rule, its detectors, or the budget of its actions."""
        for i, rule in enumerate(self.respond):
            for path, needed, write in rule.conflicts():
                yield ("respond", i, *path), needed, write
            if not rule.for_faults:
                for j, cause in enumerate(rule.to):
                    yield from self._cause_conflicts(("respond", i, "to", j), cause, rule)
            for action, budget in _BUDGET_KEYS:
                if action in rule.do and getattr(self.budget, budget) == 0:
                    needed = f"an action with a budget above 0; budget.{budget} is 0"
                    write = f"budget.{budget} = 3, or drop {action!r} from the rule"
                    yield ("respond", i, "do", rule.do.index(action)), needed, write

    def _cause_conflicts(self, path: Path, cause: str, rule: Respond) -> Iterator[Conflict]:
        """Yields the conflicts of one cause of a rule with the detectors that are on."""
        detector = detector_of(cause)
        if getattr(self.detect, detector) is None:
            needed = f"a cause whose detector is on; [detect.{detector}] is missing"
            yield path, needed, f"a table [detect.{detector}], or drop {cause!r} from the rule"
        # Some detectors raise alarms of the same cause, which the engine cannot distinguish.
        for other, config in self.detect._asdict().items():
            if config is None or other == detector or other in rule.to:
                continue
            if CAUSES[other] & CAUSES[cause]:
                needed = f"named with [detect.{other}], whose alarms have its cause too"
                yield path, needed, f'to = ["{cause}", "{other}"], or only one of the two tables'

    def config(self) -> EngineConfig:
        """Makes the core's config.

        Returns:
            The config without the parts that only the host uses. Floats are rounded to float32
            once, for all backends.
        """
        clip = None if isinstance(self.clip, NoClip) else rounded(self.clip)
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
    return to_float32(table) if isinstance(table, float) else table


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
