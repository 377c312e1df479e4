"""`Policy`: the content of a policy file, its engine, and its text.

`responses` has the tables for the answers of a run to trouble.
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
from healcore.core.ranges import StepsOrZero, one_of, whole
from healcore.policy.responses import (
    FAULTS,
    Budget,
    Hang,
    IncidentTable,
    Respond,
    Retry,
    Rollback,
    SkipBatch,
)
from healcore.policy.tables import Conflict, listed, rounded, text, written

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
