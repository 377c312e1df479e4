"""Defines `Policy`, a whole policy file, and turns it into the config of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from healcore.core.detectors import CAUSES, DETECTORS
from healcore.core.engine import Engine, EngineConfig
from healcore.core.verdict import Cause
from healcore.policy.clip import Clip, NoClip, UpdateClip
from healcore.policy.detect import Detect
from healcore.policy.faults import FAULTS, Hang, Retry, SkipBatch
from healcore.policy.recovery import Budget, IncidentPolicy, Lr, Rollback
from healcore.policy.respond import Respond
from healcore.policy.table import Conflict, Table
from healcore.policy.values import Listed, Mode, Name, StepsOrZero, Text, Whole, Words, broken

SCHEMA = 1
"""Version of the file format that this release reads and writes."""


_BUDGETED = (("rollback", "recoveries"), ("cut_lr", "lr_cuts"), ("shrink_microbatch", "shrinks"))


def _entries(value: Any) -> Any:
    """Turns a TOML list into the tuple that a frozen policy has."""
    if not isinstance(value, list | tuple):
        raise broken("an array of tables")
    return tuple(value)


class Policy(Table):
    """What to watch, what to do about it, and how often.

    Frozen and hashable; policies with equal values are equal. `healcore.policy.load` makes one, and
    its errors name what to write instead. Built by hand it raises pydantic's `ValidationError`.
    """

    host_only = frozenset({"retry", "skip_batch", "hang"})

    schema_version: Annotated[int, Whole(least=SCHEMA, most=SCHEMA)] = Field(alias="schema")
    name: Name
    description: Words = ""
    references: Annotated[tuple[str, ...], Listed(Text(empty=False), empty=True)] = ()
    mode: Mode = "heal"
    max_skips: StepsOrZero = EngineConfig().max_skips
    grace_steps: StepsOrZero = EngineConfig().grace_steps
    clip: Clip = NoClip()
    update_clip: UpdateClip | None = None
    detect: Detect = Detect()
    respond: Annotated[tuple[Respond, ...], BeforeValidator(_entries)] = ()
    incident: IncidentPolicy = IncidentPolicy()
    rollback: Rollback = Rollback()
    lr: Lr = Lr()
    budget: Budget = Budget()
    retry: Retry = Retry()
    skip_batch: SkipBatch = SkipBatch()
    hang: Hang = Hang()

    def conflicts(self) -> Iterator[Conflict]:
        """Every rule has to be able to fire and to be carried out."""
        for i, rule in enumerate(self.respond):
            for j, cause in enumerate(rule.to if not rule.for_faults else ()):
                detector = detector_of(cause)
                if getattr(self.detect, detector) is None:
                    yield Conflict(
                        ("respond", i, "to", j),
                        cause,
                        f"a cause that is watched for; there is no [detect.{detector}]",
                        f"a table [detect.{detector}], or drop {cause!r} from the rule",
                    )
                for other in self._mistaken_for(cause, rule.to):
                    yield Conflict(
                        ("respond", i, "to", j),
                        cause,
                        f"the only one to raise {CAUSES[cause].name}; [detect.{other}] does too, "
                        "and rules match causes, not detectors",
                        f'to = ["{cause}", "{other}"], or only one of the two tables',
                    )
            for action, budget in _BUDGETED:
                if action in rule.do and getattr(self.budget, budget) == 0:
                    yield Conflict(
                        ("respond", i, "do", rule.do.index(action)),
                        action,
                        f"an action that needs a budget; budget.{budget} is 0",
                        f"budget.{budget} = 3, or drop {action!r} from the rule",
                    )

    def _mistaken_for(self, cause: str, named: tuple[str, ...]) -> Iterator[str]:
        """Detectors that are on, have a flag of `cause`, and are not named next to it."""
        flags = CAUSES[cause]
        for other in DETECTORS:
            if other in named or other == detector_of(cause) or not CAUSES[other] & flags:
                continue
            if getattr(self.detect, other) is not None:
                yield other

    def config(self) -> EngineConfig:
        """The core's config; every float is rounded to float32 once, for all backends."""
        watched = ((name, getattr(self.detect, name)) for name in DETECTORS)
        return EngineConfig(
            mode=self.mode,
            clip=self.clip.rule(),
            update_clip=None if self.update_clip is None else self.update_clip.config(),
            detectors=tuple((name, table.config()) for name, table in watched if table is not None),
            rules=tuple(rule.config() for rule in self.respond if not rule.for_faults),
            incident=self.incident.config(),
            rollback=self.rollback.config(),
            lr=self.lr.config(),
            budget=self.budget.config(),
            max_skips=self.max_skips,
            grace_steps=self.grace_steps,
        )

    def fault_actions(self) -> dict[Cause, frozenset[str]]:
        """What the rules answer to each fault that they name; the engine does not have these."""
        found: dict[Cause, frozenset[str]] = {}
        for rule in self.respond:
            for name in rule.to if rule.for_faults else ():
                cause = FAULTS[name][0]
                found[cause] = found.get(cause, frozenset()) | set(rule.do)
        return found

    def engine(self) -> Engine:
        """The pure state machine of this policy; every call gives an equal one."""
        return Engine(self.config())


def detector_of(cause: str) -> str:
    """The table under [detect] for a cause; NaN in loss and in gradient share one."""
    return "nonfinite" if cause.startswith("nonfinite_") else cause
