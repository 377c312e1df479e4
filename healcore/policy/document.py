"""`Policy`, the content of a policy file: its engine, its text, and differences of policies."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import tomli_w

from healcore.core.clipping import AdaGCConfig, AutoClipConfig, FixedConfig, ZClipConfig
from healcore.core.decision import NONFINITE, Action, Cause
from healcore.core.detectors import CAUSES, DETECTORS
from healcore.core.engine import (
    BudgetConfig,
    Engine,
    EngineConfig,
    IncidentConfig,
    LrConfig,
    RollbackConfig,
    RuleConfig,
)
from healcore.core.ranges import StepsOrZero, listed, one_of, text, whole
from healcore.policy.answers import FAULTS, Budget, Hang, Respond, Retry, Rollback, SkipBatch
from healcore.policy.tables import Conflict, dotted, rounded, written

SCHEMA = 1
"""Version of the file format that this release reads and writes."""

_BUDGET_KEYS = (("rollback", "recoveries"), ("cut_lr", "lr_cuts"), ("shrink_microbatch", "shrinks"))


class NoClip(NamedTuple):
    """No clipping."""

    kind = "none"


Detect = namedtuple("Detect", DETECTORS, defaults=[None] * len(DETECTORS))
"""All detectors, or None for those that are off."""
Detect.__annotations__ = {name: table | None for name, table in DETECTORS.items()}


@dataclass(frozen=True)
class Policy:
    """The detectors, the responses to them, and the limits of recovery.

    Policies are frozen and hashable, and compare by value. `healcore.policy.load` and `from_dict`
    validate the values; the constructor does not.
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
    detect: Detect = Detect()
    respond: tuple[Respond, ...] = ()
    incident: IncidentConfig = IncidentConfig()
    rollback: Rollback = Rollback()
    lr: LrConfig = LrConfig()
    budget: Budget = Budget()
    retry: Retry = Retry()
    skip_batch: SkipBatch = SkipBatch()
    hang: Hang = Hang()

    def conflicts(self) -> Iterator[Conflict]:
        """Yields rules that could never fire, or whose actions have no budget."""
        for i, rule in enumerate(self.respond):
            for j, cause in enumerate(rule.to if not rule.for_faults else ()):
                detector = detector_of(cause)
                path = ("respond", i, "to", j)
                if getattr(self.detect, detector) is None:
                    condition = f"a cause whose detector is on; [detect.{detector}] is missing"
                    write = f"a table [detect.{detector}], or drop {cause!r} from the rule"
                    yield path, cause, condition, write
                for other in DETECTORS.keys() - {detector, *rule.to}:
                    if CAUSES[other] & CAUSES[cause] and getattr(self.detect, other) is not None:
                        condition = f"named with [detect.{other}], whose alarms have its cause too"
                        write = f'to = ["{cause}", "{other}"], or only one of the two tables'
                        yield path, cause, condition, write
            for action, budget in _BUDGET_KEYS:
                if action in rule.do and getattr(self.budget, budget) == 0:
                    condition = f"an action with a budget above 0; budget.{budget} is 0"
                    write = f"budget.{budget} = 3, or drop {action!r} from the rule"
                    yield ("respond", i, "do", rule.do.index(action)), action, condition, write

    def config(self) -> EngineConfig:
        """The core's config. Floats are rounded to float32 once, for all backends."""
        tables = self.detect._asdict().items()
        return EngineConfig(
            mode=self.mode,
            clip=None if self.clip.kind == "none" else (self.clip.kind, rounded(self.clip)),
            detectors=tuple((name, rounded(table)) for name, table in tables if table is not None),
            rules=tuple(rule for rule in self._rules() if rule.skip or rule.action),
            incident=rounded(self.incident),
            rollback=rounded(self.rollback, RollbackConfig),
            lr=rounded(self.lr),
            budget=rounded(self.budget, BudgetConfig),
            max_skips=self.max_skips,
            grace_steps=self.grace_steps,
        )

    def _rules(self) -> Iterator[RuleConfig]:
        """The rules of the engine, without the actions of `host_rules`."""
        for rule in self.respond:
            if not rule.for_faults:
                config = rule.config()
                of_host = int(Action.ROLLBACK) if self._is_of_host(config) else 0
                yield config._replace(action=config.action & ~of_host)

    def host_rules(self) -> tuple[RuleConfig, ...]:
        """The rules that roll back for NaN or Inf if the weights have them, which a step hides."""
        rules = (rule.config() for rule in self.respond if not rule.for_faults)
        return tuple(
            rule._replace(skip=False, action=int(Action.ROLLBACK))
            for rule in rules
            if self._is_of_host(rule)
        )

    def _is_of_host(self, rule: RuleConfig) -> bool:
        only_nonfinite = not rule.causes & ~int(NONFINITE)
        return self.rollback.confirm and only_nonfinite and bool(rule.action & Action.ROLLBACK)

    def fault_actions(self) -> dict[Cause, frozenset[str]]:
        """The actions for each fault that the rules name; the host performs them."""
        actions: dict[Cause, frozenset[str]] = {}
        for rule in self.respond:
            for name in rule.to if rule.for_faults else ():
                cause = FAULTS[name][0]
                actions[cause] = actions.get(cause, frozenset()) | set(rule.do)
        return actions

    def engine(self) -> Engine:
        """The engine of this policy; engines of repeated calls are equal."""
        return Engine(self.config())


def detector_of(cause: str) -> str:
    """The table under [detect] for a cause; NaN in loss and in gradient share a table."""
    return "nonfinite" if cause.startswith("nonfinite_") else cause


def dumps(policy: Policy) -> str:
    """Writes a policy as TOML with every key, so that changed defaults do not affect the file.

    `loads(dumps(policy)) == policy`: numbers keep all digits and are not rounded to float32.
    """
    return tomli_w.dumps(to_dict(policy))


def to_dict(policy: Policy) -> dict[str, Any]:
    """The policy as plain mappings, lists, strings, bools and numbers; JSON-safe."""
    return written(policy)


class Difference(NamedTuple):
    """A key with different values in two policies; None if a policy lacks the key."""

    key: str
    left: Any
    right: Any


def diff(left: Policy, right: Policy) -> tuple[Difference, ...]:
    """The keys with different values, in the order of the file, defaults included.

    Rules are compared by position. If only one policy has a table, each key of the table is listed,
    or the table itself if it is empty.
    """
    a, b = dict(_flat(to_dict(left))), dict(_flat(to_dict(right)))
    keys = [*a, *(key for key in b if key not in a)]
    pairs = ((key, a.get(key), b.get(key)) for key in keys)
    return tuple(Difference(key, x, y) for key, x, y in pairs if x != y)


def _flat(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(data, dict):
        parts = list(data.items())
    elif isinstance(data, list) and data and isinstance(data[0], dict):
        parts = list(enumerate(data))
    else:
        yield dotted(path), data
        return
    if not parts:
        yield dotted(path), {}
    for key, value in parts:
        yield from _flat(value, (*path, key))


def fingerprint(policy: Policy) -> str:
    """Sixteen hex digits, equal for equal numbers in the core (within one release of healcore).

    Name, description and references do not count. Numbers count as float32: 0.97 and 0.9700000001
    give the same fingerprint. Equals `Engine.fingerprint`.
    """
    digest = policy.engine().fingerprint
    assert digest is not None, "a policy has Python numbers, not arrays"
    return digest
